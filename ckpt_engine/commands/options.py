"""Options that several commands share, and how their values are read."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from ckpt_engine.core.deadlines import ENVIRONMENT, Deadlines, check_seconds
from ckpt_engine.core.problems import CkptEngineError

Deadline = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=SECONDS",
        help=f"Sets a deadline of docs/configuration.md, also over {ENVIRONMENT}; repeatable.",
    ),
]

Certificate = Annotated[Path | None, typer.Option(help="Our certificate (PEM): serve over TLS.")]
Key = Annotated[Path | None, typer.Option(help="Its key (PEM).")]
ClientAuthority = Annotated[
    Path | None, typer.Option(help="Require certificates from callers that this one (PEM) has signed.")
]
Insecure = Annotated[bool, typer.Option("--insecure", help="Serve other machines without authentication.")]


def _waitable(seconds: float | None) -> float | None:
    """Checks --timeout. Raises typer.BadParameter for a number that is not a time."""
    try:
        if seconds is not None:
            check_seconds("a timeout", seconds)
    except CkptEngineError as error:
        raise typer.BadParameter(error.problem.message) from error
    return seconds


Timeout = Annotated[
    float | None,
    typer.Option(
        metavar="SECONDS",
        callback=_waitable,
        help="Seconds that this may take in all; the command waits no longer. Default: docs/configuration.md.",
    ),
]
KeepDraft = Annotated[
    bool,
    typer.Option(
        "--keep-draft",
        help="Servers with a draft model keep its weights if the version has none for it. Default: they are left out.",
    ),
]
Wait = Annotated[bool, typer.Option("--wait", help="Wait for the end, for --timeout SECONDS at most.")]


def seconds_to_wait(wait: bool, timeout: float | None, usual: float) -> float | None:
    """Seconds to wait by --wait and --timeout; None: not at all. usual: without a --timeout. Raises typer.BadParameter
    for --timeout without --wait."""
    if wait:
        return usual if timeout is None else timeout
    if timeout is not None:
        raise typer.BadParameter("only with --wait, which waits so long", param_hint="--timeout")
    return None


def configured_deadlines(settings: Sequence[str] | None) -> Deadlines:
    """The defaults, changed by the environment, changed by `--deadline NAME=SECONDS`.

    The result goes back into the environment: an engine that this process launches waits by the same values.
    Raises typer.BadParameter for what cannot be.
    """
    text = " ".join((os.environ.get(ENVIRONMENT, ""), *(settings or ()))).strip()
    try:
        deadlines = Deadlines().changed(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=f"--deadline or {ENVIRONMENT}") from error
    if text:
        os.environ[ENVIRONMENT] = text
    return deadlines
