"""The simulator's weights: what sources offer, what workers hold, and what was sealed.

A model has SLICES slices, and the content of a slice is a tag, say "run-0 step 3". A trainer's optimizer changes its
tags when it goes on training, so that a read which comes too late really reads other content. The digest of a slice is
its tag, which makes digests exact: no two contents have the same one.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

from ckpt_engine.core.problems import not_found
from ckpt_engine.core.version import Version
from ckpt_engine.v1 import manager_pb2, weights_pb2
from tests.simulation.collective import Collectives
from tests.simulation.hosts import COLLECTIVE, FILES, HOST, MEMORY, RELAY
from tests.simulation.world import World

SLICES = 4


class SourceGoneError(Exception):
    """The memory that a reader wants to read is not there any more."""


@dataclass
class Source:
    """What a rank offers: the slices s with s % world_size == rank.

    kind: "live": readers read the trainer's own memory. "snapshot": sealing copies it, and the copy stays. "directory":
    files, which stay when the process is gone. alive: whether the owner's process is. lent: not taken back.
    """

    lineage: str
    rank: int
    world_size: int
    kind: str
    model: str
    process: int = 0
    memory: dict[int, str] = field(default_factory=dict)
    sealed: dict[int, str] = field(default_factory=dict)
    alive: bool = True
    lent: bool = True
    host: weights_pb2.Host = field(default_factory=lambda: HOST)
    collective: bool = False  # whether it is offered for collectives alone

    @property
    def offered(self) -> tuple[str, ...]:
        """The transports over which it is read."""
        if self.collective:
            return (COLLECTIVE,)
        return (FILES,) if self.kind == "directory" else (MEMORY,)

    @property
    def meeting(self) -> str:
        """Where the lead is found if this is the lead's."""
        return f"{self.lineage} rank {self.rank} of process {self.process}"

    @property
    def region(self) -> weights_pb2.OfferedRegion:
        """All of it."""
        return weights_pb2.OfferedRegion(
            size=1, offers=[weights_pb2.Offer(transport=transport) for transport in self.offered]
        )

    def has(self, index: int) -> bool:
        """Whether it has this slice, of any version."""
        return index % self.world_size == self.rank

    @property
    def stays_sealed(self) -> bool:
        """Whether late replicas may read it."""
        return self.kind != "live"

    def table(self) -> bytes:
        """A SourceTable; that of a real source lists shards, this one says what the simulator needs.

        Memory belongs to a process, so its table differs from that of the process before; files stay the same.
        """
        owner = 0 if self.kind == "directory" else self.process
        return weights_pb2.SourceTable(
            id=f"rank {self.rank}",
            host=self.host,
            regions=[self.region],
            rank=self.rank,
            stays_sealed=self.stays_sealed,
            source_copies=int(self.kind == "snapshot"),
            description=json.dumps([self.lineage, self.world_size, self.kind, self.model, owner]),
        ).SerializeToString(deterministic=True)

    def train(self, tag: str) -> None:
        """The optimizer's step."""
        self.memory = {index: tag for index in range(SLICES) if index % self.world_size == self.rank}

    def seal(self, keep: bool) -> None:
        """Puts the present content where readers read."""
        if not keep:
            self.sealed = dict(self.memory)

    def read(self, index: int) -> str:
        """What is there at this moment."""
        if not self.alive and self.kind != "directory":
            raise SourceGoneError(f"rank {self.rank} of {self.lineage} is gone")
        if not self.lent and self.kind != "directory":
            raise SourceGoneError(f"rank {self.rank} of {self.lineage} has taken back what it published")
        content = self.memory if self.kind == "live" else self.sealed
        if index not in content:
            raise SourceGoneError(f"rank {self.rank} of {self.lineage} has sealed nothing")
        return content[index]

    def digests(self) -> dict[str, str]:
        """Of what is readable."""
        return {str(index): self.read(index) for index in self.memory}


@dataclass
class HeldSource(Source):
    """What a holder holds of one version, in its own memory. rank, world_size: of nothing. filled: of a relay's slot,
    what it was filled with last. lacks: slices that nobody brought then. relay: whose slot it is; empty: of none.
    silent: whether nobody answers on the network now."""

    source: str = ""
    filled: weights_pb2.Identity | None = None
    lacks: frozenset[int] = frozenset()
    relay: str = ""
    silent: bool = False

    @property
    def offered(self) -> tuple[str, ...]:
        """The transports over which it is read."""
        return (RELAY,) if self.relay else (MEMORY,)

    def has(self, index: int) -> bool:
        """Whether it has this slice."""
        return index not in self.lacks

    def table(self) -> bytes:
        """A SourceTable without a rank."""
        return weights_pb2.SourceTable(
            id=self.source,
            host=self.host,
            regions=[self.region],
            stays_sealed=True,
            description=json.dumps([self.lineage, sorted(self.lacks), self.kind, self.model, self.process]),
        ).SerializeToString(deterministic=True)


def ref_of(data: bytes) -> manager_pb2.BlobRef:
    """A blob's reference."""
    return manager_pb2.BlobRef(digest=hashlib.sha256(data).digest(), size=len(data))


class Blobs:
    """The manager's content store."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._held: dict[bytes, bytes] = {}
        self._touched: dict[bytes, float] = {}

    def put(self, data: bytes) -> manager_pb2.BlobRef:
        """Keeps bytes."""
        ref = ref_of(data)
        self._held[ref.digest] = data
        self._touched[ref.digest] = self._world.now
        return ref

    def get(self, ref: manager_pb2.BlobRef) -> bytes:
        """Raises NOT_FOUND."""
        if ref.digest not in self._held:
            raise not_found(f"no blob {ref.digest.hex()[:12]}")
        self._touched[ref.digest] = self._world.now
        return self._held[ref.digest]

    def peek(self, digest: bytes) -> bytes:
        """The bytes of a blob, for invariants: whoever looks so keeps it no longer."""
        return self._held[digest]

    def forget(self, ref: manager_pb2.BlobRef) -> None:
        """As if it had been stored with another manager."""
        self._held.pop(ref.digest, None)

    def drop(self, used: set[bytes], before: float) -> None:
        """Forgets what is not used and was last touched before that moment."""
        for digest in [digest for digest in self._held if digest not in used and self._touched[digest] < before]:
            del self._held[digest]

    def put_json(self, value: Any) -> manager_pb2.BlobRef:
        """Keeps a value."""
        return self.put(json.dumps(value, sort_keys=True).encode())

    def get_json(self, ref: manager_pb2.BlobRef) -> Any:
        """Gives it back."""
        return json.loads(self.get(ref))


class Truth:
    """What the simulator knows and no machine does: which content each root stands for, and every source there is."""

    def __init__(self, world: World) -> None:
        self.content: dict[bytes, list[str]] = {}
        self.sources: dict[bytes, Source] = {}  # by the digest of their table
        self.recorded: dict[tuple[str, int], list[Version]] = {}  # intents on any disk, by fence
        self.sleep_fences: set[tuple[str, int]] = set()  # of all commands to sleep or wake
        self.uncalled: set[tuple[str, int]] = set()  # fences of intents that bring up a late replica
        self.models: dict[str, str] = {}  # by lineage
        self.passing: dict[bytes, Any] = {}  # relays, by the locator under which they pass on
        self.collectives = Collectives(world)

    @staticmethod
    def hash(digests: dict[str, str]) -> bytes:
        """The root of these digests."""
        return hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).digest()

    def root(self, digests: dict[str, str]) -> bytes:
        """The same, remembered with its content."""
        root = self.hash(digests)
        self.content[root] = [digests[str(index)] for index in range(SLICES)]
        return root
