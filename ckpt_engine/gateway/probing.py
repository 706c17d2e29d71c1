"""Asks replicas themselves: how much they have to do, and without a manager also whether they serve. On the loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from ckpt_engine.gateway.engines import Engines
from ckpt_engine.gateway.fleet import Fleet, FleetReplica, FleetState, ReplicaNews
from ckpt_engine.gateway.upstream import NotAdmittedError, Upstream
from ckpt_engine.http_client.connection import UnreachableError, WireError


async def probe_loads(fleet: Fleet, upstream: Upstream, engines: Engines, seconds: float) -> None:
    """Runs until it is cancelled. An engine that does not say counts as having what this process sent it."""
    while True:
        await asyncio.gather(*(_probe_load(member, upstream, engines) for member in list(fleet.members.values())))
        await asyncio.sleep(seconds)


async def probe_replicas(
    urls: Sequence[str],
    fleet: Fleet,
    upstream: Upstream,
    engines: Engines,
    seconds: float,
    changed: Callable[[], None],
) -> None:
    """Probes the replicas of a gateway without a manager, until it is cancelled. Their names are their URLs."""
    kinds: dict[str, str] = {}
    while True:
        fleet.tell(await asyncio.gather(*(_probe(url.rstrip("/"), kinds, fleet, upstream, engines) for url in urls)))
        changed()
        await asyncio.sleep(seconds)


async def _probe(url: str, kinds: dict[str, str], fleet: Fleet, upstream: Upstream, engines: Engines) -> ReplicaNews:
    member = fleet.members.get(url)
    try:
        ready, why, version = await upstream.ready(url)
    except NotAdmittedError as error:
        if member is not None and error.unreachable:
            member.died()
        kinds.pop(url, None)  # another engine may come up there
        return ReplicaNews(url, url, "", FleetState.CLOSED, str(error))
    if member is not None:
        member.answers()
    if url not in kinds:
        kinds[url] = await _kind(url, upstream, engines)
    return ReplicaNews(url, url, kinds[url], FleetState.SERVING if ready else FleetState.CLOSED, why, version)


async def _kind(url: str, upstream: Upstream, engines: Engines) -> str:
    """Recognises the engine's kind; empty: unknown, and any dialect is tried."""
    for kind, side in engines.sides.items():
        if side.mark is None:
            continue
        try:
            answer = await upstream.get(url, side.mark.route)
        except WireError:
            continue
        if answer.status == 200 and side.mark.text in answer.text:
            return kind
    return ""


async def _probe_load(member: FleetReplica, upstream: Upstream, engines: Engines) -> None:
    try:
        load = await _load(member.news, upstream, engines)
    except UnreachableError:
        load = None
        member.died()
    except (WireError, ValueError, KeyError, TypeError):
        load = None
    if load is not None:
        member.answers()
        member.reported, member.own_then = load, member.own


async def _load(news: ReplicaNews, upstream: Upstream, engines: Engines) -> int | None:
    """Asks an engine how many requests run and wait in it; None: it does not say."""
    side = engines.sides.get(news.engine)
    if not news.url or side is None or side.load is None:
        return None
    return side.load.requests(await upstream.get(news.url, side.load.route))
