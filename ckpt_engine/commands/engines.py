"""``ckpt-engine engines``: what each engine can do and cannot, as its adapter declares it."""

from __future__ import annotations

from typing import Annotated

import typer

from ckpt_engine.agent.declarations import declared, markdown


def engines(
    as_markdown: Annotated[
        bool, typer.Option("--markdown", help="Print the source of docs/engines/README.md.")
    ] = False,
) -> None:
    """Shows pause modes, sleep levels, layouts and limits of every engine that ckpt-engine drives."""
    page = markdown(declared())
    if as_markdown:
        typer.echo(page, nl=False)
        return
    from rich.console import Console
    from rich.markdown import Markdown

    Console().print(Markdown(page))
