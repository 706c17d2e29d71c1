"""``ckpt-engine demo``: training, updates and inference on this machine, to watch."""

from __future__ import annotations

import asyncio
import json
import signal
from typing import Annotated

import typer
from rich.console import Console

from ckpt_engine.commands.engine_choice import Engine
from ckpt_engine.demo import task
from ckpt_engine.demo.play import Outcome, play
from ckpt_engine.demo.servers import DEFAULT
from ckpt_engine.demo.show import ConsoleShow
from ckpt_engine.demo.stage import DemoSettings
from ckpt_engine.engine.kinds import UnknownAdapterError
from ckpt_engine.extras import require

MOST_HOSTS = 9
"""Each costs an engine."""


def demo(
    json_output: Annotated[
        bool, typer.Option("--json", help="Print one JSON object on standard output, all else on standard error.")
    ] = False,
    engine: Annotated[
        Engine, typer.Option(help="Engine that serves the model. All but the default must be installed.")
    ] = DEFAULT,
    updates: Annotated[
        int, typer.Option(min=1, max=task.STEPS + 1, help="How often the replicas get new weights.")
    ] = 6,
    tensor_parallel: Annotated[
        bool, typer.Option("--tensor-parallel", help="Split each replica's model over two workers.")
    ] = False,
    hosts: Annotated[
        int,
        typer.Option(
            min=1,
            max=MOST_HOSTS,
            help="Hosts with networks of their own (Linux, root): the trainer on the first, a replica on each of the "
            "others, a relay on each. 1: all on loopback.",
        ),
    ] = 1,
    standby: Annotated[
        bool,
        typer.Option(
            "--standby",
            help="Run two managers on a ledger in PostgreSQL, and kill the one that leads in the middle of an update.",
        ),
    ] = False,
    page: Annotated[
        bool, typer.Option("--page", help="Show the manager's page, and keep everything running until Ctrl-C.")
    ] = False,
) -> None:
    """Train a tiny model on this machine and watch replicas follow.

    Starts a manager, two agents with an inference server each, and two trainer ranks, in processes of their own on
    free ports of the loopback interface. It needs no GPU and no network, and removes all files but the logs of a demo
    that failed. With --hosts the processes run on hosts with networks of their own, and each update prints the bytes
    on the wire. With --standby the manager is killed in the middle of an update, which another one ends. With --page
    the manager's page shows everything. Exits with 0 only if every update was verified and every replica recites the
    text in the end.
    """
    require("demo", "torch", "numba", "transformers", what="this command")
    if page and hosts > 1:
        raise typer.BadParameter("no browser of this machine reaches the network of --hosts: leave one of them out")
    if standby and (page or hosts > 1):
        raise typer.BadParameter("--standby runs on this machine, without --page and --hosts")
    if standby and updates < 2:
        raise typer.BadParameter("--standby kills the manager in a later update than the first: --updates 2 or more")
    settings = DemoSettings(
        engine=engine,
        updates=updates,
        tensor_parallel=2 if tensor_parallel else 1,
        replicas=hosts - 1 if hosts > 1 else 2,
        hosts=hosts,
        standby=standby,
        page=page,
    )
    try:
        outcome = asyncio.run(_show(settings, _console(json_output)))
    except UnknownAdapterError as error:
        raise typer.BadParameter(str(error), param_hint="--engine") from error
    except (KeyboardInterrupt, asyncio.CancelledError):
        typer.echo("ckpt-engine demo: interrupted; everything was stopped", err=True)
        raise typer.Exit(130) from None
    if json_output:
        typer.echo(json.dumps(outcome.to_dict()))
    raise typer.Exit(0 if outcome.ok else 1)


def _console(json_output: bool) -> Console:
    console = Console(stderr=json_output, highlight=False)
    # A log or a pipe has no width; the final table needs this one.
    return console if console.is_terminal else Console(stderr=json_output, highlight=False, width=140)


async def _show(settings: DemoSettings, console: Console) -> Outcome:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    with ConsoleShow(console) as show:
        show.introduce(settings)
        outcome = await play(settings, show)
        show.end(outcome)
    return outcome
