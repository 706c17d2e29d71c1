"""``ckpt-engine pull``: write the weights of a version that the cluster holds into a directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from ckpt_engine.addresses import MANAGER
from ckpt_engine.commands.asking import Manager
from ckpt_engine.commands.options import configured_deadlines
from ckpt_engine.commands.progress import refusal_exit
from ckpt_engine.connection import checked_address
from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.core.sizes import human_bytes
from ckpt_engine.extras import require


def pull(
    directory: Annotated[Path, typer.Argument(help="Directory to write; it is created, or must be empty.")],
    manager: Manager = MANAGER,
    version: Annotated[int | None, typer.Option(min=0, help="Number of the version. Default: the latest.")] = None,
    lineage: Annotated[
        str | None, typer.Option(help="Lineage of the version. Default: the only one with a readable version.")
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print what was written as one JSON object.")] = False,
) -> None:
    """Write the weights of a version into a directory, as safetensors files, each tensor verified.

    They come from relays that hold it, or from a trainer that keeps it sealed, without configuration and tokenizer.
    The directory appears only when it is complete.
    """
    try:
        checked_address(manager)
        require("trainer", "torch", "numpy", what="this command")
        from ckpt_engine.reading import pulling  # takes seconds, for which no mistake above should wait

        progress = _ProgressLines(quiet=json_output)
        name, number = pulling.pull(
            manager, directory, lineage, version, on_progress=progress, deadlines=configured_deadlines(None)
        )
    except CkptEngineError as error:
        raise refusal_exit("pull", error, json_output) from error
    except KeyboardInterrupt:
        typer.echo(f"ckpt-engine pull: interrupted; {directory} is as it was", err=True)
        raise typer.Exit(130) from None
    if json_output:
        typer.echo(json.dumps({"ok": True, "lineage": name, "version": number, "directory": str(directory)}))
    else:
        typer.echo(f"version {number} of lineage {name!r} is in {directory}, verified")


class _ProgressLines:
    """Prints a line for each tenth that is written."""

    def __init__(self, quiet: bool) -> None:
        self._quiet, self._tenths = quiet, 0

    def __call__(self, done: int, total: int) -> None:
        tenths = done * 10 // max(total, 1)
        if tenths > self._tenths and not self._quiet:
            self._tenths = tenths
            typer.echo(f"{tenths * 10} % of {human_bytes(total)}", err=True)
