"""``ckpt-engine version list``: lists the versions that can be read or gone back to, and those that replicas hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer
from rich.table import Table

from ckpt_engine.addresses import MANAGER
from ckpt_engine.commands.asking import Manager, ask_manager
from ckpt_engine.commands.lines import Text, table_console
from ckpt_engine.core.message_json import as_json_array
from ckpt_engine.v1 import manager_pb2


def list_versions(
    manager: Manager = MANAGER,
    lineage: Annotated[str | None, typer.Option(help="Only this lineage. Default: all.")] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print a JSON array.")] = False,
) -> None:
    """Show each version that something holds as it was sealed, or a replica serves: the newest of a run first.

    What a relay, a trainer's ranks ("rank 0") or files hold can be gone back to (`ckpt-engine rollback`) and read
    (`ckpt-engine pull`).
    """
    found = ask_manager(manager, lambda client: client.versions(lineage), "its status")
    if json_output:
        typer.echo(as_json_array(found))
    else:
        table_console().print(table(found))


def table(versions: Sequence[manager_pb2.VersionStatus]) -> Table:
    """One row a version."""
    rows = Table("lineage", "version", "root", "held by", "in replicas", box=None)
    for each in versions:
        held, inside = ", ".join(each.holders), ", ".join(each.replicas)
        name, root = each.identity, each.identity.root.hex()
        rows.add_row(Text(name.lineage), str(name.version), root[:12], Text(held or "-"), Text(inside or "-"))
    if not versions:
        rows.add_row(Text("none", style="dim"), "", "", "", "")
    return rows
