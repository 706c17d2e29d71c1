"""The goal of an update, and which goals take turns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from ckpt_engine.core.version import Version
from ckpt_engine.machines.events import Call, Published
from ckpt_engine.machines.manager.deploy import Staging
from ckpt_engine.v1 import manager_pb2


@dataclass(frozen=True)
class HeldVersion:
    """A version that was sealed before, and is only read again."""

    identity: Version
    record: manager_pb2.BlobRef | None  # if its sources need digest no more than what is finer than this
    fill: int = 0  # epoch of the fill fence under which its ranks sealed it; 0: unknown


@dataclass
class Goal:
    """The goal of an update: to bring replicas to a version that ranks seal in it, or that was sealed before.

    An update commits the version for a selection of replicas, by their names or as `everybody` in their pool. An
    *attempt* is for one replica, and carries out an earlier commit; no call asked for it.
    """

    lineage: str
    version: int
    published: Published  # what offers it
    replicas: tuple[str, ...]  # that it is for, by name
    calls: dict[int, Call]  # by trainer rank
    pause_mode: manager_pb2.PauseMode
    min_replicas: int | None  # how many suffice; None: it is carried out for one too, but is ok only with all
    selection: frozenset[str]  # that is to serve the version from its commit on; empty: it is an attempt
    end: float  # monotonic seconds by which it must have reported
    held: HeldVersion | None = None  # None: it is sealed now, and its root is not known yet
    before: Version | None = None  # the lineage's version before this one, if one is known
    prefetch: manager_pb2.Prefetch = manager_pb2.PREFETCH_AUTO  # whether relays are filled first
    until: manager_pb2.Until = manager_pb2.UNTIL_INSTALLED  # what its callers wait for
    pool: str = ""  # that of its replicas
    called: float | None = None  # when the first rank called, monotonic seconds; None: none did
    dry_run: bool = False  # it only prepares and plans, and reports what it would do
    adapts: bool = False  # its ranks can publish once more, in the dtypes that replicas keep
    staging: Staging | None = None  # how it is deployed in waves; None: to all of its replicas at once
    waits: bool = False  # its replica, once it is ready, waits for those that it is to be installed together with
    keeps_draft: bool = False  # draft models that the version has no weights for keep their own
    probe: manager_pb2.BlobRef | None = None  # what engines are asked once they serve it; None: nothing
    # Epoch of the fill fence under which its ranks have sealed the version for a manager that led before, and have
    # waited since; 0: they have not.
    fill: int = 0
    resumes: HeldVersion | None = None  # that version, if it was committed: it is not sealed again; None: it is sealed

    @property
    def is_attempt(self) -> bool:
        """Whether it carries out an earlier commit."""
        return not self.selection

    @property
    def is_rollback(self) -> bool:
        """Whether it commits a version that was sealed before."""
        return self.held is not None and not self.is_attempt

    @property
    def known(self) -> HeldVersion | None:
        """The version, if it has its root and its record already, and is not sealed now."""
        return self.held or self.resumes

    @property
    def sealed(self) -> Version | None:
        """The version, if it was sealed before and is only read again."""
        return None if self.held is None else self.held.identity

    @property
    def holders(self) -> frozenset[str]:
        """The holders that it reads, by the ids of what they offer."""
        return frozenset(source.source for source in self.published.sources if source.rank is None)

    def meets(self, other: Goal) -> bool:
        """Whether the two take turns: they are for one replica, for one pool, or of one lineage. Attempts for different
        replicas run side by side, and beside other pools' updates of their lineage unless both read its ranks."""
        if not set(self.replicas).isdisjoint(other.replicas):
            return True
        attempts = self.is_attempt + other.is_attempt
        if attempts == 2:
            return False
        ranks = attempts == 0 or (self.reads_ranks and other.reads_ranks)
        return self.pool == other.pool or (self.lineage == other.lineage and ranks)

    @property
    def reads_ranks(self) -> bool:
        """Whether some of its sources are trainer ranks, which obey rising fill fences as holders do."""
        return any(source.rank is not None for source in self.published.sources)

    @property
    def least(self) -> int:
        """The least number of replicas that must be able to be updated; with fewer it is refused."""
        return 1 if self.min_replicas is None else self.min_replicas


class QueuedGoal(NamedTuple):
    """A call that waits only for its turn."""

    description: str  # what it is, for people
    goal: Goal
    dequeue: Callable[[], None]  # takes it out of the calls that wait; to be called before its update is started
    call: int | None = None  # its number among those that wait for holders, below 0; None: it needs none to begin
