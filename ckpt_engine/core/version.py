"""A weight version and a fence as values, which machines compare, keep and use as keys.

The wire's `Identity` and `Fence` are turned into these where a message comes in, and back where one is built. It
decides nothing: which version is meant, and which fence is obeyed, is up to the machines.
"""

from __future__ import annotations

from dataclasses import dataclass

from ckpt_engine.v1 import weights_pb2

ROOT_SHOWN = 12
"""Hexadecimal digits of a root in texts for people."""


@dataclass(frozen=True, slots=True)
class Version:
    """A version of weights. Two are the same only if all three fields are equal."""

    lineage: str  # the trainer run
    number: int  # the trainer's global step; rises within a lineage
    root: bytes  # 32 bytes: SHA-256 over every tensor's name, dtype, shape and digest

    @classmethod
    def of(cls, message: weights_pb2.Identity) -> Version:
        """The version that a message names. A message that is not set gives lineage '', number 0 and root b''."""
        return cls(message.lineage, message.version, message.root)

    @classmethod
    def or_none(cls, message: weights_pb2.Identity) -> Version | None:
        """The same; None for a message that is not set."""
        return cls.of(message) if message.ByteSize() else None

    def message(self) -> weights_pb2.Identity:
        """As the wire has it."""
        return weights_pb2.Identity(lineage=self.lineage, version=self.number, root=self.root)

    def __str__(self) -> str:
        """The version for people."""
        return f"version {self.number} of lineage {self.lineage!r} (root {self.root.hex()[:ROOT_SHOWN]})"


@dataclass(frozen=True, slots=True)
class Fence:
    """A fence. Fences of one cluster are ordered by their epochs. `Fence()` stands for none."""

    cluster: str = ""  # the id of the manager's ledger
    epoch: int = 0

    @classmethod
    def of(cls, message: weights_pb2.Fence) -> Fence:
        """The fence that a message carries; `Fence()` if it is not set."""
        return cls(message.cluster, message.epoch)

    def message(self) -> weights_pb2.Fence:
        """As the wire has it."""
        return weights_pb2.Fence(cluster=self.cluster, epoch=self.epoch)

    def __str__(self) -> str:
        """CLUSTER/EPOCH; unique among fences that were issued."""
        return f"{self.cluster}/{self.epoch}"
