"""Moves the memory of CPU tensors into a shared arena, so that readers see every later change without a copy.

The tensor objects stay: parameters in an optimizer, tied weights and hooks notice nothing. Tensors that share bytes
(a fused weight and its slices) still share them afterwards, and strides stay. A view of the old memory that is not
among the tensors (kept aside by the model) does not move with it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ckpt_engine.transport.shared_memory import ALIGNMENT, SharedArena


@dataclass(slots=True)
class Segment:
    """Bytes [start, stop) of one storage that must move as a whole, and the tensors in it by index."""

    storage: torch.UntypedStorage
    start: int
    stop: int
    members: list[int]

    def place(self, arena_bytes: int) -> int:
        """Where it goes in an arena of which `arena_bytes` are taken: alignment stays as it was, modulo ALIGNMENT."""
        return -(-arena_bytes // ALIGNMENT) * ALIGNMENT + self.start % ALIGNMENT


def segments(tensors: Sequence[torch.Tensor]) -> list[Segment]:
    """Groups tensors: two are in one segment if their byte ranges in a storage overlap. Empty ones are left out."""
    by_storage: dict[int, list[int]] = defaultdict(list)
    for index, tensor in enumerate(tensors):
        if tensor.numel():
            by_storage[tensor.untyped_storage().data_ptr()].append(index)
    found: list[Segment] = []
    for members in by_storage.values():
        current: Segment | None = None
        for start, stop, index in sorted((*byte_range(tensors[index]), index) for index in members):
            if current is None or start >= current.stop:
                current = Segment(tensors[index].untyped_storage(), start, stop, [])
                found.append(current)
            current.stop = max(current.stop, stop)
            current.members.append(index)
    return found


def byte_range(tensor: torch.Tensor) -> tuple[int, int]:
    """The bytes of its storage from a tensor's first element to behind its last."""
    start = int(tensor.storage_offset())
    span = 1 + sum((extent - 1) * step for extent, step in zip(tensor.shape, tensor.stride(), strict=True))
    return start * tensor.element_size(), (start + span) * tensor.element_size()


def copy_segment(segment: Segment, arena: SharedArena, offset: int) -> None:
    """Copies the bytes of a segment to `offset` in the arena."""
    old = torch.empty(0, dtype=torch.uint8).set_(segment.storage, segment.start, (segment.stop - segment.start,), (1,))
    arena.tensor(offset, old.shape, torch.uint8).copy_(old)
