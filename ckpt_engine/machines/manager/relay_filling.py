"""The relays that one update fills: the command of each, which are filled together, and the results.

A relay is told the tables that it reads, and the needs of its host and of the relays that it feeds. Relays that are
told at the same time to fetch the same over the same network are filled together: they pass it on to each other, so
that each byte leaves the version's holders about once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ckpt_engine.core.fan_out_orders import fan_out_orders
from ckpt_engine.core.problems import deadline
from ckpt_engine.core.reach import by_network
from ckpt_engine.core.relay_remedy import relay_remedy
from ckpt_engine.core.relay_routes import Route
from ckpt_engine.core.transports import passes_on
from ckpt_engine.core.version import Fence, Version
from ckpt_engine.machines.events import SourceOffer
from ckpt_engine.machines.manager.course import Course
from ckpt_engine.machines.manager.members import Holder
from ckpt_engine.machines.manager.relay_facts import KnownNeeds, slow_relays
from ckpt_engine.v1 import manager_pb2, weights_pb2

Problem = weights_pb2.Problem

FINAL = frozenset({Problem.FAILED_PRECONDITION, Problem.INVALID_ARGUMENT})
"""Problems that another try does not solve: no memory, needs that do not fit."""


@dataclass
class PlannedFilling:
    """One relay that an update fills: what it was told, and what it answered."""

    relay: str
    replicas: tuple[str, ...]  # to be installed from it; none: it is a step in between
    route: Route = field(default_factory=lambda: Route(0, ()))  # what it is to be filled from
    command: manager_pb2.FillRelay | None = None  # the last one sent; None: it waits for its upstream
    command_route: Route | None = None  # that of `command`
    attempts: int = 0  # commands before `command`
    tried: set[bytes] = field(default_factory=set)  # digests of the relays' tables that it was told to read
    pausing: bool = False  # a short pause before the next try goes on
    answer: manager_pb2.RelayFilled | None = None  # to `command`
    session: str = ""  # of the process that answered
    early: manager_pb2.RelayFilled | None = None  # its answer to the first part, from its own sources
    ahead: bool = False  # `command` asks for the first part only: what its own sources have
    exclusion: Problem | None = None  # why the update goes on without it

    @property
    def failed(self) -> bool:
        """Whether it has answered that it could not fetch all that it was told to."""
        if self.answer is None or self.command_route is None:
            return False
        may_lack = self.ahead or bool(self.command_route.lacks)
        return self.answer.HasField("problem") or bool(self.answer.missing_cells and not may_lack)

    @property
    def is_due(self) -> bool:
        """Whether it needs its next command: it has none yet, or has done the first part."""
        return self.command is None or (self.ahead and self.answer is not None and not self.failed)

    def too_late(self, unready: Sequence[str], since: str) -> Problem:
        """The reason for excluding the relay at the deadline. unready: names of relays that it waits for. since: words
        for the time that passed, which end the message."""
        if self.answer is not None and self.answer.HasField("problem"):
            return self.answer.problem
        if self.command is None:
            return deadline(f"it waited for {', '.join(unready) or 'its turn'} to hold the version {since}").problem
        state = "does not say that it holds the version" if self.answer is not None else "has not answered"
        return deadline(f"it {state} {since}").problem

    def tables(self) -> set[bytes]:
        """Digests of the tables under which it holds what it has fetched."""
        return {each.table for each in (self.answer, self.early) if each is not None and each.table}


def fill_command(
    course: Course,
    known: KnownNeeds,
    identity: Version,
    name: str,
    route: Route,
    upstream: Sequence[manager_pb2.BlobRef],
) -> manager_pb2.FillRelay:
    """The command for the relay of this name, without a record, and without what it keeps. upstream: tables of the
    relays that it reads."""
    holders, published = course.state.members.holders, course.goal.published
    tables = {source.source: source.table for source in published.sources}
    # Other holders of the version. How they are read is unknown: the relay finds out.
    others = [
        held.table
        for other in course.state.members.connected_holders()
        for held in other.held
        if held.identity == identity and other.filling is None and other.source not in tables
    ]
    relays = [holders[each] for each in (name, *route.feeds) if each in holders]
    # Memory for what is not brought to it would be wasted. The tables may be of sources that it does not read itself.
    within = [tables[source] for source in route.within if source in tables]
    return manager_pb2.FillRelay(
        fence=course.relay_fence.message(),
        identity=identity.message(),
        tables=[*(tables[source] for source in route.sources), *upstream, *others],
        needs=known.near(relays),
        everything=any(relay.filling is not None and relay.filling.everything for relay in relays),
        within=within,
    )


@dataclass(frozen=True)
class SharedFilling:
    """What relays that are filled together are told of each other, by relay."""

    orders: Mapping[str, manager_pb2.FanOut] = field(default_factory=dict)  # to be added to its command
    why: Mapping[str, str] = field(default_factory=dict)  # a sentence that says with which it is filled, or why alone


def filled_together(
    fillings: Iterable[PlannedFilling],
    holders: Mapping[str, Holder],
    command_of: Callable[[PlannedFilling], manager_pb2.FillRelay],
    fence: Fence,
) -> SharedFilling:
    """Decides which relays are filled together, of those that get their first command now. command_of: the command of
    one without that, and without tables."""
    slow = slow_relays(holders.values())
    classes: dict[tuple[object, ...], list[str]] = {}
    others: dict[tuple[str, ...], list[str]] = {}
    for filling in fillings:
        holder, route = holders.get(filling.relay), filling.route
        if holder is None or holder.peer is None or holder.filling is None:
            continue
        if not route.transports or route.ahead:
            continue
        # One that is reached on its own host only is no step for others.
        is_step = holder.filling.HasField("passes_on") and by_network(holder.host, weights_pb2.Host()).ok
        if not all(map(passes_on, route.transports)) or not is_step:
            others.setdefault(route.transports, []).append(filling.relay)
            continue
        command = command_of(filling)
        identity = Version.of(command.identity)
        if any(held.identity == identity for held in holder.held):
            continue  # it answers from what it holds, and passes nothing on
        last = holder.words.last_filled
        if last is not None and last.problem.code in FINAL:
            continue  # it may be too small again, and the others would wait for it
        needs = tuple(sorted(each.digest for each in command.needs))
        within = tuple(sorted(each.digest for each in command.within))
        classes.setdefault((needs, command.everything, within), []).append(filling.relay)
    orders: dict[str, manager_pb2.FanOut] = {}
    why: dict[str, str] = {}
    for names in classes.values():
        if len(names) < 2:
            continue
        leaves = {name: slow[name] for name in names if name in slow}
        regions = {name: _passes_on(holders[name]) for name in names}
        shared = fan_out_orders(regions, _about(fence, names, holders), leaves)
        orders |= shared
        for name in names:
            peers = sorted({peer.relay for peer in shared[name].peers})
            others_too = "1 other" if len(names) == 2 else f"{len(names) - 1} others"
            words = f"it is filled along with {others_too}, and reads {', '.join(peers)} meanwhile"
            why[name] = f"{words}, but passes nothing on: it {leaves[name]}" if name in leaves else words
    for transports, names in others.items():
        if len(names) > 1 and not all(map(passes_on, transports)):
            why |= dict.fromkeys(
                names, f"a relay that reads over {' and '.join(transports)} passes nothing on meanwhile"
            )
    return SharedFilling(orders, why)


def _passes_on(holder: Holder) -> weights_pb2.Region:
    assert holder.filling is not None
    return holder.filling.passes_on


def _about(fence: Fence, names: Iterable[str], holders: Mapping[str, Holder]) -> bytes:
    """The id of a shared filling: of its fence and its relays' processes."""
    return str(fence).encode() + b"".join(f"\0{name}\0{holders[name].session_id}".encode() for name in sorted(names))


def reports(fillings: Iterable[PlannedFilling]) -> list[manager_pb2.RelayReport]:
    """A report for each relay."""
    routes = {each.relay: (each, each.command_route or each.route) for each in fillings}
    return [
        manager_pb2.RelayReport(
            relay=each.relay,
            filled=_filled(each),
            replicas=each.replicas,
            relays=sorted(other for other, (_, other_route) in routes.items() if each.relay in other_route.upstream),
            upstream=route.upstream,
            stage=route.stage,
        )
        for each, route in routes.values()
    ]


def _filled(filling: PlannedFilling) -> manager_pb2.RelayFilled | None:
    """A relay's answer, or why it has none; None: that is unknown, since it may not have been commanded."""
    if filling.answer is not None or filling.exclusion is None:
        return filling.answer
    return manager_pb2.RelayFilled(problem=filling.exclusion)


def blobs_of(fillings: Iterable[PlannedFilling]) -> list[manager_pb2.BlobRef]:
    """Blobs that relays with a command may fetch."""
    commands = [each.command for each in fillings if each.command is not None]
    return [ref for each in commands for ref in (each.record, *each.tables, *each.needs, *each.within)]


def lacking(
    fillings: Iterable[PlannedFilling], sources: Iterable[SourceOffer], running: Collection[str]
) -> dict[str, str]:
    """By replica, what its relay was not told to fetch, since no relay reaches it. running: boot ids of hosts on which
    relays run."""
    hosts = {source.source: source.host for source in sources}
    return {
        name: f"{each.relay} reaches nothing that has what {source} holds; {relay_remedy([hosts[source]], running)}"
        for each in fillings
        for source in each.route.lacks[:1]
        for name in each.replicas
    }


def shortfalls(fillings: Iterable[PlannedFilling], holders: Mapping[str, Holder]) -> dict[str, Problem]:
    """By replica, why its relay does not count, or what of the version the relay lacks. Names the relay, and those that
    it reads, with their addresses."""
    return {name: problem for each in fillings if (problem := _shortfall(each, holders)) for name in each.replicas}


def _shortfall(filling: PlannedFilling, holders: Mapping[str, Holder]) -> Problem | None:
    answer, words = filling.answer, []
    if answer is not None and filling.failed and answer.missing:
        code, count = answer.missing[0].code, answer.missing_cells
        pieces = f"{count} piece{'s' * (count != 1)} of the version"
        words.append(f"{filling.relay} lacks {pieces}: {answer.missing[0].message}")
        is_cut_off = code in (Problem.DEADLINE_EXCEEDED, Problem.UNAVAILABLE)
    elif filling.exclusion is not None:
        code, message = filling.exclusion.code, filling.exclusion.message
        words.append(message if filling.relay in message else f"{filling.relay}: {message}")
        is_cut_off = code == Problem.DEADLINE_EXCEEDED
    else:
        return None
    upstream = (filling.command_route or filling.route).upstream
    addresses = [f"{name} at {holders[name].host.address}" for name in upstream if name in holders]
    if addresses and is_cut_off:
        words.append(f"it reads {' and '.join(addresses)}: see whether that runs and the network carries")
    return Problem(code=code, message="; ".join(words))
