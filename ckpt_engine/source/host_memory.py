"""CPU memory of a source: arenas of this process, in which tensors live or into which they are copied at each seal."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from weakref import WeakKeyDictionary

import torch

from ckpt_engine.digest.prepared import prepare_digests
from ckpt_engine.source.rehome import by_storage, byte_range, move, storage_bytes
from ckpt_engine.torch_storages import storage_key
from ckpt_engine.transport.base import HostMemory
from ckpt_engine.transport.shared_memory.memory import ALIGNMENT, OwnedMemory, SharedArena, arena_at


@dataclass(frozen=True, slots=True)
class FormerMemory:
    """Memory that tensors were moved out of.

    It lives as long as the arena that they were moved into, so that a pointer into it, kept unseen by other code, never
    points to other memory. It is compared at each seal, since such a write reaches neither the tensors nor a replica.
    """

    names: tuple[str, ...]  # of the tensors that lay there
    bytes: torch.Tensor
    start: int  # the address to which these bytes moved


_ROW = 8192  # bytes

_former_memories: WeakKeyDictionary[OwnedMemory, list[FormerMemory]] = WeakKeyDictionary()
"""By arena, in the order of their starts."""


class HostOffer:
    """Room for tensors in shared memory. `regions[i]`, `offsets[i]`, `memory[i]`: where tensor i lies.

    Copies are contiguous; tensors that live there keep their strides.
    """

    def __init__(
        self,
        names: Sequence[str],
        tensors: Sequence[torch.Tensor],
        served: Sequence[torch.dtype],
        copied: Sequence[bool],
        published: Sequence[torch.Tensor],
        lend: Callable[[HostMemory], int],
    ) -> None:
        """Moves tensors that are not copied and lie in no arena yet into a new one: whole storages, with all tensors of
        `published` in them. lend: called with each arena before anything moves; returns its region.

        Raises UNAVAILABLE without room, and what `lend` raises; nothing has moved then.
        """
        on_cpu = [index for index, each in enumerate(tensors) if each.device.type == "cpu" and each.numel()]
        live = [index for index in on_cpu if not copied[index]]
        homes = {index: found for index in live if (found := arena_at(tensors[index].data_ptr())) is not None}
        moving = by_storage([tensors[index] for index in live if index not in homes], of=published)
        offsets, strides, size = [0] * len(tensors), [contiguous(tensor.shape) for tensor in tensors], 0
        places: dict[int, int] = {}
        for group in moving:
            places[storage_key(group[0])] = size
            size = _align(size + group[0].untyped_storage().nbytes())
        for index, tensor in enumerate(tensors):
            if copied[index]:
                offsets[index] = size
                size = _align(size + tensor.numel() * served[index].itemsize)
            else:
                strides[index] = tensor.stride()
        self._arena = SharedArena(max(size, ALIGNMENT)) if size or not homes else None
        new = [] if self._arena is None else [self._arena.memory]
        arenas = list(dict.fromkeys([*new, *homes.values()]))
        try:
            regions = {memory: lend(memory.lendable()) for memory in arenas}
        except BaseException:
            if self._arena is not None:
                self._arena.close()
            raise
        for index in live:
            if index in homes:
                offsets[index] = tensors[index].data_ptr() - homes[index].address
            else:
                offsets[index] = places[storage_key(tensors[index])] + byte_range(tensors[index])[0]
        within = [homes.get(index, arenas[0]) for index in range(len(tensors))]
        self.regions = [regions[memory] for memory in within]
        self.offsets = offsets
        self.memory = [
            memory.tensor(offset, tensor.shape, dtype, stride)
            for memory, tensor, dtype, offset, stride in zip(within, tensors, served, offsets, strides, strict=True)
        ]
        if moving:
            _move(arenas[0], places, moving, _names(names, tensors, on_cpu))
        self._former = list(
            {id(former): former for index in on_cpu if (former := _former_memory_of(tensors[index]))}.values()
        )
        boxes = [(part, (0,) * part.dim()) for former in self._former for part in _parts(former.bytes)]
        self._former_digests = prepare_digests(boxes) if boxes else None
        self._digests_at_move = self._former_digests.run() if self._former_digests is not None else []

    def written(self) -> list[str]:
        """Names of moved tensors if something has written to their former memory since. Reads all of that memory."""
        if self._former_digests is None:
            return []
        owners = [former for former in self._former for _ in _parts(former.bytes)]
        found = zip(owners, self._digests_at_move, self._former_digests.run(), strict=True)
        return sorted(
            {name for former, old_digest, new_digest in found if new_digest != old_digest for name in former.names}
        )

    def close(self) -> None:
        """Releases the arena; tensors that live in it keep it."""
        self.memory, self._former, self._former_digests = [], [], None
        if self._arena is not None:
            self._arena.close()


def _move(
    arena: OwnedMemory, places: dict[int, int], moving: Sequence[Sequence[torch.Tensor]], names: dict[int, list[str]]
) -> None:
    """Moves storages, each given by all tensors that use it, to their places, and keeps the former memory."""
    for group in moving:
        key, old = storage_key(group[0]), storage_bytes(group[0])
        home = arena.tensor(places[key], old.shape, torch.uint8)
        home.copy_(old)
        move(group, home)
        _former_memories.setdefault(arena, []).append(FormerMemory(tuple(names[key]), old, home.data_ptr()))


def _former_memory_of(tensor: torch.Tensor) -> FormerMemory | None:
    """The memory that a tensor was moved out of; None: it was not moved."""
    arena = arena_at(tensor.data_ptr())
    memories = [] if arena is None else _former_memories.get(arena, [])
    after = bisect_right(memories, tensor.data_ptr(), key=attrgetter("start"))
    found = memories[after - 1] if after else None
    return found if found and tensor.data_ptr() < found.start + found.bytes.numel() else None


def _names(names: Sequence[str], tensors: Sequence[torch.Tensor], on_cpu: Sequence[int]) -> dict[int, list[str]]:
    """The names of the tensors that lie in each storage."""
    found: dict[int, list[str]] = defaultdict(list)
    for index in on_cpu:
        found[storage_key(tensors[index])].append(names[index])
    return found


def _parts(memory: torch.Tensor) -> list[torch.Tensor]:
    """Bytes as rows of 16-bit integers, and the remainder. Rows are digested several times as fast as one long row."""
    whole = memory.numel() // _ROW * _ROW
    return [part for part in (memory[:whole].view(torch.int16).view(-1, _ROW // 2), memory[whole:]) if part.numel()]


def contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides, in elements, of a tensor of this shape that lies in one piece."""
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))


def _align(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
