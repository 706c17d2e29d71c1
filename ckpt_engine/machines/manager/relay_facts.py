"""Facts for decisions about relays: which of them a replica reaches, what the workers of their hosts need, and what
each reads and lends. Decides nothing itself."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from ckpt_engine.core.placements import Origin, Station
from ckpt_engine.core.rates import slow
from ckpt_engine.core.reach import by_directory
from ckpt_engine.core.transports import reading_kinds, relay_transport
from ckpt_engine.core.version import Version
from ckpt_engine.machines.events import Published, WorkerKey
from ckpt_engine.machines.manager.course import Course
from ckpt_engine.machines.manager.members import Holder
from ckpt_engine.machines.manager.recipients import Recipients, led_by
from ckpt_engine.machines.manager.state import ManagerState
from ckpt_engine.v1 import manager_pb2, weights_pb2

Problem = weights_pb2.Problem

Neighbourhood = tuple[str, str]
"""The host and the directory of relays of a process, which decide which relays it reaches."""

Needs = dict[bytes, manager_pb2.BlobRef]
"""Needs of workers, by digest."""


def connected_relays(state: ManagerState) -> list[Holder]:
    """Holders that have a session and say what they can be filled with."""
    return [holder for holder in state.members.connected_holders() if holder.filling is not None]


def missing_relays(state: ManagerState, names: Collection[str] | None = None) -> str:
    """A sentence that names known relays without a session, and what to do; empty: there are none. names: only of
    these; None: of all."""
    relays = [each.source for each in _lost_relays(state) if names is None or each.source in names]
    if not relays:
        return ""
    which = " and ".join(sorted(relays))
    most = state.deadlines.reconnect_most
    return (
        f"{which} had a session with this manager and has none now: start it if it does not run; if it has just "
        f"started, it connects within {most:g} s, so call again then"
    )


def lost_relays(
    state: ManagerState, recipients: Recipients, published: Published | None = None
) -> dict[str, frozenset[str]]:
    """By replica, the known relays without a session that its workers would read. published: also those on the hosts of
    its sources, by way of which other relays would get the weights."""
    lost = _lost_relays(state)
    source_hosts = () if published is None else [source.host for source in published.sources]
    between = frozenset(
        relay.source for relay in lost if any(by_directory(relay.host, host).ok for host in source_hosts)
    )
    found: dict[str, frozenset[str]] = {}
    for worker in recipients.workers():
        near = {relay.source for relay in lost if by_directory(relay.host, worker.host).ok}
        found[worker.key[0]] = found.get(worker.key[0], between) | near
    return found


def led_by_lost_relays(
    course: Course, recipients: Recipients, unfit: Mapping[str, Problem], near: Collection[str]
) -> Mapping[str, Problem]:
    """Why no plans can be made for these replicas; where a relay was lost that would have served one, that first. near:
    replicas that connected relays may serve."""
    if course.goal.prefetch == manager_pb2.PREFETCH_NEVER:
        return unfit
    lost = lost_relays(course.state, recipients)
    return {
        name: led_by(missing_relays(course.state, lost[name]), problem)
        if lost.get(name) and name not in near and problem.code == Problem.CODE_FAILED_PRECONDITION
        else problem
        for name, problem in unfit.items()
    }


def _lost_relays(state: ManagerState) -> list[Holder]:
    return [each for each in state.members.holders.values() if each.filling is not None and each.peer is None]


def slow_relays(holders: Iterable[Holder]) -> dict[str, str]:
    """Connected relays that pass nothing on because their network is slow: by name, a clause that says so."""
    return slow({each.source: each.words.measured for each in holders if each.peer is not None})


def relay_hosts(state: ManagerState) -> frozenset[str]:
    """Boot ids of the hosts on which connected relays run."""
    return frozenset(holder.host.boot_id for holder in connected_relays(state))


def near_relays(state: ManagerState, recipients: Recipients) -> dict[str, set[str]]:
    """By relay, the replicas with a worker that reaches it."""
    relays = connected_relays(state)
    replicas: dict[str, set[str]] = {holder.source: set() for holder in relays}
    near: dict[Neighbourhood, list[str]] = {}
    transport = relay_transport()
    for worker in recipients.workers():
        if transport not in worker.transports:
            continue
        around = _around(worker.host)
        if around not in near:
            near[around] = [holder.source for holder in relays if by_directory(holder.host, worker.host).ok]
        for relay in near[around]:
            replicas[relay].add(worker.key[0])
    return replicas


def readers_of(
    state: ManagerState,
    recipients: Recipients,
    identity: Version,
    distances: Mapping[WorkerKey, int],
    only: Collection[str] | None,
) -> dict[str, dict[str, int | None]]:
    """By relay, the replicas that reach it and lack the version.

    Each has the distance to the farthest source that it would read without relays; None: without relays it could not
    read everything. only: the replicas to consider; None: all."""
    lacking = set(recipients.lacking(identity))
    if only is not None:
        lacking &= set(only)
    farthest: dict[str, int | None] = {}
    for worker in recipients.workers():
        own, known = distances.get(worker.key), farthest.get(worker.key[0], 0)
        farthest[worker.key[0]] = None if own is None or known is None else max(own, known)
    near = near_relays(state, recipients)
    return {relay: {name: farthest[name] for name in names & lacking} for relay, names in near.items()}


class KnownNeeds:
    """What workers are known to need of one manifest, without duplicates, also workers of disconnected replicas."""

    def __init__(self, state: ManagerState, recipients: Recipients, published: Published) -> None:
        placed_needs = [(worker.host, worker.needs) for worker in recipients.workers()]
        placed_needs += [
            (prepared.host, prepared.needs)
            for replica in state.members.replicas.values()
            for prepared in replica.prepared.values()
            if prepared.manifest_digest == published.manifest.digest
        ]
        self._found: dict[Neighbourhood, tuple[weights_pb2.Host, Needs]] = {}
        self._near: dict[tuple[Neighbourhood, ...], list[manager_pb2.BlobRef]] = {}
        for host, needs in placed_needs:
            self._found.setdefault(_around(host), (host, {}))[1].setdefault(needs.digest, needs)

    def near(self, relays: Collection[Holder]) -> list[manager_pb2.BlobRef]:
        """The needs of the workers that reach one of these relays."""
        places = tuple(sorted({_around(relay.host) for relay in relays}))
        if places not in self._near:
            needs: Needs = {}
            for host, found in self._found.values():
                if any(by_directory(relay.host, host).ok for relay in relays):
                    needs |= found
            self._near[places] = [needs[digest] for digest in sorted(needs)]
        return self._near[places]


def station_of(relay: Holder) -> Station:
    """A relay with what it reads, and whether others can ask it. One that does not say reads what workers read."""
    assert relay.filling is not None
    reads = tuple(relay.filling.reads) or tuple(reading_kinds())
    return Station(relay.source, relay.host, reads, relay.filling.HasField("chunks"))


def origins_of(published: Published) -> list[Origin]:
    """The sources of a publication, as relays read them."""
    return [Origin(source.source, source.host, source.ways) for source in published.sources]


def _around(host: weights_pb2.Host) -> Neighbourhood:
    return host.boot_id, host.relay_directory
