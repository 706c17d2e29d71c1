"""``ckpt-engine manager``: one manager in the foreground, until SIGTERM or SIGINT."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckpt_engine.addresses import MANAGER
from ckpt_engine.commands.choices import Level, LogForm
from ckpt_engine.commands.loading import end_loading
from ckpt_engine.commands.logs import LogFormat, LogLevel, log_to_stderr
from ckpt_engine.commands.options import Deadline, configured_deadlines
from ckpt_engine.commands.renamed import VARIABLES, variables_now
from ckpt_engine.core.problems import CkptEngineError

if TYPE_CHECKING:
    from ckpt_engine.manager.service import ManagerConfig


def _option(variable: str, words: str, *names: str) -> Any:
    return typer.Option(*names, envvar=f"{VARIABLES[1]}{variable}", help=words)


def manager(
    listen: Annotated[
        str, _option("LISTEN", "Where trainers and replicas connect (gRPC), host:port. Port 0 takes a free one.")
    ] = MANAGER,
    http: Annotated[
        str, _option("HTTP", "Where status, metrics and the API page are, host:port. Empty: nowhere.")
    ] = "127.0.0.1:8080",
    ledger: Annotated[
        str | None,
        _option(
            "LEDGER",
            "The ledger: a file, or postgresql://USER@HOST/DATABASE, which several managers share. Default: "
            "ckpt-engine/ledger.sqlite3 below the XDG state directory.",
        ),
    ] = None,
    cluster: Annotated[
        str,
        _option("CLUSTER", "Id for a new ledger, if that of this cluster is lost. Warnings name the id."),
    ] = "",
    advertise: Annotated[
        str, _option("ADVERTISE", "The address under which other hosts reach --listen, if it is another one.")
    ] = "",
    http_name: Annotated[
        list[str] | None,
        _option("HTTP_NAME", "A further name under which --http is reached, as of a proxy. May be repeated."),
    ] = None,
    certificate: Annotated[Path | None, _option("CERTIFICATE", "Our certificate (PEM): serve over TLS.")] = None,
    key: Annotated[Path | None, _option("KEY", "Its key (PEM).")] = None,
    client_authority: Annotated[
        Path | None, _option("CLIENT_AUTHORITY", "Require certificates from callers that this one (PEM) has signed.")
    ] = None,
    tokens: Annotated[
        Path | None,
        _option("TOKENS", "Require tokens from callers: file of grants and digests, docs/security.md."),
    ] = None,
    insecure: Annotated[
        bool, _option("INSECURE", "Serve other machines without authentication.", "--insecure")
    ] = False,
    allow_directory: Annotated[
        list[Path] | None,
        _option(
            "ALLOW_DIRECTORY",
            "Publish checkpoint directories below this one, for callers with a trainer's grant. May be repeated.",
        ),
    ] = None,
    deadline: Deadline = None,
    log_level: LogLevel = Level.INFO,
    log_format: LogFormat = LogForm.TEXT,
) -> None:
    """Run the manager, which trainers and replicas connect to.

    Weights never pass through it. Start it once, before everything else. After a crash start it again on the same
    ledger: all members reconnect by themselves. Of several on one PostgreSQL ledger one leads, the others stand by.
    """
    from ckpt_engine.manager.ledger_address import ledger_of
    from ckpt_engine.manager.service import ManagerConfig
    from ckpt_engine.security.server import ServerSecurity

    if new_names := variables_now(os.environ):  # one of them may restrict callers: do not start without it
        changes = ", ".join(f"{old} is now {new}" for old, new in new_names.items())
        raise typer.BadParameter(f"{changes}: set these, and not those", param_hint="the environment")
    config = ManagerConfig(
        listen=listen,
        http=http,
        ledger=None if ledger is None else ledger_of(ledger),
        cluster=cluster,
        advertise=advertise,
        http_names=tuple(http_name or ()),
        security=ServerSecurity(certificate, key, client_authority, tokens, insecure),
        deadlines=configured_deadlines(deadline),
        directories=tuple(allow_directory or ()),
    )
    log_to_stderr(log_level, log_format)
    try:
        asyncio.run(_serve(config))
    except CkptEngineError as error:
        logging.getLogger("ckpt_engine.manager").error("%s", error.problem.message)
        raise typer.Exit(error.exit_status) from error


async def _serve(config: ManagerConfig) -> None:
    from ckpt_engine.manager.standby import run_manager

    end_loading()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await run_manager(config, stop)
