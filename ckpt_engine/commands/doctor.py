"""``ckpt-engine doctor``: what works on this host, what does not, and why."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from ckpt_engine.doctor.host_checks import HostCheck, Result, all_checks, as_json, works

_STYLES = {Result.OK: "green", Result.NO: "red", Result.NOTE: "yellow"}


def doctor(
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Try out everything on this host that an update may need, and print what was found.

    Exits with 0 if weights can reach an inference server over shared memory, with 1 otherwise.
    """
    checks = list(all_checks())
    if json_output:
        typer.echo(as_json(checks))
    else:
        _print_table(checks)
    raise typer.Exit(0 if works(checks) else 1)


def _print_table(checks: Sequence[HostCheck]) -> None:
    from rich.table import Table

    from ckpt_engine.commands.lines import Text, table_console

    table = Table(box=None, pad_edge=False)
    for heading in ("", "what", "", "found"):
        table.add_column(heading, overflow="fold")
    group = ""
    for check in checks:
        # Text, not markup: an error message may hold brackets.
        group_cell = "" if check.group == group else check.group
        group = check.group
        result = Text(check.result.value, style=_STYLES[check.result])
        table.add_row(Text(group_cell, style="bold"), Text(check.name), result, Text(check.detail))
    console = table_console()
    console.print(table)
    verdict = (
        "Updates over shared memory work here." if works(checks) else "Updates over shared memory do not work here."
    )
    console.print(Text(verdict, style="bold"))
