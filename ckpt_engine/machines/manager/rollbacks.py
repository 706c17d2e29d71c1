"""Rollbacks that were called and have not begun: which version each means, what holds it, and which one is next.

A rollback is an update that reads a version which holders still hold. Decides
- which version is meant: by number, and by lineage unless holders hold that number of one lineage only;
- whether holders are believed to hold it: only with the root that the ledger or a worker's words know it by;
- when it begins: after what runs, as updates do, and before updates that are gathered.
Once it has begun it is an `Update` without ranks that seal (`turns.py` starts it).
Changes no member: the result is a Goal, a Problem, or to wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from ckpt_engine.core.names import some
from ckpt_engine.core.problems import CkptEngineError, aborted, deadline, invalid, not_found, precondition
from ckpt_engine.core.version import Version
from ckpt_engine.machines.events import Call, Published
from ckpt_engine.machines.manager.goal import Goal, HeldVersion, QueuedGoal
from ckpt_engine.machines.manager.holdings import Holdings
from ckpt_engine.machines.manager.lineages import known_lineage, lineages
from ckpt_engine.machines.manager.state import ManagerState
from ckpt_engine.machines.manager.update_options import complete, difference, replicas_for, selection_of
from ckpt_engine.machines.manager.versions import Content
from ckpt_engine.v1 import manager_pb2, weights_pb2

MOST_NAMED = 8
"""Held versions that a refusal names; more are counted."""


@dataclass
class PendingRollback:
    """One call that has not begun."""

    call: Call
    request: manager_pb2.RollbackRequest
    options: manager_pb2.UpdateOptions  # of the request, complete
    end: float  # monotonic seconds by which it must have reported
    goal: Goal | None = None  # None: it lacks something
    identity: Version | None = None  # the version that is meant, once that is known
    lacks: str = "members dial in again, since the manager was restarted"  # what it waits for, for people


@dataclass(frozen=True, slots=True)
class RollbackEnd:
    """Key of the timer that refuses a rollback which has not begun."""

    number: int


@dataclass
class Rollbacks:
    """Rollbacks that wait."""

    state: ManagerState
    holdings: Holdings
    waiting: dict[int, PendingRollback] = field(default_factory=dict)  # by number, in their order
    running: list[Goal] = field(default_factory=list)  # of those that run, so that `holdings` keeps their joins
    numbers: int = 0  # how many were called

    def join(self, call: Call, request: manager_pb2.RollbackRequest, now: float) -> None:
        """Takes a call in. Raises INVALID_ARGUMENT for a request that cannot be a rollback."""
        if request.version < 0:
            raise invalid(f"version {request.version} is negative")
        options = complete(request.options)
        own = {"pause_mode", "replicas", "pool", "draft"}
        if unknown := set(difference((options, complete(manager_pb2.UpdateOptions())))) - own:
            raise invalid(f"a rollback has no option {' and '.join(sorted(unknown))}")
        self.numbers += 1
        end = now + (options.timeout_seconds or self.state.deadlines.update)
        self.waiting[self.numbers] = PendingRollback(call, request, options, end)
        self.state.set_timer(RollbackEnd(self.numbers), end - self.state.deadlines.report - now)

    def cancelled(self, call: Call) -> None:
        """Forgets a rollback that was cancelled before it began."""
        for number in [number for number, pending in self.waiting.items() if pending.call == call]:
            self._end(number)

    def look(self, settled: bool, others: Sequence[Goal], now: float) -> None:
        """Refuses rollbacks that cannot begin, and finds those that are ready. Called after every event. others: the
        goals that run."""
        if not (self.waiting or self.running or self.holdings.called):
            return  # after nearly every event
        taken: set[str] = set()
        for number, pending in list(self.waiting.items()):
            try:
                self.state.check_ledger()
                pending.goal = self._goal(pending, others, taken, now) if settled else None
            except CkptEngineError as error:
                self._refuse(number, error.problem)
        self.running = [goal for goal in self.running if any(goal is other for other in others)]
        identities = [each.identity for each in self.waiting.values()] + [goal.sealed for goal in self.running]
        self.holdings.called = frozenset(identity for identity in identities if identity is not None)

    def coming(self) -> list[QueuedGoal]:
        """The rollbacks that are ready, in their order."""
        return [
            QueuedGoal(_describe(pending), pending.goal, partial(self._dequeue, number), -number)
            for number, pending in self.waiting.items()
            if pending.goal is not None
        ]

    def _dequeue(self, number: int) -> None:
        """Moves a rollback from those that wait to those that run."""
        goal = self.waiting[number].goal
        assert goal is not None
        self._end(number)
        self.running.append(goal)

    def timer(self, number: int) -> None:
        """Refuses a rollback that has not begun in time."""
        pending = self.waiting.get(number)
        if pending is not None:
            lacks = pending.lacks
            if pending.goal is not None:
                lacks = self.state.undecided(pending.goal.pool, pending.goal.lineage) or "others to end"
            self._refuse(number, deadline(f"{_describe(pending)} did not begin in time: it waited for {lacks}").problem)

    def describe(self) -> str:
        """What rollbacks wait for, for people; empty: there are none."""
        return " | ".join(
            f"{_describe(pending)} waits for {pending.lacks or 'its turn'}" for pending in self.waiting.values()
        )

    def _goal(self, pending: PendingRollback, others: Sequence[Goal], taken: set[str], now: float) -> Goal | None:
        """The goal of a rollback; None: wait. taken: lineages of rollbacks before it. Raises CkptEngineError if it must
        be refused."""
        request = pending.request
        identity = self._identity(request)
        for goal in others:
            if not goal.is_attempt and goal.lineage == identity.lineage:
                raise aborted(f"an update of lineage {identity.lineage!r} runs, to version {goal.version}: try again")
        replicas = replicas_for(self.state, pending.options, now)
        if identity.lineage in taken:
            pending.lacks = f"another rollback of lineage {identity.lineage!r}"
            return None
        taken.add(identity.lineage)
        pending.identity = identity
        self.holdings.called |= {identity}
        held = self._held(identity)
        pending.lacks = "" if held is not None else f"a look at what holders hold of {identity}"
        if held is None:
            return None
        published, record = held
        content = self.state.versions.contents.get(identity)
        return Goal(
            lineage=identity.lineage,
            version=identity.number,
            published=published,
            replicas=replicas,
            calls={0: pending.call},
            pause_mode=pending.options.pause_mode,
            min_replicas=None,
            selection=selection_of(pending.options),
            end=pending.end,
            held=HeldVersion(identity, record),
            pool=pending.options.pool,
            keeps_draft=pending.options.draft == manager_pb2.DRAFT_KEEP,
            probe=None if content is None else content.probe,
        )

    def _identity(self, request: manager_pb2.RollbackRequest) -> Version:
        """The version that is meant. Raises NOT_FOUND, FAILED_PRECONDITION or INVALID_ARGUMENT, saying what is held."""
        what = f"version {request.version}" + (f" of lineage {request.lineage!r}" if request.lineage else "")
        held = [
            (holder.source, each.identity) for holder in self.state.members.connected_holders() for each in holder.held
        ]
        matches = [
            (source, identity)
            for source, identity in held
            if identity.number == request.version and request.lineage in ("", identity.lineage)
        ]
        if not matches:
            if request.lineage:
                known_lineage(lineages(self.state), request.lineage)
            holders = [holder.source for holder in self.state.members.connected_holders()]
            raise not_found(f"nothing that is connected holds {what}: {_listed(held) or _none_held(holders)}")
        by_lineage = {identity.lineage: identity for _, identity in matches if self.state.versions.knows(identity)}
        if not by_lineage:
            raise precondition(
                f"neither the ledger nor a worker knows the root of {what}, so no holder is believed: "
                + _listed(matches)
            )
        if len(by_lineage) > 1:
            raise invalid(
                f"{what} is held of the lineages {', '.join(map(repr, sorted(by_lineage)))}: name one of them"
            )
        return by_lineage.popitem()[1]

    def _held(self, identity: Version) -> tuple[Published, manager_pb2.BlobRef] | None:
        """The sources of the version, and its record; None: they are being joined. Raises FAILED_PRECONDITION."""
        held = self.holdings.of(Content(identity), called=True)
        joining = self.holdings.joinings.get((identity, True))
        if held is None and joining is not None and joining.joined is not None:
            why = "; ".join(problem.message for _, problem in sorted(joining.joined.refused.items()))
            raise precondition(f"what holders hold of {identity} cannot be read: {why}")
        return held

    def _refuse(self, number: int, problem: weights_pb2.Problem) -> None:
        self.state.finish(self.waiting[number].call, problem)
        self._end(number)

    def _end(self, number: int) -> None:
        del self.waiting[number]
        self.state.cancel_timer(RollbackEnd(number))


def _describe(pending: PendingRollback) -> str:
    lineage = pending.goal.lineage if pending.goal is not None else pending.request.lineage
    return f"rollback to version {pending.request.version}" + (f" of lineage {lineage!r}" if lineage else "")


def _listed(held: list[tuple[str, Version]]) -> str:
    """The versions that are held, with their holders, for people."""
    by_version: dict[str, list[str]] = {}
    for source, identity in sorted(held, key=lambda each: (each[1].lineage, each[1].number, each[0])):
        by_version.setdefault(str(identity), []).append(source)
    lines = [
        f"{', '.join(sources)} {'holds' if len(sources) == 1 else 'hold'} {each}"
        for each, sources in by_version.items()
    ]
    if len(lines) > MOST_NAMED:
        lines = [*lines[:MOST_NAMED], f"and {len(lines) - MOST_NAMED} more versions are held"]
    return "; ".join(lines)


def _none_held(holders: list[str]) -> str:
    """Why nothing is held, and what to do, for people."""
    why = "no holder of versions is connected (`ckpt-engine relay`)"
    if holders:
        verb = "is connected and holds" if len(holders) == 1 else "are connected and hold"
        why = (
            f"{some(holders, MOST_NAMED)} {verb} no version yet: an update fills relays if replicas need them, and "
            "always with prefetch 'always'"
        )
    return f"{why}; `ckpt-engine update --checkpoint` brings what a directory holds, under the next version"
