"""One gateway process: the watcher, the probes, the HTTP server, and a shutdown that answers every caller."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import AsyncIterator
from urllib.parse import urlsplit

from ckpt_engine.addresses import check_reach, split_address
from ckpt_engine.connection import checked_address
from ckpt_engine.core.names import check_pool
from ckpt_engine.core.problems import invalid
from ckpt_engine.gateway.app import Gateway
from ckpt_engine.gateway.door import GatewayDoor
from ckpt_engine.gateway.engines import installed_engines
from ckpt_engine.gateway.fleet import Fleet
from ckpt_engine.gateway.metrics import GatewayMetrics
from ckpt_engine.gateway.placing import Placing
from ckpt_engine.gateway.probing import probe_loads, probe_replicas
from ckpt_engine.gateway.settings import GatewaySettings
from ckpt_engine.gateway.upstream import Upstream
from ckpt_engine.gateway.watcher import watch
from ckpt_engine.http_server import HttpServer

END_SECONDS = 5.0
"""How long requests have to send their partial answers, once the time to drain is over."""

KEPT_SECONDS = 75
"""How long a caller's idle connection stays open: longer than proxies keep theirs."""

_ROUTES = ("/v1", "/completions", "/generate")
"""Ends of URLs that people copy along with a server's address; the gateway adds the route itself."""

log = logging.getLogger("ckpt_engine.gateway")


def check(settings: GatewaySettings) -> None:
    """Checks settings. Raises INVALID_ARGUMENT."""
    if bool(settings.manager) == bool(settings.replicas):
        raise invalid("give --manager HOST:PORT, or --replica URL for each replica")
    for url in settings.replicas:
        _check_url(url)
    if settings.pool and not settings.manager:
        raise invalid(f"--pool {settings.pool!r} chooses among a manager's replicas: give --manager")
    check_pool(settings.pool)
    if settings.manager:
        checked_address(settings.manager)
    settings.security.check()
    host, _ = split_address(settings.listen, "--listen")
    check_reach(host, authenticates=settings.security.authenticates, insecure=settings.security.insecure)


def _check_url(url: str) -> None:
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # a port that is none
        valid = False
    if not valid:
        raise invalid(f"--replica {url!r} is not a URL: write http://HOST:PORT")
    if parts.query or parts.fragment or parts.username or parts.path.rstrip("/").endswith(_ROUTES):
        root = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
        raise invalid(f"--replica {url!r} is more than where a server's routes begin: write {root}")


@contextlib.asynccontextmanager
async def running_gateway(settings: GatewaySettings, name: str = "gateway") -> AsyncIterator[Gateway]:
    """A gateway without its HTTP server: it knows its replicas and can answer requests."""
    fleet, metrics, engines = Fleet(), GatewayMetrics(), installed_engines()
    async with Upstream(settings) as upstream:
        placing = Placing(settings, fleet, upstream, metrics, engines)
        gateway = Gateway(placing, GatewayDoor(settings.security))
        tasks = [
            asyncio.ensure_future(probe_loads(fleet, upstream, engines, settings.probe)),
            asyncio.ensure_future(gateway.look_after()),
        ]
        if settings.manager:
            tasks.append(asyncio.ensure_future(watch(settings.manager, name, fleet, placing.changed, settings.pool)))
        else:
            probing = probe_replicas(settings.replicas, fleet, upstream, engines, settings.probe, placing.changed)
            tasks.append(asyncio.ensure_future(probing))
        for task in tasks:
            task.add_done_callback(_notice)
        try:
            yield gateway
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def _notice(task: asyncio.Future[None]) -> None:
    """Logs that a task ended: none of them should end by itself."""
    if not task.cancelled():
        log.critical("a part of this gateway has failed: restart it, and report this", exc_info=task.exception())


async def serve(settings: GatewaySettings, bound: socket.socket) -> None:
    """Serves until SIGTERM or SIGINT. Then new requests are refused, running ones have `drain` seconds to end, and the
    rest end with their partial answers."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with running_gateway(settings) as gateway:
        server = HttpServer(gateway.application(), settings.security, KEPT_SECONDS)
        serving = asyncio.ensure_future(server.serve(sockets=[bound]))
        stopping = asyncio.ensure_future(stop.wait())
        await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        gateway.stopping = True
        if not await gateway.idle(settings.drain):
            log.warning(
                "%d requests still ran after %g s: they end with what they have", gateway.inside, settings.drain
            )
        gateway.ending.set()
        await gateway.idle(END_SECONDS)
        server.should_exit = True
        await serving
