"""Decides what the options of a call ask for, above all for which replicas: those that it names, or all of its pool.

A pool is a name that replicas are started with; those without one are a pool, too. An update is for one pool, so runs
that share a manager do not meet: replicas of another pool are not touched, and naming one is refused.

An update is also for replicas without a connected agent: their engines may serve an older version, so a report must not
leave them out. A replica that said goodbye or was evicted is not registered any more.
"""

from __future__ import annotations

from collections.abc import Iterable

from ckpt_engine.core.deadlines import check_seconds
from ckpt_engine.core.names import check_pool, in_pool
from ckpt_engine.core.pausing import check_pause_mode
from ckpt_engine.core.problems import invalid, precondition
from ckpt_engine.machines.manager.absences import not_there
from ckpt_engine.machines.manager.deploy import check_options
from ckpt_engine.machines.manager.members import Members
from ckpt_engine.machines.manager.state import ManagerState
from ckpt_engine.machines.manager.versions import everybody
from ckpt_engine.v1 import manager_pb2


def complete(options: manager_pb2.UpdateOptions) -> manager_pb2.UpdateOptions:
    """A copy of the options with defaults filled in, so that equal options are equal messages.

    Raises INVALID_ARGUMENT for values that this manager does not know, that contradict each other, or that are not a
    time.
    """
    for what, value, known in (
        ("prefetch", options.prefetch, manager_pb2.Prefetch.values()),
        ("until", options.until, manager_pb2.Until.values()),
        ("newer", options.newer, manager_pb2.Newer.values()),
        ("draft", options.draft, manager_pb2.Draft.values()),
    ):
        if value not in known:
            raise invalid(f"this manager does not know {what} {value}; bring manager and caller to one version")
    if options.timeout_seconds:
        check_seconds("a timeout", options.timeout_seconds)
    completed = manager_pb2.UpdateOptions()
    completed.CopyFrom(options)
    completed.prefetch = options.prefetch or manager_pb2.PREFETCH_AUTO
    completed.until = options.until or manager_pb2.UNTIL_INSTALLED
    completed.strategy = options.strategy or "all"
    completed.draft = options.draft or manager_pb2.DRAFT_UPDATE
    completed.replicas[:] = sorted(set(options.replicas))
    if (completed.prefetch, completed.until) == (manager_pb2.PREFETCH_NEVER, manager_pb2.UNTIL_HELD):
        raise invalid("until='held' waits for relays to hold the version, and prefetch='never' fills none")
    if completed.draft == manager_pb2.DRAFT_KEEP and completed.strategy != "all":
        raise invalid(
            f"strategy {options.strategy!r} brings replicas back if a wave fails, and does not know with which weights "
            "draft='keep' has left their drafts: publish the draft too, or use strategy 'all'"
        )
    check_options(completed)
    return completed


def difference(options: Iterable[manager_pb2.UpdateOptions]) -> list[str]:
    """The names of options in which callers differ and must not; each may have its own timeout."""
    fields = manager_pb2.UpdateOptions.DESCRIPTOR.fields
    wishes = [{field.name: repr(value) for field, value in each.ListFields()} for each in options]
    values = {field.name: {each.get(field.name) for each in wishes} for field in fields}
    return [name for name, found in values.items() if len(found) > 1 and name != "timeout_seconds"]


def min_replicas_of(options: manager_pb2.UpdateOptions) -> int | None:
    """The least number of replicas; None: the caller has not set it."""
    return options.min_replicas if options.HasField("min_replicas") else None


def selection_of(options: manager_pb2.UpdateOptions) -> frozenset[str]:
    """The selection of a commit, as in `versions`: the names that were given, or everybody in the pool."""
    return frozenset(options.replicas) or frozenset((everybody(options.pool),))


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


def replicas_for(state: ManagerState, options: manager_pb2.UpdateOptions, now: float) -> tuple[str, ...]:
    """The names of the replicas that options ask for, in order. options: complete.

    Raises NOT_FOUND for an unknown name, INVALID_ARGUMENT for one of another pool or a pause mode that a connected
    replica does not have, and FAILED_PRECONDITION for a named replica that an operator holds or that receives no
    weights, or if too few replicas are connected or were a moment ago.
    """
    members = state.members
    check_named(members, options.replicas, options.pool)
    for name in options.replicas:
        if (hold := state.holds.get(name)) is not None:
            raise precondition(f"replica {name!r} is {hold.describe(name)}, or leave it out of this call", replica=name)
        if not members.replica(name).receives:
            raise precondition(
                f"replica {name!r} is colocated: it sleeps and wakes, but receives no weights", replica=name
            )
    receiving = (
        name for name, replica in members.replicas.items() if replica.receives and replica.pool == options.pool
    )
    replicas = [members.replicas[name] for name in options.replicas or sorted(receiving)]
    least = min_replicas_of(options)
    least = 1 if least is None else least
    away = [each for each in replicas if each.peer is None and now - each.heard >= state.deadlines.lease]
    if len(replicas) - len(away) < least:
        why = "; ".join(f"{each.name}: {not_there(each, now).problem.message}" for each in away)
        pools = sorted({replica.pool for replica in members.replicas.values() if replica.receives} | {options.pool})
        where = f" {in_pool(options.pool)}" if len(pools) > 1 or options.pool else ""
        others = [in_pool(pool) for pool in pools if pool != options.pool]
        start = f"start some with `ckpt-engine agent{f' --pool {options.pool}' if options.pool else ''}`"
        raise precondition(
            f"{len(replicas) - len(away)} replicas{where} that receive weights are connected, {least} are required; "
            + (why or start + (f" (there are others {', '.join(others)})" if others else "")),
            replica=away[0].name if away else "",
        )
    for replica in replicas:
        if replica.peer is not None and replica.engine is not None:
            check_pause_mode(replica.name, replica.engine, options.pause_mode)
    return tuple(replica.name for replica in replicas)
