"""Which replica is to be brought to the latest version of its lineage, when, and what it gives way to.

A replica that came late, was restarted or was quarantined does not hold what it is to hold (`versions`). If that
version can be read (`holdings`), it is brought up alone, without a caller. Decides nothing about how: that is an
update.

It is brought up only when nothing else can be done in its pool, and gives way to what comes meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import cache, partial
from zlib import crc32

from ckpt_engine.core.deadlines import CATCH_UP_ATTEMPTS
from ckpt_engine.core.problems import precondition
from ckpt_engine.core.version import Version
from ckpt_engine.machines.events import Peer
from ckpt_engine.machines.manager.goal import Goal
from ckpt_engine.machines.manager.holdings import Holdings
from ckpt_engine.machines.manager.members import Replica, Unfit
from ckpt_engine.machines.manager.state import State
from ckpt_engine.machines.manager.turns import Turns
from ckpt_engine.machines.manager.versions import Latest
from ckpt_engine.v1 import manager_pb2


@dataclass(frozen=True, slots=True)
class CatchUpRetry:
    """Key of the timer of the next attempt that must wait."""


TURN = "its turn comes when nothing else goes on in its pool"

NO_SOURCE = (
    "no source of it stays sealed, and nothing that is connected holds it: it comes with the next update, or as soon "
    "as a trainer or a relay that holds it is there again"
)


@dataclass
class Attempts:
    """Attempts to bring the same workers to the same version, while the same sources are there."""

    workers: tuple[bytes, ...]  # boot ids, by rank
    identity: Version
    sources: frozenset[str]  # sessions of relays and of the lineage's ranks: a new one may be what lacked
    count: int = 0
    next: float = 0.0  # monotonic seconds; not before
    no_source_told: tuple[Peer, str] | None = None  # the session that heard why nothing can be read, and what it heard
    no_source: str = ""  # why nothing could be read when it was looked last, for people; empty: something could

    def due(self, now: float) -> bool:
        """Whether the next one may be made now."""
        return self.next <= now


@dataclass
class CatchUp:
    """Remembers attempts by replica. Each attempt that failed doubles the wait before the next one, up to
    `catch_up_retry_most`; a replica that serves is not tried more than CATCH_UP_ATTEMPTS times, since each attempt may
    pause it."""

    state: State
    holdings: Holdings
    attempts: dict[str, Attempts] = field(default_factory=dict)

    def goal(self, busy: Collection[str], may: Callable[[Goal], bool], now: float) -> Goal | None:
        """The next replica's turn, if there is one; sets a timer for the next one that must wait. busy: pools whose
        replicas have no turn now. may: whether a goal may begin."""
        waits = []
        sources = cache(self.sources)
        for replica in self.state.members.receivers():
            if replica.pool in busy:
                continue
            latest = self.state.versions.of(replica.name)
            if latest is None or replica.holds(latest.identity) or self._hindrance(replica, latest):
                self.attempts.pop(replica.name, None)
                continue
            attempts = self._attempts(replica, latest, sources(latest.identity.lineage))
            found = self.holdings.supply(latest, attempts.count)
            if found is None:
                attempts.no_source = self._no_source(latest)
                self._say_no_source(replica, latest, attempts)
                continue
            attempts.no_source = ""
            published, record = found
            if _given_up(replica, attempts):
                continue
            if not attempts.due(now):
                waits.append(attempts.next - now)
                continue
            goal = Goal(
                lineage=latest.identity.lineage,
                version=latest.identity.number,
                published=published,
                replicas=(replica.name,),
                calls={},
                pause_mode=manager_pb2.PAUSE_MODE_UNSPECIFIED,
                min_replicas=None,
                selection=frozenset(),
                end=now + self.state.deadlines.catch_up,
                late=latest.identity,
                record=record,
                pool=replica.pool,
            )
            if not may(goal):
                continue
            attempts.count += 1
            attempts.next = now + self._backoff(replica.name, attempts.count)
            return goal
        if waits:
            self.state.set_timer(CatchUpRetry(), min(waits))
        return None

    def sources(self, lineage: str) -> frozenset[str]:
        """The sessions that may have a version of this lineage to read: of its ranks and of relays."""
        members = self.state.members
        ranks = (trainer.session_id for trainer in members.trainers.values() if trainer.lineage == lineage)
        return frozenset((*ranks, *(each.session_id for each in members.holders.values() if each.filling is not None)))

    def standstill(
        self, replica: Replica, latest: Latest, sources: frozenset[str], now: float
    ) -> tuple[str, float | None]:
        """Why a replica that does not hold this version is not being brought to it, for people, and the seconds until
        the next attempt; None: what it waits for has no time. sources: as `sources` tells them. Starts nothing."""
        if hindrance := self._hindrance(replica, latest):
            return hindrance, None
        attempts = self.attempts.get(replica.name)
        if attempts is None or not _same(attempts, replica, latest, sources):
            return TURN, None
        if attempts.no_source:
            return attempts.no_source, None
        failed = f"{attempts.count} {'attempt' if attempts.count == 1 else 'attempts'} to bring it failed"
        failed += f": {replica.failure}" if replica.failure else ""
        if _given_up(replica, attempts):
            return (
                f"{failed}. It serves, and each attempt may pause it, so it is tried again only with another version, "
                f"other workers, relays or ranks, or by `ckpt-engine replica retry {replica.name}`"
            ), None
        return (failed, attempts.next - now) if attempts.count and attempts.next > now else (TURN, None)

    def retry(self, replica: Replica) -> str:
        """Forgets failed attempts, so that the replica's turn comes at once. Says what will happen, for people.

        Raises FAILED_PRECONDITION, saying why that cannot work.
        """
        latest = self.state.versions.of(replica.name)
        if latest is None:
            raise precondition(
                "no version was sealed that is meant for it: the next update that is for it brings it weights",
                replica=replica.name,
            )
        version = str(latest.identity)
        if replica.workers and replica.holds(latest.identity):
            if replica.serving:
                return f"nothing is to be done: it serves {version}"
            reason = f"it holds {version} and is closed because {replica.closed_reason or 'its engine does not serve'}"
            wake = f"; wake it: `ckpt-engine wake {replica.name}`" if replica.asleep else ""
            raise precondition(f"{reason}: bringing weights would not help{wake}", replica=replica.name)
        if hindrance := self._hindrance(replica, latest):
            raise precondition(f"it is not brought to {version}: {hindrance}", replica=replica.name)
        if self.holdings.supply(latest) is None and (reason := self._no_source(latest)):
            raise precondition(f"{version} cannot be brought to it now: {reason}", replica=replica.name)
        self.attempts.pop(replica.name, None)
        return f"it is brought to {version}"

    def cut_short(self, name: str) -> None:
        """The attempt was given up for something more important: it does not count."""
        attempts = self.attempts.get(name)
        if attempts is not None:
            attempts.count -= 1
            attempts.next = 0.0

    def _no_source(self, latest: Latest) -> str:
        """Why nothing can be read of a version without a source, for people; empty: that is not known yet."""
        if self.holdings.looking(latest):
            return ""
        problem = self.holdings.failure(latest)
        if problem is None:
            return NO_SOURCE
        return f"what is held of it could not be joined, and this is tried again in a moment: {problem.message}"

    def _say_no_source(self, replica: Replica, latest: Latest, attempts: Attempts) -> None:
        """Says once to each session that nothing can be read."""
        if attempts.no_source and replica.peer and attempts.no_source_told != (replica.peer, attempts.no_source):
            attempts.no_source_told = replica.peer, attempts.no_source
            self.state.send(
                replica, manager_pb2.NotBrought(identity=latest.identity.message(), reason=attempts.no_source)
            )

    def _hindrance(self, replica: Replica, latest: Latest) -> str:
        """What of the replica itself keeps it from being brought to a version; empty: nothing."""
        if (hold := self.state.holds.get(replica.name)) is not None:
            return f"it is {hold.told(replica.name)}"
        if replica.peer is None:
            return "its agent is not connected"
        if replica.asleep:
            return f"it is asleep; wake it: `ckpt-engine wake {replica.name}`"
        if not replica.workers:
            return "it is without workers: its agent has found no engine yet"
        never = self._never_loads(replica, latest)
        if never is not None:
            return (
                f"its engine can never load it: {never.problem.message}. Start an engine with that model, or take it "
                f"out with `ckpt-engine replica evict {replica.name}`"
            )
        return ""

    def _backoff(self, name: str, count: int) -> float:
        """Seconds after an attempt with this number, from 1 on, before the next one. Replicas that failed together are
        not tried together for ever: each adds up to a fifth of its own."""
        deadlines = self.state.deadlines
        least = min(deadlines.catch_up_retry_most, deadlines.catch_up_retry * 2.0 ** min(count - 1, 60))
        return least * (1 + crc32(f"{name} {count}".encode()) / 2**32 / 5)

    def _never_loads(self, replica: Replica, latest: Latest) -> Unfit | None:
        offered = self.holdings.offered(latest)
        return None if offered is None else replica.never_loads(offered.manifest.digest)

    def _attempts(self, replica: Replica, latest: Latest, sources: frozenset[str]) -> Attempts:
        known = self.attempts.get(replica.name)
        if known is None or not _same(known, replica, latest, sources):
            known = Attempts(replica.boot_ids(), latest.identity, sources)
            self.attempts[replica.name] = known
        return known


def _same(known: Attempts, replica: Replica, latest: Latest, sources: frozenset[str]) -> bool:
    """Whether nothing has come since these attempts that the next one could profit from."""
    same = (known.workers, known.identity) == (replica.boot_ids(), latest.identity)
    return same and sources <= known.sources


def _given_up(replica: Replica, attempts: Attempts) -> bool:
    """Whether no other attempt is made before something changes: it serves, and each attempt may pause it."""
    return replica.serving and attempts.count >= CATCH_UP_ATTEMPTS


@dataclass
class GivingWay:
    """How late replicas give way; one of each pool is brought up at a time."""

    state: State
    catch_up: CatchUp
    turns: Turns

    def begin(self, may: Callable[[Goal], bool], now: float) -> Goal | None:
        """The next one whose turn has come. may: whether one may begin, for all that this does not know of."""
        updates, coming = self.turns.updates, [each.goal for each in self.turns.coming()]
        busy = {update.goal.pool for update in updates.all()}
        if self.state.ledger_problem is not None or set(self.state.versions.pools.values()) <= busy:
            return None

        def free(goal: Goal) -> bool:
            return updates.lets(goal) and may(goal) and not any(map(goal.meets, coming))

        return self.catch_up.goal(busy, free, now)

    def give_way(self, now: float) -> None:
        """Gives way to updates whose turn has come, and to those that wait for a relay which it reads; then ends one of
        those that still wait for one another."""
        self._give_way(now)
        while (update := self.turns.updates.in_a_circle()) is not None:
            if update.goal.late is not None:
                self.catch_up.cut_short(update.goal.replicas[0])
            update.cut_short(
                "it and another update wait for relays that the other one reads: try again when that is over", now
            )

    def _give_way(self, now: float) -> None:
        if not self.turns.updates.late():
            return
        for coming in self.turns.coming():
            self.cut_short(partial(_in_the_way, coming.goal), f"{coming.said} came", now)
        wanted = self.turns.updates.in_the_way()
        for update in self.turns.updates.late():
            if update.number in wanted:
                self.cut_short(update.goal.meets, "an update waits for a relay that it uses", now)

    def cut_short(self, meets: Callable[[Goal], bool], reason: str, now: float) -> None:
        """Ends those that this meets."""
        for update in self.turns.updates.late():
            if meets(update.goal) and not update.cut:
                self.catch_up.cut_short(update.goal.replicas[0])
                update.cut_short(reason, now)


def _in_the_way(coming: Goal, late: Goal) -> bool:
    """Whether an update cannot begin because of a late replica's: they meet, or it reads a holder that this reads."""
    return coming.meets(late) or not coming.holders.isdisjoint(late.holders)
