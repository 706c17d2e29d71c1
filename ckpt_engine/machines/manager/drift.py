"""Where each replica stands: what it is to serve, what its workers hold, why these differ, and since when.

Decides nothing and starts nothing: it is the one answer that status, page and metrics show.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache

from ckpt_engine.core.version import Version
from ckpt_engine.machines.manager.catch_up import CatchUp
from ckpt_engine.machines.manager.members import Replica
from ckpt_engine.machines.manager.state import State
from ckpt_engine.machines.manager.update import Update
from ckpt_engine.v1 import manager_pb2


@dataclass(frozen=True)
class Drift:
    """That a replica does not hold what it is to serve."""

    desired: Version
    reason: str  # for people
    seconds: float  # for so long, as far as this manager knows
    next_attempt: float | None  # seconds from now; None: it waits for something that has no time

    def message(self) -> manager_pb2.Drift:
        """As it travels."""
        return manager_pb2.Drift(reason=self.reason, seconds=self.seconds, next_attempt_seconds=self.next_attempt)


@dataclass
class Drifts:
    """The drifts of all replicas. Looked at after each event that may have changed something, and only at the replicas
    for which it may have."""

    state: State
    catch_up: CatchUp
    since: dict[str, float] = field(default_factory=dict)  # by replica: monotonic seconds
    revision: int = -1  # of Versions, when all replicas were looked at last

    def look(self, replicas: Iterable[Replica], now: float) -> None:
        """Notes when drifts begin and end. replicas: those of which the event told something."""
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
        """What it is to serve and does not hold; None: there is nothing."""
        latest = self.state.versions.of(replica.name) if replica.receives else None
        return None if latest is None or replica.holds(latest.identity) else latest.identity

    def all(self, updates: Sequence[Update], now: float) -> dict[str, Drift]:
        """The drifts by replica; one that holds what it is to serve, or for which nothing is meant, has none. updates:
        those that run."""
        running: dict[str, Update] = {}
        for update in updates:
            # An attempt for one replica has begun when its update has; an update for many may go on without a replica.
            names = update.under_way()[0] if not update.goal.is_attempt else update.goal.replicas
            running |= dict.fromkeys(names, update)
        sources = cache(self.catch_up.sources)
        drifts = {}
        for name in self.since:
            latest, replica = self.state.versions.of(name), self.state.members.replicas.get(name)
            if latest is None or replica is None:
                continue
            if name in running:
                reason, next_attempt = running[name].describe(), None
            else:
                reason, next_attempt = self.catch_up.standstill(replica, latest, sources(latest.identity.lineage), now)
            drifts[name] = Drift(latest.identity, reason, now - self.since[name], next_attempt)
        return drifts
