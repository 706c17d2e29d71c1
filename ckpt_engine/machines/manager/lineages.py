"""The lineages that exist, and what uses each: its ranks, replicas that hold a version of it or are to serve one, and
sources that can be read. Status, page and commands show these and no others.

Does not decide when a lineage is forgotten (forgetting.py), and stores nothing: all is derived from members and
versions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ckpt_engine.core.names import some
from ckpt_engine.core.problems import not_found
from ckpt_engine.core.version import Version
from ckpt_engine.machines.manager.members import TrainerRank
from ckpt_engine.machines.manager.state import ManagerState
from ckpt_engine.v1 import manager_pb2

FILES = "files"
"""The source of a version that is read from files, without any process that offers it."""


@dataclass
class Lineage:
    """One line of versions, and what uses it."""

    name: str
    latest: Version | None = None  # committed last; None: none was, or it is forgotten
    ranks: list[TrainerRank] = field(default_factory=list)  # also those that lost their session and may come back
    replicas: set[str] = field(default_factory=set)  # that hold a version of it, or are to serve one
    sources: set[str] = field(default_factory=set)  # from which a version of it can be read: holders, FILES

    @property
    def used(self) -> bool:
        """Whether anything uses it."""
        return bool(self.ranks or self.replicas or self.sources)

    def message(self) -> manager_pb2.LineageStatus:
        """The lineage as a protobuf message, for GetStatus."""
        return manager_pb2.LineageStatus(
            lineage=self.name,
            latest=None if self.latest is None else self.latest.message(),
            world_size=max((rank.world_size for rank in self.ranks), default=0),
            connected=sum(rank.peer is not None for rank in self.ranks),
            published=sum(rank.table is not None for rank in self.ranks),
            replicas=len(self.replicas),
            sources=len(self.sources),
        )


def lineages(state: ManagerState) -> dict[str, Lineage]:
    """All lineages by name, in the order of their names."""
    by_name: dict[str, Lineage] = {}

    def of(name: str) -> Lineage:
        return by_name.setdefault(name, Lineage(name))

    versions, members = state.versions, state.members
    for name, commit in versions.last.items():
        of(name).latest = commit.identity
    for trainer in members.trainers.values():
        of(trainer.lineage).ranks.append(trainer)
    for replica in members.replicas.values():
        held = {worker.identity.lineage for worker in replica.workers if worker.HasField("identity")}
        content = versions.of(replica.name) if replica.receives else None
        for name in held if content is None else held | {content.identity.lineage}:
            of(name).replicas.add(replica.name)
    for holder in members.holders.values():
        for each in holder.held:
            of(each.identity.lineage).sources.add(holder.source)
    for content in versions.contents.values():
        if content.published is not None and all(source.outlives for source in content.published.sources):
            of(content.identity.lineage).sources.add(FILES)
    return dict(sorted(by_name.items()))


def known_lineage(known: Mapping[str, Lineage], name: str) -> Lineage:
    """The lineage of this name. Raises NOT_FOUND, naming the known ones."""
    if name not in known:
        raise not_found(f"there is no lineage {name!r} ({some(list(known)) or 'none is known'})")
    return known[name]
