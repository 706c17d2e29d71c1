"""Work that the relay's machine asks of its shell, and what is said meanwhile; see `machines/tasks.py`."""

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
    """What a slot holds now. table, record: serialised. answer: but for fence and identity."""

    table: bytes
    record: bytes
    answer: manager_pb2.RelayFilled


@dataclass(frozen=True)
class FillSlot:
    """Lend the slot to nobody, wait for its readers as long as they may keep it, fill it, compare, and lend it. Result:
    SlotFilled. If it fails the slot holds nothing and is lent to nobody. A second one waits for the first to end,
    within its own time, whatever the machine was told of the first.

    more: the slot holds a part of this very version, which others may be reading: it stays as it is and lent, also if
    this fails, and only the rest is brought."""

    slot: int
    command: manager_pb2.FillRelay
    seconds: float
    more: bool = False


@dataclass(frozen=True)
class LetGoOf:
    """Unmap what these tables offer, once nothing reads it. Result: None. tables: digests."""

    tables: tuple[bytes, ...]
    seconds: float


@dataclass(frozen=True)
class StopFilling:
    """A command: end the task that counts or fills, soon; its Done comes as ever."""


@dataclass(frozen=True)
class FillingProgress:
    """An event: how far the filling with this fence is. Needs not come; a few a second at most."""

    fence: weights_pb2.Fence
    bytes_done: int
    bytes_total: int


@dataclass(frozen=True)
class ChunksPassed:
    """An event: how fast the filling with this fence and attempt was passed on in all, now that nobody asks for more of
    it. Needs not come."""

    fence: weights_pb2.Fence
    attempt: int
    sent: Rate


RelayTask: TypeAlias = CountSlot | FillSlot | LetGoOf
