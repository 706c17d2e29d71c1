"""``ckpt-engine sleep``: has replicas give their memory up, as a trainer's loop or an operator would."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from ckpt_engine.addresses import MANAGER
from ckpt_engine.commands.asking import Manager, Names, Pool, ask_manager
from ckpt_engine.commands.options import waited
from ckpt_engine.core.deadlines import Deadlines
from ckpt_engine.v1 import manager_pb2

Timeout = Annotated[float, typer.Option(help="Seconds that the slowest may take.", min=1, callback=waited)]


def sleep(
    replicas: Names = None,
    manager: Manager = MANAGER,
    pool: Pool = "",
    level: Annotated[int, typer.Option(help="1 keeps weights on the host, 2 discards them.", min=1)] = 1,
    timeout: Timeout = Deadlines.sleep_wake,
) -> None:
    """Close replicas and give their memory up, until they are woken; an update wakes hybrid ones.

    Exits with 1 if one of them does not sleep, and says why.
    """
    what = f"sleep, up to {timeout:g} s"
    names = tuple(replicas or ())
    show(
        ask_manager(manager, lambda client: client.sleep(level, replicas=names, pool=pool, timeout=timeout), what),
        "asleep",
    )


def show(results: Sequence[manager_pb2.SleepWakeResult], done: str) -> None:
    """One line a replica; exits with 1 if there is a problem among them."""
    failed = False
    for result in results:
        wrong = result.HasField("problem")
        failed = failed or wrong
        typer.echo(f"replica {result.replica}: {result.problem.message if wrong else done}", err=wrong)
    if failed:
        raise typer.Exit(1)
