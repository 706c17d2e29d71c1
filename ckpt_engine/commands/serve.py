"""``ckpt-engine serve``: one manager in the foreground, until SIGTERM or SIGINT."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from ckpt_engine.commands.options import configured_deadlines
from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.manager.service import ManagerConfig, ManagerServer
from ckpt_engine.security.server import ServerSecurity


def serve(
    listen: Annotated[
        str, typer.Option(help="Where trainers and replicas connect (gRPC), host:port. Port 0 takes a free one.")
    ] = "127.0.0.1:50051",
    http: Annotated[
        str, typer.Option(help="Where status, metrics and the API page are, host:port. Empty: nowhere.")
    ] = "127.0.0.1:8080",
    ledger: Annotated[
        Path | None,
        typer.Option(help="The ledger file. Default: ckpt-engine/ledger.sqlite3 below the XDG state directory."),
    ] = None,
    cluster: Annotated[
        str, typer.Option(help="The id that a new ledger gets, when the one of this cluster is lost. Warnings name it.")
    ] = "",
    advertise: Annotated[
        str, typer.Option(help="The address under which other hosts reach --listen, if it is another one.")
    ] = "",
    certificate: Annotated[Path | None, typer.Option(help="Our certificate (PEM): serve over TLS.")] = None,
    key: Annotated[Path | None, typer.Option(help="Its key (PEM).")] = None,
    client_authority: Annotated[
        Path | None, typer.Option(help="Ask callers for certificates that this one (PEM) has signed.")
    ] = None,
    tokens: Annotated[
        Path | None, typer.Option(help="Ask callers for tokens: grants and digests, see docs/security.md.")
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Serve other machines without asking who calls.")
    ] = False,
    deadline: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=SECONDS", help="Another value for a deadline of docs/configuration.md; repeatable."),
    ] = None,
) -> None:
    """Run the manager, which trainers and replicas connect to.

    Weights never pass through it. Start it once, before everything else; after a crash start it again on the same
    ledger and everybody reconnects by themselves.
    """
    log_plainly()
    config = ManagerConfig(
        listen=listen,
        http=http,
        ledger=ledger,
        cluster=cluster,
        advertise=advertise,
        security=ServerSecurity(certificate, key, client_authority, tokens, insecure),
        deadlines=configured_deadlines(deadline),
    )
    try:
        asyncio.run(_serve(config))
    except CkptEngineError as error:
        logging.getLogger("ckpt_engine.manager").error("%s", error.problem.message)
        raise typer.Exit(1) from error


async def _serve(config: ManagerConfig) -> None:
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.set)
    async with ManagerServer(config) as server:
        await server.serve(ended)


def log_plainly() -> None:
    """One line an event on standard error: time (UTC), level, logger, then words and key=value pairs."""
    formatter = logging.Formatter("%(asctime)s.%(msecs)03dZ %(levelname)s %(name)s %(message)s", "%Y-%m-%dT%H:%M:%S")
    formatter.converter = time.gmtime
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
