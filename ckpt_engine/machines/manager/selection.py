"""Which replicas an update is for: those that its caller names, or all of its pool that receive weights.

A pool is a name that replicas are started with; those without one are a pool, too. An update is for one pool, so runs
that share a manager do not meet: replicas of another pool are not touched, and naming one is refused.

Also those whose agents are not connected: their engines may serve an older version, so a report must not leave them
out. A replica that said goodbye or was evicted is not registered any more.
"""

from __future__ import annotations

from collections.abc import Iterable

from ckpt_engine.core.names import check_pool, in_pool
from ckpt_engine.core.pausing import check_pause_mode
from ckpt_engine.core.problems import invalid, precondition
from ckpt_engine.machines.manager.absences import not_there
from ckpt_engine.machines.manager.members import Members
from ckpt_engine.machines.manager.state import State
from ckpt_engine.machines.manager.versions import everybody
from ckpt_engine.v1 import manager_pb2


def min_replicas_of(request: manager_pb2.UpdateWeightsRequest) -> int | None:
    """How many replicas suffice; None: the caller has not said."""
    return request.min_replicas if request.HasField("min_replicas") else None


def prefetch_of(request: manager_pb2.UpdateWeightsRequest) -> manager_pb2.Prefetch:
    """Whether relays are filled first; a caller that has not said leaves it to the manager."""
    return request.prefetch or manager_pb2.AUTO


def until_of(request: manager_pb2.UpdateWeightsRequest) -> manager_pb2.Until:
    """What the call waits for."""
    return request.until or manager_pb2.INSTALLED


def check_wishes(request: manager_pb2.UpdateWeightsRequest) -> None:
    """Raises INVALID_ARGUMENT for words that this manager does not know, or that contradict each other."""
    for what, value, known in (
        ("prefetch", request.prefetch, manager_pb2.Prefetch.values()),
        ("until", request.until, manager_pb2.Until.values()),
    ):
        if value not in known:
            raise invalid(f"this manager does not know {what} {value}; bring manager and trainer to one version")
    if prefetch_of(request) == manager_pb2.NEVER and until_of(request) == manager_pb2.HELD:
        raise invalid("until='held' waits for relays to hold the version, and prefetch='never' fills none")


def selection_of(request: manager_pb2.UpdateWeightsRequest | manager_pb2.RollbackRequest) -> frozenset[str]:
    """What a version is for, as `versions` remembers it: the names that were given, or everybody in the pool."""
    return frozenset(request.replicas) or frozenset((everybody(request.pool),))


def check_named(members: Members, names: Iterable[str], pool: str) -> None:
    """Raises NOT_FOUND for an unknown replica, and INVALID_ARGUMENT for one of another pool."""
    check_pool(pool)
    for name in names:
        replica = members.replica(name)
        if replica.pool != pool:
            raise invalid(
                f"replica {name!r} is {in_pool(replica.pool)}, and this call is for those {in_pool(pool)}: give the "
                "call that pool, or leave the replica out",
                replica=name,
            )


def replicas_for(state: State, request: manager_pb2.UpdateWeightsRequest, now: float) -> tuple[str, ...]:
    """The names of the replicas, in order.

    Raises NOT_FOUND for an unknown name, INVALID_ARGUMENT for one of another pool or a pause mode that one of
    those that are connected does not have, and FAILED_PRECONDITION for a named replica that an operator holds, for one
    that receives no weights, or if too few are connected, or have been so a moment ago.
    """
    members = state.members
    check_named(members, request.replicas, request.pool)
    for name in request.replicas:
        if (hold := state.holds.get(name)) is not None:
            raise precondition(f"replica {name!r} is {hold.told(name)}, or leave it out of this call", replica=name)
        if not members.replica(name).receives:
            raise precondition(
                f"replica {name!r} is colocated: it sleeps and wakes, but receives no weights", replica=name
            )
    receiving = (
        name for name, replica in members.replicas.items() if replica.receives and replica.pool == request.pool
    )
    found = [members.replicas[name] for name in sorted(set(request.replicas) or receiving)]
    least = min_replicas_of(request)
    least = 1 if least is None else least
    away = [each for each in found if each.peer is None and now - each.heard >= state.deadlines.lease]
    if len(found) - len(away) < least:
        why = "; ".join(f"{each.name}: {not_there(each, now).problem.message}" for each in away)
        pools = sorted({replica.pool for replica in members.replicas.values() if replica.receives} | {request.pool})
        where = f" {in_pool(request.pool)}" if len(pools) > 1 or request.pool else ""
        others = [in_pool(pool) for pool in pools if pool != request.pool]
        start = f"start some with `ckpt-engine replica{f' --pool {request.pool}' if request.pool else ''}`"
        raise precondition(
            f"{len(found) - len(away)} replicas{where} that receive weights are connected, {least} are required; "
            + (why or start + (f" (there are others {', '.join(others)})" if others else "")),
            replica=away[0].name if away else "",
        )
    for replica in found:
        if replica.peer is not None and replica.engine is not None:
            check_pause_mode(replica.name, replica.engine, request.pause_mode)
    return tuple(replica.name for replica in found)
