"""Keeps replicas at what they are to serve: decides which late replica is brought up next, and tells why others wait.

A replica that came late, was restarted or was quarantined does not hold what it is to serve (`versions`). If that
version can be read (`holdings`), an attempt brings it up alone, without a caller. This decides when, and what an
attempt gives way to; how is decided elsewhere, since an attempt is an update of one replica. Attempts run only while no
update runs in the pool, a few side by side, and give way to calls that come meanwhile.

A *drift* is what status, page and metrics show: what a replica is to serve and does not hold, why, and since when.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from zlib import crc32

from ckpt_engine.core.deadlines import CATCH_UP_ATTEMPTS
from ckpt_engine.core.problems import precondition
from ckpt_engine.core.version import Version
from ckpt_engine.machines.events import Peer
from ckpt_engine.machines.manager.goal import Goal, HeldVersion
from ckpt_engine.machines.manager.holdings import Holdings
from ckpt_engine.machines.manager.members import Replica, Unfit
from ckpt_engine.machines.manager.state import ManagerState
from ckpt_engine.machines.manager.turns import Turns
from ckpt_engine.machines.manager.update import Update
from ckpt_engine.machines.manager.versions import Content
from ckpt_engine.v1 import manager_pb2


@dataclass(frozen=True, slots=True)
class CatchUpRetry:
    """Key of the timer of the next attempt."""


ATTEMPTS_AT_ONCE = 4
"""Late replicas of one pool that are brought up side by side; they mostly read the same relays. Those of a deployment's
wave are not counted: its size is how many are brought up at once."""

TURN = "its turn comes when no update goes on in its pool, and fewer others are brought up there"

DOUBT = "the ledger has not answered whether a newer version was committed for it: that is read first"

NO_SOURCE = (
    "no source of it stays sealed, and nothing that is connected holds it: it comes with the next update, or as soon "
    "as a trainer or a relay that holds it is there again"
)


@dataclass
class Attempts:
    """Attempts to bring the same workers to the same version, with the same sources."""

    workers: tuple[bytes, ...]  # boot ids, by rank
    identity: Version
    sources: frozenset[str]  # sessions of relays and of the lineage's ranks: a new one may have what lacks
    count: int = 0
    next: float = 0.0  # the earliest time of the next attempt, monotonic seconds
    no_source_notice: tuple[Peer, str] | None = None  # the session that was last told why, and the reason
    no_source: str = ""  # why nothing could be read at the last look, for people; empty: something could

    def due(self, now: float) -> bool:
        """Whether the next attempt may be made now."""
        return self.next <= now


@dataclass
class CatchUp:
    """Remembers attempts by replica. Each attempt that failed doubles the wait before the next one, up to
    `catch_up_retry_most`; a replica that serves is not tried more than CATCH_UP_ATTEMPTS times, since each attempt may
    pause it."""

    state: ManagerState
    holdings: Holdings
    attempts: dict[str, Attempts] = field(default_factory=dict)

    def goal(self, busy: Callable[[Replica], bool], may: Callable[[Goal], bool], now: float) -> Goal | None:
        """The goal of the next attempt; None: there is none now, and a timer is set for the next one that waits for its
        time. busy: whether a replica must not be brought up now. may: whether a goal may begin."""
        delays = []
        sources = cache(self.sources)
        for replica in self.state.members.receivers():
            if busy(replica):
                continue
            content = self.state.versions.of(replica.name)
            if content is None or replica.holds(content.identity) or self._hindrance(replica, content):
                self.attempts.pop(replica.name, None)
                continue
            attempts = self._attempts(replica, content, sources(content.identity.lineage))
            supply = self.holdings.supply(content, attempts.count)
            if supply is None:
                attempts.no_source = self._no_source(content)
                self._say_no_source(replica, content, attempts)
                continue
            attempts.no_source = ""
            published, record = supply
            if _given_up(replica, attempts):
                continue
            if not attempts.due(now):
                delays.append(attempts.next - now)
                continue
            deployment = self.state.deployment_of(replica.name)
            goal = Goal(
                lineage=content.identity.lineage,
                version=content.identity.number,
                published=published,
                replicas=(replica.name,),
                calls={},
                pause_mode=manager_pb2.PAUSE_MODE_UNSPECIFIED if deployment is None else deployment.pause_mode,
                min_replicas=None,
                selection=frozenset(),
                end=now + self.state.deadlines.catch_up,
                held=HeldVersion(content.identity, record),
                pool=replica.pool,
                waits=deployment is not None and deployment.installs_together(content.identity),
                keeps_draft=self.state.versions.keeps_draft(replica.name),
                probe=content.probe,
            )
            if not may(goal):
                continue
            attempts.count += 1
            attempts.next = now + self._backoff(replica.name, attempts.count)
            return goal
        if delays:
            self.state.set_timer(CatchUpRetry(), min(delays))
        return None

    def sources(self, lineage: str) -> frozenset[str]:
        """The sessions from which a version of this lineage may be read: of its ranks and of relays."""
        members = self.state.members
        ranks = (trainer.session_id for trainer in members.trainers.values() if trainer.lineage == lineage)
        return frozenset((*ranks, *(each.session_id for each in members.holders.values() if each.filling is not None)))

    def standstill(
        self, replica: Replica, content: Content, sources: frozenset[str], now: float
    ) -> tuple[str, float | None]:
        """Why a replica that does not hold this version is not being brought to it, for people, and the seconds until
        the next attempt; None: that has no time. sources: of `sources`. Starts nothing."""
        if hindrance := self._hindrance(replica, content):
            return hindrance, None
        if not self.state.versions.is_certain((replica.name,), replica.pool):
            return DOUBT, None
        attempts = self.attempts.get(replica.name)
        if attempts is None or not _same(attempts, replica, content, sources):
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
        content = self.state.versions.of(replica.name)
        if content is None:
            raise precondition(
                "no version was sealed that is meant for it: the next update that is for it brings it weights",
                replica=replica.name,
            )
        version = str(content.identity)
        if replica.workers and replica.holds(content.identity):
            if replica.serving:
                return f"nothing is to be done: it serves {version}"
            reason = f"it holds {version} and is closed because {replica.closed_reason or 'its engine does not serve'}"
            wake = f"; wake it: `ckpt-engine replica wake {replica.name}`" if replica.asleep else ""
            raise precondition(
                f"{reason}, so another attempt to bring it weights would not help{wake}", replica=replica.name
            )
        if hindrance := self._hindrance(replica, content):
            raise precondition(f"it is not brought to {version}: {hindrance}", replica=replica.name)
        if self.holdings.supply(content) is None and (reason := self._no_source(content)):
            raise precondition(f"{version} cannot be brought to it now: {reason}", replica=replica.name)
        self.attempts.pop(replica.name, None)
        return f"it is brought to {version}"

    def cut_short(self, name: str) -> None:
        """Uncounts an attempt that was ended for something more important."""
        attempts = self.attempts.get(name)
        if attempts is not None:
            attempts.count -= 1
            attempts.next = 0.0

    def _no_source(self, content: Content) -> str:
        """Why a version has no source, for people; empty: that is not known yet."""
        if self.holdings.looking(content):
            return ""
        problem = self.holdings.failure(content)
        if problem is None:
            return NO_SOURCE
        return f"what is held of it could not be joined, and this is tried again in a moment: {problem.message}"

    def _say_no_source(self, replica: Replica, content: Content, attempts: Attempts) -> None:
        """Tells a replica's session, once, that the version cannot be read."""
        if attempts.no_source and replica.peer and attempts.no_source_notice != (replica.peer, attempts.no_source):
            attempts.no_source_notice = replica.peer, attempts.no_source
            self.state.send(
                replica, manager_pb2.NotBrought(identity=content.identity.message(), reason=attempts.no_source)
            )

    def _hindrance(self, replica: Replica, content: Content) -> str:
        """Why the replica itself cannot be brought to a version now, for people; empty: it can."""
        if (hold := self.state.holds.get(replica.name)) is not None:
            return f"it is {hold.describe(replica.name)}"
        if replica.peer is None:
            return "its agent is not connected"
        if replica.asleep:
            return f"it is asleep; wake it: `ckpt-engine replica wake {replica.name}`"
        if not replica.workers:
            return "it is without workers: its agent has found no engine yet"
        never = self._never_loads(replica, content)
        if never is not None:
            return (
                f"its engine can never load it: {never.problem.message}. Start an engine with that model, or take it "
                f"out with `ckpt-engine replica evict {replica.name}`"
            )
        return ""

    def _backoff(self, name: str, count: int) -> float:
        """Seconds from the attempt of this number, from 1 on, to the next one. Each replica adds up to a fifth, by its
        name, so that those that failed together are not tried together for ever."""
        deadlines = self.state.deadlines
        least = min(deadlines.catch_up_retry_most, deadlines.catch_up_retry * 2.0 ** min(count - 1, 60))
        return least * (1 + crc32(f"{name} {count}".encode()) / 2**32 / 5)

    def _never_loads(self, replica: Replica, content: Content) -> Unfit | None:
        offered = self.holdings.offered(content)
        return None if offered is None else replica.never_loads(offered.manifest.digest)

    def _attempts(self, replica: Replica, content: Content, sources: frozenset[str]) -> Attempts:
        attempts = self.attempts.get(replica.name)
        if attempts is None or not _same(attempts, replica, content, sources):
            attempts = Attempts(replica.boot_ids(), content.identity, sources)
            self.attempts[replica.name] = attempts
        return attempts


def _same(attempts: Attempts, replica: Replica, content: Content, sources: frozenset[str]) -> bool:
    """Whether workers and version are still those of these attempts, and no new source has come."""
    same = (attempts.workers, attempts.identity) == (replica.boot_ids(), content.identity)
    return same and sources <= attempts.sources


def _given_up(replica: Replica, attempts: Attempts) -> bool:
    """Whether there are no more attempts until something changes: it serves, and each attempt may pause it."""
    return replica.serving and attempts.count >= CATCH_UP_ATTEMPTS


@dataclass
class LateReplicas:
    """Decides when late replicas are brought up, a few of each pool at a time, and what that gives way to."""

    state: ManagerState
    catch_up: CatchUp
    turns: Turns

    def next_goal(self, may: Callable[[Goal], bool], now: float) -> Goal | None:
        """The goal of the next attempt, to be begun at once; None: there is none now. may: whether a goal may begin, as
        far as its caller knows."""
        updates = self.turns.updates
        pools = {update.goal.pool for update in updates.running if not update.goal.is_attempt}
        if self.state.ledger_problem is not None or pools.issuperset(self.state.versions.pools.values()):
            return None  # after nearly every event of an update
        coming = [each.goal for each in self.turns.turning()]
        in_progress = {update.goal.replicas[0]: update.goal.pool for update in updates.attempts()}
        pooled = (pool for name, pool in in_progress.items() if self.state.deployment_of(name) is None)
        attempts = Counter(pooled)
        full = {pool for pool in attempts if attempts[pool] >= ATTEMPTS_AT_ONCE}

        def busy(replica: Replica) -> bool:
            if replica.pool in pools or replica.name in in_progress:
                return True
            return replica.pool in full and self.state.deployment_of(replica.name) is None

        def free(goal: Goal) -> bool:
            return updates.lets(goal) and may(goal) and not any(map(goal.meets, coming))

        return self.catch_up.goal(busy, free, now)

    def give_way(self, now: float) -> None:
        """Cuts attempts short for updates that can begin but for them, and for updates that wait for their holders."""
        if not self.turns.updates.attempts():
            return
        for coming in self.turns.turning():
            self.cut_short(coming.goal.meets, f"{coming.description} came", now)
        blockers = self.turns.updates.in_the_way()
        for update in self.turns.updates.attempts():
            if update.number in blockers:
                self.cut_short(update.goal.meets, "an update waits for a relay that it uses", now)

    def cut_short(self, meets: Callable[[Goal], bool], reason: str, now: float) -> None:
        """Ends the attempts that stand in the way of something more important. meets: whether a goal does."""
        for update in self.turns.updates.attempts():
            if meets(update.goal) and not update.course.cut:
                self.catch_up.cut_short(update.goal.replicas[0])
                update.cut_short(reason, now)


@dataclass(frozen=True)
class Drift:
    """A replica does not hold the version that it should serve."""

    desired: Version
    reason: str  # for people
    seconds: float  # how long it has lasted, as far as this manager knows
    next_attempt: float | None  # seconds from now; None: it waits for an event, not for a time

    def message(self) -> manager_pb2.Drift:
        """The same as a protobuf message."""
        return manager_pb2.Drift(reason=self.reason, seconds=self.seconds, next_attempt_seconds=self.next_attempt)


@dataclass
class Drifts:
    """Keeps since when each replica has drifted. After an event, only the replicas that it may concern are checked."""

    state: ManagerState
    catch_up: CatchUp
    since: dict[str, float] = field(default_factory=dict)  # by replica, when its drift began, in monotonic seconds
    revision: int = -1  # of Versions, when all replicas were last checked

    def look(self, replicas: Iterable[Replica], now: float) -> None:
        """Notes when drifts begin and end. replicas: those that the event is about."""
        if self.revision != self.state.versions.revision:
            self.revision = self.state.versions.revision
            replicas = self.state.members.replicas.values()
            self.since = {name: at for name, at in self.since.items() if name in self.state.members.replicas}
        for replica in replicas:
            if self.desired(replica) is None:
                self.since.pop(replica.name, None)
            else:
                self.since.setdefault(replica.name, now)

    def desired(self, replica: Replica) -> Version | None:
        """The version that a replica should serve and does not hold; None: it has no drift."""
        content = self.state.versions.of(replica.name) if replica.receives else None
        return None if content is None or replica.holds(content.identity) else content.identity

    def all(self, updates: Sequence[Update], now: float) -> dict[str, Drift]:
        """The drifts, by replica. updates: those that run."""
        running: dict[str, Update] = {}
        for update in updates:
            # An attempt for one replica has begun when its update has; an update for many may go on without a replica.
            names = update.under_way()[0] if not update.goal.is_attempt else update.goal.replicas
            running |= dict.fromkeys(names, update)
        sources = cache(self.catch_up.sources)
        drifts = {}
        for name in self.since:
            content, replica = self.state.versions.of(name), self.state.members.replicas.get(name)
            if content is None or replica is None:
                continue
            if name in running:
                reason, next_attempt = running[name].describe(), None
            else:
                reason, next_attempt = self.catch_up.standstill(
                    replica, content, sources(content.identity.lineage), now
                )
            drifts[name] = Drift(content.identity, reason, now - self.since[name], next_attempt)
        return drifts
