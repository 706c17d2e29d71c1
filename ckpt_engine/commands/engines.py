"""``ckpt-engine engines``: what each engine can do and cannot, as its adapter declares it, and which are here."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Annotated

import typer

from ckpt_engine.commands.engine_choice import Engine
from ckpt_engine.engine.adapter import load_adapter
from ckpt_engine.engine.declarations import declared, facts, markdown
from ckpt_engine.engine.kinds import UnknownAdapterError, engine_names

COLUMNS = 80


def engines(
    engine: Annotated[Engine | None, typer.Argument(help="Only this engine.")] = None,
    as_markdown: Annotated[
        bool, typer.Option("--markdown", help="Print the source of docs/engines/README.md.")
    ] = False,
) -> None:
    """Show pause modes, sleep levels, layouts and limits of every engine that ckpt-engine drives."""
    if as_markdown:
        typer.echo(markdown(declared()), nl=False)
        return
    kinds = engine_names() if engine is None else (engine,)
    typer.echo("\n\n".join("\n".join(_lines(kind)) for kind in kinds))


def _lines(kind: str) -> Iterator[str]:
    yield kind
    try:
        adapter = load_adapter(kind)
    except UnknownAdapterError as error:
        yield from _wrap("here: ", str(error))
        return
    found, of = adapter.availability(), adapter.CAPABILITIES
    yield from _wrap("here: ", f"{found.version}; {found.reason}".strip("; ") or "ready")
    for what, fact in facts(of):
        yield from _wrap(f"{what}: ", fact)
    for note in of.notes:
        yield from _wrap("- ", note)
    for limit in of.cannot:
        yield from _wrap("- limit: ", limit)


def _wrap(first: str, text: str) -> list[str]:
    return textwrap.wrap(
        text.replace("`", ""),
        COLUMNS,
        initial_indent=f"  {first}",
        subsequent_indent="    ",
        break_long_words=False,
        break_on_hyphens=False,
    )
