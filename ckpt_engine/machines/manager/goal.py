"""What an update is to do, and which updates take turns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from ckpt_engine.core.version import Version
from ckpt_engine.machines.events import Call, Published
from ckpt_engine.v1 import manager_pb2


@dataclass
class Goal:
    """What an update is to do. end: monotonic seconds by which it must have reported.

    replicas: those it is for, by name. min_replicas: how many of them suffice; None: it is carried out for one too, but
    is ok only with all. selection: what the version is for, as `selection_of` has it. late: the version that a late
    replica is brought to. back: the version that replicas are brought back to. Both were sealed before; with neither
    the version is sealed now, and its root is not known yet. record: the sealed record of a version that was sealed
    before, if the sources need digest no more than what is finer. before: the lineage's version before this one, if one
    is known. prefetch: whether relays are filled first. until: what its callers wait for.
    pool: that of its replicas. called: when the first rank called, monotonic seconds; None: none did.
    """

    lineage: str
    version: int
    published: Published
    replicas: tuple[str, ...]
    calls: dict[int, Call]  # by trainer rank
    pause_mode: manager_pb2.PauseMode
    min_replicas: int | None
    selection: frozenset[str]
    end: float
    late: Version | None = None
    record: manager_pb2.BlobRef | None = None
    before: Version | None = None
    prefetch: manager_pb2.Prefetch = manager_pb2.AUTO
    until: manager_pb2.Until = manager_pb2.INSTALLED
    back: Version | None = None
    pool: str = ""
    called: float | None = None
    dry_run: bool = False  # it only prepares and plans, and reports what it would do
    adapts: bool = False  # its ranks can publish once more, in the dtypes that replicas keep

    @property
    def sealed(self) -> Version | None:
        """The version, if it was sealed before and is only read again."""
        return self.late or self.back

    @property
    def holders(self) -> frozenset[str]:
        """The holders that it reads, by the ids of what they offer."""
        return frozenset(source.source for source in self.published.sources if source.rank is None)

    def meets(self, other: Goal) -> bool:
        """Whether the two take turns: they are for one pool, of one lineage, or for a replica that has changed its pool
        since one of them began."""
        if self.pool == other.pool or self.lineage == other.lineage:
            return True
        return not set(self.replicas).isdisjoint(other.replicas)

    @property
    def least(self) -> int:
        """The fewest replicas that can be updated with which it is not refused."""
        return 1 if self.min_replicas is None else self.min_replicas


class Coming(NamedTuple):
    """What was called and lacks nothing any more. said: what it is, for people. begin: to be called when its turn has
    come. key: by which it keeps holders that it waits for; below 0, as no update's number is; None: it reads none."""

    said: str
    goal: Goal
    begin: Callable[[], None]
    key: int | None = None
