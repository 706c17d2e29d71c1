"""``ckpt-engine update``: bring all replicas to the weights of a checkpoint directory."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Self

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from ckpt_engine.commands.asking import LOCAL, Manager
from ckpt_engine.commands.choices import PauseMode, Prefetch, Until
from ckpt_engine.commands.options import configured_deadlines
from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.extras import require
from ckpt_engine.report import human_bytes
from ckpt_engine.v1 import manager_pb2

CONNECT_SECONDS = 10.0
"""The longest that somebody at a terminal waits for a manager; a training run waits longer."""

LINEAGE = "checkpoint"
"""Of checkpoint directories, unless told otherwise: one line of versions for whoever calls this again and again."""


def update(
    checkpoint: Annotated[Path, typer.Option(help="A directory of safetensors files, or one such file.")],
    manager: Manager = LOCAL,
    version: Annotated[
        int | None, typer.Option(help="Rises from update to update. Default: the lineage's last one plus one.")
    ] = None,
    lineage: Annotated[str, typer.Option(help="What the version counts in; going back needs another one.")] = LINEAGE,
    pause_mode: Annotated[
        PauseMode | None, typer.Option(help="What becomes of running requests. Default: the engine's.")
    ] = None,
    timeout: Annotated[float | None, typer.Option(help="Of the whole update, seconds.")] = None,
    min_replicas: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="So many suffice: refuse to update fewer, exit with 0 if so many serve. Default: all must serve.",
        ),
    ] = None,
    replica: Annotated[list[str] | None, typer.Option(help="Only this one. May be repeated. Default: all.")] = None,
    prefetch: Annotated[
        Prefetch, typer.Option(help="Whether relays bring the weights before anything is paused.")
    ] = Prefetch.AUTO,
    until: Annotated[
        Until, typer.Option(help="Return when all replicas have an outcome, or when relays hold the weights.")
    ] = Until.INSTALLED,
    check_finite: Annotated[
        bool, typer.Option("--check-finite", help="Refuse weights that hold NaN or infinity.")
    ] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print the report as one JSON object.")] = False,
) -> None:
    """Bring all replicas to the weights of a checkpoint directory.

    The files are read in place by every replica of this host; they must not change meanwhile. Repeated calls use one
    lineage, "checkpoint", so versions rise from call to call, whichever directory they name.

    Exits with 0 only if every registered replica serves the new weights, verified, also those that are not connected;
    with --min-replicas if at least so many do, with --replica if those do, with --until held if relays hold them.
    Replicas that cannot take part are left out and named.
    """
    require("trainer", "torch", "numpy", what="this command")
    from ckpt_engine.trainer.trainer import Trainer

    limits = configured_deadlines(None)
    limits = replace(limits, connect=min(limits.connect, CONNECT_SECONDS))
    try:
        with Trainer(manager, lineage=lineage, deadlines=limits) as trainer, _shown(quiet=json_output) as shown:
            trainer.publish(checkpoint, check_finite=check_finite)
            report = trainer.update_weights(
                version,
                pause_mode=pause_mode,
                timeout=timeout,
                min_replicas=min_replicas,
                replicas=tuple(replica or ()),
                prefetch=prefetch,
                until=until,
                on_progress=shown.progress,
            )
    except CkptEngineError as error:
        if json_output:
            code = type(error.problem).Code.Name(error.problem.code)
            typer.echo(json.dumps({"ok": False, "code": code, "problem": error.problem.message}))
        else:
            typer.echo(f"ckpt-engine update: {error}", err=True)
        raise typer.Exit(1) from error
    except KeyboardInterrupt:
        typer.echo("ckpt-engine update: interrupted; what the replicas do is in `ckpt-engine status`", err=True)
        raise typer.Exit(130) from None
    typer.echo(json.dumps(report.to_dict()) if json_output else str(report))
    raise typer.Exit(0 if report.held or (report.ok and report.verified) else 1)


class _Lines(AbstractContextManager["_Lines"]):
    """A plain line for each new stage of each replica: for logs and pipes. quiet: nothing at all."""

    def __init__(self, quiet: bool) -> None:
        self._quiet = quiet
        self._last: dict[str, str] = {}

    def __exit__(self, *_: object) -> None:
        self._last.clear()

    def progress(self, progress: manager_pb2.UpdateProgress) -> None:
        said = describe(progress)
        if not self._quiet and self._last.get(progress.replica) != said:
            self._last[progress.replica] = said
            typer.echo(f"{progress.replica or 'update'}: {said}", err=True)


class _Bars(AbstractContextManager["_Bars"]):
    """One bar a replica, on a terminal."""

    def __init__(self) -> None:
        self._bars = Progress(
            TextColumn("{task.fields[replica]}", style="bold"),
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[amount]}"),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def progress(self, progress: manager_pb2.UpdateProgress) -> None:
        name = progress.replica or "update"
        if name not in self._tasks:
            self._tasks[name] = self._bars.add_task("", replica=name, amount="", total=None)
        task = self._tasks[name]
        self._bars.update(task, description=describe(progress))
        if progress.bytes_total:
            amount = f"{human_bytes(progress.bytes_done)} of {human_bytes(progress.bytes_total)}"
            self._bars.update(task, completed=progress.bytes_done, total=progress.bytes_total, amount=amount)


def describe(progress: manager_pb2.UpdateProgress) -> str:
    """What is going on, in a few words: what the manager says of the whole, or the stage of a replica."""
    return progress.message or (manager_pb2.Stage.Name(progress.stage).lower() if progress.stage else "waiting")


def _shown(quiet: bool) -> _Lines | _Bars:
    return _Bars() if not quiet and Console(stderr=True).is_terminal else _Lines(quiet)
