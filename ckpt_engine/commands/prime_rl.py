"""``ckpt-engine prime-rl``: the admin address of prime-rl's inference servers, in the foreground, until SIGTERM."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from pathlib import Path
from typing import Annotated

import typer
from starlette.types import ASGIApp

from ckpt_engine.addresses import MANAGER, check_reach, join_address, listen_on, split_address
from ckpt_engine.commands.asking import Manager, Pool
from ckpt_engine.commands.choices import Level, LogForm
from ckpt_engine.commands.logs import LogFormat, LogLevel, log_to_stderr
from ckpt_engine.commands.options import Certificate, ClientAuthority, Insecure, Key, Timeout, configured_deadlines
from ckpt_engine.connection import checked_address
from ckpt_engine.core.loopback import is_loopback
from ckpt_engine.core.names import LINEAGE_BYTES, check_pool
from ckpt_engine.core.problems import CkptEngineError, invalid
from ckpt_engine.http_server import HttpServer
from ckpt_engine.security.server import ServerSecurity

RUNS_BYTES = 8
"""Bytes that are appended to a lineage's name when a run starts again."""


def prime_rl(
    manager: Manager = MANAGER,
    listen: Annotated[
        str, typer.Option(help="Address for prime-rl's `admin_base_url`, host:port. Port 0 takes a free one.")
    ] = "127.0.0.1:8100",
    lineage: Annotated[
        str, typer.Option(help="Lineage of the versions (prime-rl's steps). Default: a fresh one at each start.")
    ] = "",
    pool: Pool = "",
    replicas: Annotated[int, typer.Option(min=0, help="Replicas that must be connected for /health.")] = 1,
    min_replicas: Annotated[
        int | None, typer.Option(min=0, help="Replicas that suffice for an update. Default: all.")
    ] = None,
    model: Annotated[list[str] | None, typer.Option(help="A name for /v1/models; repeatable.")] = None,
    timeout: Timeout = None,
    certificate: Certificate = None,
    key: Key = None,
    client_authority: ClientAuthority = None,
    tokens: Annotated[
        Path | None, typer.Option(help="Require tokens with a grant `trainer/...` from callers, see docs/security.md.")
    ] = None,
    insecure: Insecure = False,
    log_level: LogLevel = Level.INFO,
    log_format: LogFormat = LogForm.TEXT,
) -> None:
    """Answer what prime-rl's orchestrator asks of inference servers: each of its weight updates is one update of all
    replicas, from the directory that its trainer wrote. The manager must allow that (`ckpt-engine manager
    --allow-directory`).
    """
    from ckpt_engine.integrations.prime_rl import Facade, PrimeRlSettings

    log_to_stderr(log_level, log_format)
    log = logging.getLogger("ckpt_engine.prime_rl")
    security = ServerSecurity(certificate, key, client_authority, tokens, insecure)
    try:
        checked_address(manager)
        check_pool(pool)
        if len(lineage.encode()) > LINEAGE_BYTES - RUNS_BYTES:
            raise invalid(f"--lineage has at most {LINEAGE_BYTES - RUNS_BYTES} bytes")
        security.check()
        host, _ = split_address(listen, "--listen")
        check_reach(host, authenticates=security.authenticates, insecure=security.insecure)
        settings = PrimeRlSettings(
            manager=manager,
            lineage=lineage,
            pool=pool,
            replicas=replicas,
            min_replicas=min_replicas,
            models=tuple(model or ()),
            timeout=timeout,
            tokens=security.known_tokens(),
            loopback=is_loopback(host),
            deadlines=configured_deadlines(None),
        )
        listener = listen_on(listen)
    except CkptEngineError as error:
        log.error("%s", error.problem.message)
        raise typer.Exit(error.exit_status) from error
    scheme = "http" if certificate is None else "https"
    log.info("prime-rl: admin_base_url = %s://%s/v1", scheme, join_address(host, listener.getsockname()[1]))
    asyncio.run(_serve(Facade(settings).application(), security, listener))


async def _serve(application: ASGIApp, security: ServerSecurity, listener: socket.socket) -> None:
    server = HttpServer(application, security)

    def end() -> None:
        server.should_exit = True

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, end)
    await server.serve(sockets=[listener])
