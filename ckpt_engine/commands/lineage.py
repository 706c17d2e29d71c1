"""``ckpt-engine lineage list|evict|forget``: lists lineages and what uses each, and ends one."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import typer
from rich.table import Table

from ckpt_engine.addresses import MANAGER
from ckpt_engine.commands.asking import Manager, ask_manager
from ckpt_engine.commands.lines import Text, table_console
from ckpt_engine.core.message_json import as_json_array
from ckpt_engine.core.names import printable
from ckpt_engine.v1 import manager_pb2

Name = Annotated[str, typer.Argument(help="The lineage, as `ckpt-engine lineage list` names it.")]


def list_lineages(
    manager: Manager = MANAGER,
    json_output: Annotated[bool, typer.Option("--json", help="Print a JSON array, as of `status`.")] = False,
) -> None:
    """Show each lineage with its ranks, replicas and readable versions; and what the manager's store keeps for each.

    A lineage without any of these is forgotten after a while.
    """
    answer = ask_manager(manager, lambda client: client.status(), "its status")
    if json_output:
        typer.echo(as_json_array(answer.lineages))
    else:
        table_console().print(table(answer.lineages), _store_table(answer))


def evict(
    lineage: Name,
    manager: Manager = MANAGER,
    reason: Annotated[str, typer.Option(help="Reason, for the logs of its ranks.")] = "",
) -> None:
    """End a run: its ranks' sessions end for good, and what they published is released.

    Replicas keep what they serve. A run that was killed loses its ranks by itself after a while.
    """
    answer = ask_manager(manager, lambda client: client.evict_lineage(lineage, reason), f"eviction of {lineage}")
    count = f"{answer.ranks} rank{'s' * (answer.ranks != 1)}"
    typer.echo(printable(f"lineage {lineage}: evicted, {count}, {answer.connected} of them connected"))


def forget(
    lineage: Name,
    manager: Manager = MANAGER,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
) -> None:
    """Forget a lineage that no rank and no replica uses, now and not after a while: new replicas do not get it.

    Prints the effects and asks first; without a terminal it needs --yes. The numbers of its versions stay taken. Exits
    with 1 while ranks or replicas use it.
    """
    what = f"forgetting {lineage}"
    effects = ask_manager(manager, lambda client: client.forget(lineage, dry_run=True), what)
    for effect in effects:
        typer.echo(printable(f"lineage {lineage}: {effect}"), err=True)
    if effects and not yes:
        if not sys.stdin.isatty():
            typer.echo(printable(f"lineage {lineage}: not forgotten: --yes says that this is wanted"), err=True)
            raise typer.Exit(1)
        typer.confirm("Forget it?", abort=True, err=True)
    ask_manager(manager, lambda client: client.forget(lineage), what)
    typer.echo(printable(f"lineage {lineage}: forgotten"))


def table(lineages: Sequence[manager_pb2.LineageStatus]) -> Table:
    """One row a lineage."""
    rows = Table(title="Lineages", title_justify="left", box=None)
    for title in ("lineage", "version", "ranks", "replicas", "read from"):
        rows.add_column(title, overflow="fold")
    for each in lineages:
        whole = 0 < each.world_size == each.connected == each.published
        ranks = f"{each.connected} of {each.world_size} connected, {each.published} published"
        rows.add_row(
            Text(each.lineage),
            str(each.latest.version) if each.HasField("latest") else "none",
            Text(ranks if each.world_size else "none", style="green" if whole else "yellow" if each.world_size else ""),
            str(each.replicas or "none"),
            f"{each.sources} source{'s' * (each.sources != 1)}" if each.sources else "none",
        )
    if not lineages:
        rows.add_row(Text("none", style="dim"))
    return rows


def _store_table(answer: manager_pb2.GetStatusResponse) -> Table:
    """Bytes in the manager's store, one row for each member or lineage that they are kept for."""
    rows = Table("kept for", "bytes", title="In the manager's store", title_justify="left", box=None)
    for holding in sorted(answer.holdings, key=lambda holding: -holding.bytes):
        rows.add_row(Text(holding.owner), str(holding.bytes))
    if not answer.holdings:
        rows.add_row(Text("nothing", style="dim"), "0")
    return rows
