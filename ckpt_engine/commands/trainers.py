"""``ckpt-engine trainer list|evict``: which runs the manager knows and what they hold of its memory; taking one out."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from ckpt_engine.addresses import MANAGER
from ckpt_engine.commands.asking import Manager, ask_manager
from ckpt_engine.commands.lines import Text
from ckpt_engine.v1 import manager_pb2

Lineage = Annotated[str, typer.Argument(help="The run's lineage, as `ckpt-engine trainer list` names it.")]


def list_trainers(manager: Manager = MANAGER) -> None:
    """Show each run, how many of its ranks are connected, and what the manager keeps for whom."""
    answer = ask_manager(manager, lambda client: client.status(), "its status")
    Console().print(*tables(answer))


def evict(
    lineage: Lineage,
    manager: Manager = MANAGER,
    reason: Annotated[str, typer.Option(help="For the logs of its ranks.")] = "",
) -> None:
    """Forget a run and all that the manager keeps of it; ranks that are connected are sent away for good.

    Replicas keep what they serve. A run that was killed is forgotten by itself after a while.
    """
    answer = ask_manager(manager, lambda client: client.forget(lineage, reason), f"eviction of {lineage}")
    typer.echo(f"lineage {lineage}: evicted, {answer.ranks} ranks, {answer.connected} of them connected")


def tables(answer: manager_pb2.GetStatusResponse) -> tuple[Table, Table]:
    """The runs, and what is kept in the manager's store for them and others."""
    runs = Table("lineage", "ranks", "connected", "published", title="Runs", title_justify="left", box=None)
    for lineage in sorted({trainer.lineage for trainer in answer.trainers}):
        ranks = [trainer for trainer in answer.trainers if trainer.lineage == lineage]
        connected = sum(trainer.connected for trainer in ranks)
        runs.add_row(
            Text(lineage),
            f"{len(ranks)} of {ranks[0].world_size}",
            Text(str(connected), style="green" if connected == ranks[0].world_size else "yellow"),
            str(sum(trainer.published for trainer in ranks)),
        )
    if not answer.trainers:
        runs.add_row(Text("none", style="dim"))
    kept = Table("kept for", "bytes", title="In the manager's store", title_justify="left", box=None)
    for holding in sorted(answer.holdings, key=lambda holding: -holding.bytes):
        kept.add_row(Text(holding.owner), str(holding.bytes))
    if not answer.holdings:
        kept.add_row(Text("nobody", style="dim"), "0")
    return runs, kept
