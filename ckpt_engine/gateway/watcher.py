"""Follows the manager's news of replicas and keeps the fleet up to date; dials again as needed. On the gateway's loop.

While the manager is away, its last news stays in force. A manager that has just started may not know all replicas yet:
replicas that it does not name stay until it reports that it has settled.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio

from ckpt_engine.channel import ManagerStub, open_channel, problem_of
from ckpt_engine.core.pausing import mode_name
from ckpt_engine.gateway.fleet import TAKES, Fleet, FleetState, ReplicaNews, ShelfNews
from ckpt_engine.gateway.versions import GatewayVersion
from ckpt_engine.leader import reached
from ckpt_engine.v1 import manager_pb2, weights_pb2

SILENT_SECONDS = 20.0
"""A manager sends a message at least every half lease; after so long without one the stream is dropped."""

AGAIN_SECONDS = 1.0
"""Pause between two attempts to connect."""

log = logging.getLogger("ckpt_engine.gateway")

_STATES = {
    manager_pb2.REPLICA_STATE_SERVING: FleetState.SERVING,
    manager_pb2.REPLICA_STATE_DRAINING: FleetState.DRAINING,
    manager_pb2.REPLICA_STATE_ASLEEP: FleetState.ASLEEP,
    manager_pb2.REPLICA_STATE_AWAY: FleetState.AWAY,
}


_SERVES = (*TAKES, FleetState.AWAY)
"""States in which an adapter's versions are served: an update of it pauses nothing, and it needs no agent."""


class StaleError(Exception):
    """A stream's message cannot be used: it is older than what is known, or a change before it was missed."""


class News:
    """Applies the messages of one stream after another, about one pool's replicas, to the fleet. Pure."""

    def __init__(self, fleet: Fleet, pool: str = "") -> None:
        self._fleet, self._pool = fleet, pool
        self._cluster, self._epoch = "", 0
        self._run, self._sequence = "", 0
        self._settling = False
        self._names: set[str] = set()

    def take(self, message: manager_pb2.WatchReplicasResponse) -> None:
        """Applies one message. Raises StaleError: dial again."""
        fence = message.fence
        if fence.cluster == self._cluster and fence.epoch < self._epoch:
            raise StaleError(f"the manager tells of epoch {fence.epoch}, and epoch {self._epoch} was seen")
        step = message.sequence - self._sequence if message.run == self._run else -1
        if not message.snapshot and step not in (0, 1):
            raise StaleError(f"change {self._sequence + 1} was missed: {message.sequence} came")
        self._cluster, self._epoch = fence.cluster, fence.epoch
        self._run, self._sequence = message.run, message.sequence
        news = [_replica_news(replica) for replica in message.replicas if replica.pool == self._pool]
        others = {replica.name for replica in message.replicas if replica.pool != self._pool}
        shelves = [_shelf_news(replica) for replica in message.replicas if _is_shelf(replica)]
        if message.snapshot:
            self._names = set()
        self._names |= {each.name for each in news} | {each.name for each in shelves}
        settled = not message.settling and (self._settling or message.snapshot)
        removed = set(message.gone) | (others & self._fleet.members.keys())
        if settled:
            removed |= (self._fleet.members.keys() | self._fleet.shelves.keys()) - self._names
        self._settling = message.settling
        self._fleet.tell(news, sorted(removed))
        self._fleet.tell_shelves(shelves, sorted(removed - {each.name for each in shelves}))
        self._fleet.tell_latest(map(_identity, message.latest))


async def watch(manager: str, name: str, fleet: Fleet, changed: Callable[[], None], pool: str = "") -> None:
    """Follows one pool's replicas until it is cancelled. changed: called after each message."""
    news, last_reason = News(fleet, pool), ""
    while True:
        try:
            await _one_stream(manager, name, news, changed)
        except (grpc.RpcError, StaleError, TimeoutError) as error:
            why = problem_of(error).message if isinstance(error, grpc.RpcError) else str(error) or "it said nothing"
            if why != last_reason:
                log.warning("the manager at %s is not heard: %s; what it told last stays", manager, why)
            last_reason = why
        else:
            last_reason = ""
        await asyncio.sleep(AGAIN_SECONDS)


async def _one_stream(manager: str, name: str, news: News, changed: Callable[[], None]) -> None:
    async with open_channel(manager) as channel:
        call: Any = ManagerStub(await reached(channel)).WatchReplicas(manager_pb2.WatchReplicasRequest(watcher=name))
        while True:
            message = await asyncio.wait_for(call.read(), SILENT_SECONDS)
            if message is grpc.aio.EOF:  # type: ignore[attr-defined]  # the stubs lack it
                return
            news.take(message)
            changed()


def _is_shelf(replica: manager_pb2.WatchedReplica) -> bool:
    """Whether it is an adapter in an engine: such a replica is called after its engine's and the adapter's pool."""
    return bool(replica.pool) and replica.name.endswith(f".{replica.pool}")


def _shelf_news(replica: manager_pb2.WatchedReplica) -> ShelfNews:
    identity = _identity(replica.identity) if replica.HasField("identity") else None
    serves = _STATES.get(replica.state, FleetState.CLOSED) in _SERVES and identity is not None
    return ShelfNews(replica.name, replica.url.rstrip("/"), replica.pool, serves, identity)


def _replica_news(replica: manager_pb2.WatchedReplica) -> ReplicaNews:
    return ReplicaNews(
        replica.name,
        replica.url.rstrip("/"),
        replica.engine,
        _STATES.get(replica.state, FleetState.CLOSED),
        replica.reason,
        _identity(replica.identity) if replica.HasField("identity") else None,
        _identity(replica.next) if replica.HasField("next") else None,
        mode_name(replica.pause_mode) if replica.state == manager_pb2.REPLICA_STATE_DRAINING else "",
        bool(replica.label_problem),
    )


def _identity(identity: weights_pb2.Identity) -> GatewayVersion:
    return GatewayVersion(identity.version, identity.lineage, identity.root.hex())
