"""Tasks of the relay's machine (see `machines/tasks.py`), and what its shell reports meanwhile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from ckpt_engine.core.rates import Rate
from ckpt_engine.v1 import manager_pb2, weights_pb2


@dataclass(frozen=True)
class CountSlot:
    """Fetch the blobs, check the record against the identity's root, lay the version out and take memory for it.
    Result: bytes. The slot still holds what it held, also if this fails."""

    slot: int
    command: manager_pb2.FillRelay
    seconds: float
    more: bool = False  # as of FillSlot


@dataclass(frozen=True)
class SlotFilled:
    """What a slot holds now."""

    table: bytes  # a serialised SourceTable
    record: bytes  # a serialised SealedRecord
    answer: manager_pb2.RelayFilled  # without fence and identity


@dataclass(frozen=True)
class FillSlot:
    """Stop lending the slot, wait for its readers as long as they may keep it, fill it, compare, and lend it. Result:
    SlotFilled.

    If it fails the slot holds nothing and is not lent. A second task waits for the first to end, within its own time,
    even if the first was answered for already.
    """

    slot: int
    command: manager_pb2.FillRelay
    seconds: float
    # The slot holds a part of this version, which others may be reading: that stays lent, also if this fails, and only
    # the rest is brought.
    more: bool = False


@dataclass(frozen=True)
class LetGoOf:
    """Unmap what these tables offer, once nothing reads it. Result: None."""

    tables: tuple[bytes, ...]  # digests
    seconds: float


@dataclass(frozen=True)
class StopFilling:
    """A command: end the task that counts or fills, soon; its Done comes all the same."""

    keep: bool = False  # the slot holds what has come, as if the rest were missing; otherwise the task fails


@dataclass(frozen=True)
class FillingProgress:
    """An event: how far the filling with this fence is. Optional; a few a second at most."""

    fence: weights_pb2.Fence
    bytes_done: int
    bytes_total: int


@dataclass(frozen=True)
class ChunksPassed:
    """An event: how fast the filling with this fence and attempt was passed on in all, once no relay asks for more of
    it. Optional."""

    fence: weights_pb2.Fence
    attempt: int
    sent: Rate


RelayTask: TypeAlias = CountSlot | FillSlot | LetGoOf
