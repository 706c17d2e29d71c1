"""Which replica is to be brought to the latest version of its lineage, and when it is tried again.

A replica that came late, was restarted or was quarantined does not hold what it is to hold (`versions`). If all
sources of that version stay sealed, or holders hold it, it is brought up alone, without a caller, from whoever of them
is nearest. What the sealed record tells need not be hashed again: of what holders hold, and of what the ranks hold if
they were not told to seal another version since. Decides nothing about how: that is an update.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from ckpt_engine.core.deadlines import CATCH_UP_ATTEMPTS
from ckpt_engine.core.problems import precondition
from ckpt_engine.machines.events import HeldOffer, Key, Peer, Published, SourceOffer
from ckpt_engine.machines.manager.goal import Goal
from ckpt_engine.machines.manager.holdings import Holdings
from ckpt_engine.machines.manager.members import Replica, Unfit
from ckpt_engine.machines.manager.publications import Publications
from ckpt_engine.machines.manager.state import State
from ckpt_engine.machines.manager.versions import Latest, describe
from ckpt_engine.v1 import manager_pb2

CATCH_UP: Key = ("catch up",)


@dataclass
class Attempts:
    """Attempts to bring the same workers to the same version, while the same relays are there: they may be what lacked.
    told: the session that heard that nobody can be read."""

    workers: tuple[bytes, ...]
    identity: bytes
    relays: frozenset[str]
    count: int = 0
    next: float = 0.0
    told: Peer | None = None


@dataclass
class CatchUp:
    """Remembers attempts by replica, so that what cannot work is not tried for ever."""

    state: State
    publications: Publications
    holdings: Holdings
    attempts: dict[str, Attempts] = field(default_factory=dict)

    def goal(self, busy: Collection[str], may: Callable[[Goal], bool], now: float) -> Goal | None:
        """The next replica's turn, if there is one; sets a timer for the next one that must wait. busy: pools whose
        replicas have no turn now. may: whether a goal may begin."""
        waits = []
        for replica in self.state.members.receivers():
            if replica.pool in busy:
                continue
            latest = self.state.versions.of(replica.name)
            if latest is None or not _lacks(replica, latest) or self._never_loads(replica, latest) is not None:
                self.attempts.pop(replica.name, None)
                continue
            attempts = self._attempts(replica, latest)
            found = self._source(latest, attempts.count)
            if found is None:
                self._say_why_not(replica, latest, attempts)
                continue
            published, record = found
            if attempts.count >= CATCH_UP_ATTEMPTS:
                continue
            if attempts.next > now:
                waits.append(attempts.next - now)
                continue
            goal = Goal(
                lineage=latest.identity.lineage,
                version=latest.identity.version,
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
            attempts.next = now + self.state.deadlines.catch_up_retry * 2 ** (attempts.count - 1)
            return goal
        if waits:
            self.state.set_timer(CATCH_UP, min(waits))
        return None

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
        version = describe(latest.identity)
        if replica.workers and replica.holds(latest.identity):
            if replica.serving:
                return f"nothing is to be done: it serves {version}"
            reason = f"it holds {version} and is closed because {replica.closed_reason or 'its engine does not serve'}"
            wake = f"; wake it: `ckpt-engine wake {replica.name}`" if replica.asleep else ""
            raise precondition(f"{reason}: bringing weights would not help{wake}", replica=replica.name)
        if not _lacks(replica, latest):
            why = "asleep" if replica.asleep else "without workers"
            raise precondition(f"it is {why}, so it is not brought to {version}", replica=replica.name)
        never = self._never_loads(replica, latest)
        if never is not None:
            raise precondition(
                f"its engine can never load {version}: {never.problem.message}. Start an engine with that model, or "
                f"take it out with `ckpt-engine replica evict {replica.name}`",
                replica=replica.name,
            )
        if self._source(latest) is None and not self.holdings.looking(latest):
            raise precondition(
                f"no source of {version} stays sealed, and nobody else holds it, so nothing can be read now; the next "
                "update repairs it",
                replica=replica.name,
            )
        self.attempts.pop(replica.name, None)
        return f"it is brought to {version}"

    def cut_short(self, name: str) -> None:
        """The attempt was given up for something more important: it does not count."""
        attempts = self.attempts.get(name)
        if attempts is not None:
            attempts.count -= 1
            attempts.next = 0.0

    def _say_why_not(self, replica: Replica, latest: Latest, attempts: Attempts) -> None:
        """Nobody can be read: said once to each session."""
        if attempts.told != replica.peer and not self.holdings.looking(latest):
            attempts.told = replica.peer
            reason = (
                "no source of it stays sealed, and nobody holds it who is connected: it comes with the next update, or "
                "as soon as a trainer or a relay that holds it is there again"
            )
            self.state.send(replica, manager_pb2.NotBrought(identity=latest.identity, reason=reason))

    def _source(self, latest: Latest, attempt: int = 0) -> tuple[Published, manager_pb2.BlobRef | None] | None:
        """Where a version's bytes lie, if they stay there, and its record, if that tells what is there.

        What ranks and holders hold is joined, so that each worker reads whoever is nearest. Ranks that were told to
        seal another version since must digest all again, so they are no part of that: every second attempt reads them.
        """
        offered = self._offered(latest)
        stays = offered is not None and all(source.stays_sealed for source in offered.sources)
        if offered is None or not stays or any(self._taken_back(latest, source) for source in offered.sources):
            return self.holdings.of(latest)
        there = all(self._is_there(latest, source) for source in offered.sources)
        told = offered == latest.published and not latest.sealed_since and latest.record is not None
        ranks = offered.sources if there and told else ()
        held = self.holdings.of(latest, [HeldOffer(each.source, each.table, None, each.rank) for each in ranks])
        if held is not None and (told or not there or attempt % 2 == 0):
            return held
        if there and self.holdings.looking(latest):
            return None
        return offered, latest.record if there and told else None

    def _taken_back(self, latest: Latest, source: SourceOffer) -> bool:
        """Whether nothing is to be hoped for of it: its rank is there and offers something else, or nothing."""
        rank = None if source.rank is None else self.state.members.ranks(latest.identity.lineage).get(source.rank)
        return not source.outlives and rank is not None and rank.peer is not None and rank.table != source.table

    def _is_there(self, latest: Latest, source: SourceOffer) -> bool:
        return source.outlives or self.state.members.source(latest.identity.lineage, source) is not None

    def _offered(self, latest: Latest) -> Published | None:
        """What the ranks of a version published. After a rollback they have published another one since."""
        identity = latest.identity
        if latest.published is not None or self.state.versions.highest.get(identity.lineage) != identity:
            return latest.published
        return self.publications.get(identity.lineage).published

    def _never_loads(self, replica: Replica, latest: Latest) -> Unfit | None:
        offered = self._offered(latest)
        return None if offered is None else replica.never_loads(offered.manifest.digest)

    def _attempts(self, replica: Replica, latest: Latest) -> Attempts:
        workers, identity = replica.boot_ids(), latest.identity.SerializeToString(deterministic=True)
        relays = frozenset(each.session_id for each in self.state.members.holders.values() if each.filling is not None)
        known = self.attempts.get(replica.name)
        if known is None or (known.workers, known.identity) != (workers, identity) or not relays <= known.relays:
            known = self.attempts[replica.name] = Attempts(workers, identity, relays)
        return known


def _lacks(replica: Replica, latest: Latest) -> bool:
    return bool(replica.workers) and not replica.asleep and not replica.holds(latest.identity)
