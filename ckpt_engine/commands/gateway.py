"""``ckpt-engine gateway``: one address for generation over all replicas, in the foreground, until SIGTERM or SIGINT."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
from pathlib import Path
from typing import Annotated

import typer

from ckpt_engine.addresses import join_address, listen_on, split_address
from ckpt_engine.commands.choices import Level, LogForm
from ckpt_engine.commands.loading import end_loading
from ckpt_engine.commands.logs import LogFormat, LogLevel, log_to_stderr
from ckpt_engine.commands.options import Certificate, ClientAuthority, Insecure, Key
from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.gateway.server import check, serve
from ckpt_engine.gateway.settings import GatewaySettings
from ckpt_engine.gateway.workers import SETTINGS, SOCKET, end_with, run_workers
from ckpt_engine.security.server import ServerSecurity


def gateway(
    context: typer.Context,
    manager: Annotated[
        str, typer.Option(envvar="CKPT_ENGINE_MANAGER", help="The manager of the replicas, host:port.")
    ] = "",
    pool: Annotated[
        str, typer.Option(help="Only the manager's replicas in this pool. Default: those started without --pool.")
    ] = "",
    replica: Annotated[
        list[str] | None, typer.Option(metavar="URL", help="A replica, without a manager; repeatable.")
    ] = None,
    listen: Annotated[str, typer.Option(help="Where callers connect, host:port. Port 0 takes a free one.")] = (
        GatewaySettings.listen
    ),
    workers: Annotated[int, typer.Option(min=1, max=64, help="Processes that share the port.")] = 1,
    queue_seconds: Annotated[
        float, typer.Option(min=0, help="Seconds that a request waits for a replica, unless its caller says.")
    ] = GatewaySettings.queue_seconds,
    unready_after: Annotated[
        float, typer.Option(min=0, help="Seconds without a serving replica after which /readyz answers 503.")
    ] = GatewaySettings.unready_after,
    idle_seconds: Annotated[
        float, typer.Option(min=1, help="Seconds of silence after which a request to an engine is given up.")
    ] = GatewaySettings.idle,
    drain_seconds: Annotated[
        float, typer.Option(min=0, help="Seconds that running requests may go on after SIGTERM.")
    ] = GatewaySettings.drain,
    requests: Annotated[
        int, typer.Option(min=1, help="Most requests that run or wait, in each process.")
    ] = GatewaySettings.requests,
    body_bytes: Annotated[
        int, typer.Option(min=1, help="Most bytes of a request's body.")
    ] = GatewaySettings.body_bytes,
    body_values: Annotated[
        int, typer.Option(min=1, help="Most values in a request's body, such as token ids; a text is one.")
    ] = GatewaySettings.body_values,
    resumes: Annotated[
        int, typer.Option(min=0, help="Most times that one sample is resumed.")
    ] = GatewaySettings.resumes,
    certificate: Certificate = None,
    key: Key = None,
    client_authority: ClientAuthority = None,
    tokens: Annotated[
        Path | None, typer.Option(help="Require tokens with the grant `client` from callers, see docs/security.md.")
    ] = None,
    insecure: Insecure = False,
    log_level: LogLevel = Level.INFO,
    log_format: LogFormat = LogForm.TEXT,
) -> None:
    """Run a gateway: one address for generation in token ids, which resumes what updates and deaths interrupt.

    Its own death loses its streams; run several, each with --workers, since they share nothing.
    """
    log_to_stderr(log_level, log_format)
    os.environ.update(CKPT_ENGINE_LOG_LEVEL=log_level.value, CKPT_ENGINE_LOG_FORMAT=log_format.value)  # for `work`
    log = logging.getLogger("ckpt_engine.gateway")
    source = context.get_parameter_source("manager")
    if replica and source is not None and source.name == "ENVIRONMENT":
        manager = ""  # the command line is for this gateway, the variable for all commands
    settings = GatewaySettings(
        listen=listen,
        manager=manager,
        pool=pool,
        replicas=tuple(replica or ()),
        queue_seconds=queue_seconds,
        unready_after=unready_after,
        idle=idle_seconds,
        drain=drain_seconds,
        requests=requests,
        body_bytes=body_bytes,
        body_values=body_values,
        resumes=resumes,
        security=ServerSecurity(certificate, key, client_authority, tokens, insecure),
    )
    try:
        check(settings)
        listener = listen_on(settings.listen)
    except CkptEngineError as error:
        log.error("%s", error.problem.message)
        raise typer.Exit(error.exit_status) from error
    at = join_address(split_address(listen)[0], listener.getsockname()[1])
    log.info("gateway listens on %s for %s workers=%d", at, manager or ", ".join(settings.replicas), workers)
    end_loading()
    if workers > 1:
        raise typer.Exit(run_workers(settings, listener, workers))
    asyncio.run(serve(settings, listener))


def work() -> None:
    """Runs one of several processes behind one port, see workers.py."""
    log_to_stderr(Level(os.environ["CKPT_ENGINE_LOG_LEVEL"]), LogForm(os.environ["CKPT_ENGINE_LOG_FORMAT"]))
    settings = GatewaySettings.from_json(os.environ[SETTINGS])
    listener = socket.socket(fileno=int(os.environ[SOCKET]))
    threading.Thread(target=end_with, args=(os.getppid(),), daemon=True).start()
    end_loading()
    asyncio.run(serve(settings, listener))


if __name__ == "__main__":
    work()
