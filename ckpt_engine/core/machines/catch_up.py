"""Which replica is to be brought to the latest version, and when it is tried again.

A replica that came late, was restarted or was quarantined does not hold the latest version. If all of that version's
sources stay sealed, it is brought up alone, without a caller. Decides nothing about how: that is an update.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ckpt_engine.core.deadlines import CATCH_UP_ATTEMPTS
from ckpt_engine.core.machines.events import Key, Published
from ckpt_engine.core.machines.manager_state import State, describe
from ckpt_engine.core.machines.members import Replica
from ckpt_engine.core.machines.order import Order
from ckpt_engine.core.machines.publications import Publications
from ckpt_engine.core.problems import precondition
from ckpt_engine.v1 import manager_pb2

CATCH_UP: Key = ("catch up",)


@dataclass
class Attempts:
    """Of bringing the same workers to the same version."""

    workers: tuple[bytes, ...]
    identity: bytes
    count: int = 0
    next: float = 0.0


@dataclass
class CatchUp:
    """Remembers attempts by replica, so that what cannot work is not tried for ever."""

    state: State
    publications: Publications
    attempts: dict[str, Attempts] = field(default_factory=dict)

    def order(self, now: float) -> Order | None:
        """The next replica's turn, if there is one; sets a timer for the next one that must wait."""
        latest, published = self.state.latest, self._published()
        if latest is None or published is None:
            return None
        waits = []
        for replica in self.state.members.receivers():
            if not self._lacks(replica) or replica.never_loads(published.manifest.digest) is not None:
                self.attempts.pop(replica.name, None)
                continue
            attempts = self._attempts(replica)
            if attempts.count >= CATCH_UP_ATTEMPTS:
                continue
            if attempts.next > now:
                waits.append(attempts.next - now)
                continue
            attempts.count += 1
            attempts.next = now + self.state.deadlines.catch_up_retry * 2 ** (attempts.count - 1)
            return Order(
                lineage=latest.identity.lineage,
                version=latest.identity.version,
                published=published,
                replicas=(replica.name,),
                calls={},
                pause_mode=manager_pb2.PAUSE_MODE_UNSPECIFIED,
                min_replicas=None,
                selection=None,
                end=now + self.state.deadlines.catch_up,
                late=latest.identity,
            )
        if waits:
            self.state.set_timer(CATCH_UP, min(waits))
        return None

    def retry(self, replica: Replica) -> str:
        """Forgets failed attempts, so that the replica's turn comes at once. Says what will happen, for people.

        Raises FAILED_PRECONDITION, saying why that cannot work.
        """
        latest = self.state.latest
        if latest is None:
            raise precondition("no version was sealed yet: the first update brings it weights", replica=replica.name)
        version = describe(latest.identity)
        if replica.workers and replica.holds(latest.identity):
            if replica.serving:
                return f"nothing is to be done: it serves {version}"
            reason = f"it holds {version} and is closed because {replica.closed_reason or 'its engine does not serve'}"
            raise precondition(f"{reason}: bringing weights would not help", replica=replica.name)
        if not self._lacks(replica):
            why = "asleep" if replica.asleep else "without workers" if not replica.workers else "not meant to have it"
            raise precondition(f"it is {why}, so it is not brought to {version}", replica=replica.name)
        offered = self._offered()
        never = None if offered is None else replica.never_loads(offered.manifest.digest)
        if never is not None:
            raise precondition(
                f"its engine can never load {version}: {never.problem.message}. Start an engine with that model, or "
                f"take it out with `ckpt-engine replica evict {replica.name}`",
                replica=replica.name,
            )
        if self._published() is None:
            raise precondition(
                f"no source of {version} stays sealed, so nothing can be read now; the next update repairs it",
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

    def _published(self) -> Published | None:
        """Where the latest version's bytes lie, if they stay there."""
        offered = self._offered()
        if offered is None or not all(source.stays_sealed for source in offered.sources):
            return None
        return offered

    def _offered(self) -> Published | None:
        """What the latest version's ranks published."""
        latest = self.state.latest
        return None if latest is None else latest.published or self.publications.get(latest.identity.lineage).published

    def _lacks(self, replica: Replica) -> bool:
        latest = self.state.latest
        assert latest is not None
        wanted = latest.selection is None or replica.name in latest.selection
        return wanted and bool(replica.workers) and not replica.asleep and not replica.holds(latest.identity)

    def _attempts(self, replica: Replica) -> Attempts:
        assert self.state.latest is not None
        workers, identity = replica.boot_ids(), self.state.latest.identity.SerializeToString(deterministic=True)
        known = self.attempts.get(replica.name)
        if known is None or known.workers != workers or known.identity != identity:
            known = self.attempts[replica.name] = Attempts(workers, identity)
        return known
