"""Progress of an update for people, bars on a terminal and lines in logs; then its report, or why there is none."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager
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

from ckpt_engine.commands.asking import with_replica
from ckpt_engine.core.enums import enum_word
from ckpt_engine.core.message_json import as_dict
from ckpt_engine.core.names import printable
from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.core.sizes import human_bytes
from ckpt_engine.report import UpdateReport
from ckpt_engine.v1 import manager_pb2

Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Print the whole report, with a row a replica.")]


class _PlainLines(AbstractContextManager["_PlainLines"]):
    """Prints a plain line for each new stage of each replica: for logs and pipes. quiet: prints nothing."""

    def __init__(self, quiet: bool) -> None:
        self._quiet = quiet
        self._last: dict[str, str] = {}

    def __exit__(self, *_: object) -> None:
        self._last.clear()

    def progress(self, progress: manager_pb2.UpdateProgress) -> None:
        line = describe(progress)
        if not self._quiet and self._last.get(progress.replica) != line:
            self._last[progress.replica] = line
            typer.echo(f"{progress.replica or 'update'}: {line}", err=True)


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
    """The current step in a few words: the manager's message about the whole, or a replica's stage."""
    return progress.message or (enum_word(manager_pb2.Stage, progress.stage) if progress.stage else "waiting")


ProgressDisplay = _PlainLines | _Bars


def progress_display(quiet: bool) -> ProgressDisplay:
    """Bars on a terminal, lines elsewhere, nothing if quiet."""
    return _Bars() if not quiet and Console(stderr=True).is_terminal else _PlainLines(quiet)


def refusal_exit(command: str, error: CkptEngineError, json_output: bool) -> typer.Exit:
    """Prints why there is no report; returns the exit to raise."""
    if json_output:
        typer.echo(json.dumps({"ok": False, "problem": as_dict(error.problem)}))
    else:
        typer.echo(f"ckpt-engine {command}: {printable(with_replica(error.problem))}", err=True)
    return typer.Exit(error.exit_status)


def interrupt_exit(command: str) -> typer.Exit:
    """Prints what Ctrl-C leaves behind; returns the exit to raise."""
    typer.echo(f"ckpt-engine {command}: interrupted; what the replicas do is in `ckpt-engine status`", err=True)
    return typer.Exit(130)


def report_exit(report: UpdateReport, json_output: bool, verbose: bool) -> typer.Exit:
    """Prints the report, in two lines or all of it (verbose); returns the exit to raise.

    The status is 0 if the update is ok and verified, if the call ended when relays held the version (--until held), or
    if a dry run is ok.
    """
    text = json.dumps(report.to_dict()) if json_output else printable(report.details if verbose else str(report))
    typer.echo(text)
    return typer.Exit(0 if report.held or (report.ok and (report.verified or report.dry_run)) else 1)
