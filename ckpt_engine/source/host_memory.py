"""CPU memory of a source: one shared arena, in which tensors live or into which they are copied at each seal."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ckpt_engine.source.rehome import byte_range, move, storage_bytes
from ckpt_engine.torch_storages import storage_key
from ckpt_engine.transport.base import HostMemory
from ckpt_engine.transport.shared_memory import ALIGNMENT, SharedArena


class HostOffer:
    """Room for tensors in shared memory. `offsets[i]`, `memory[i]`: where tensor i lies.

    What is copied there is contiguous; what lives there keeps its strides.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        served: Sequence[torch.dtype],
        copied: Sequence[bool],
        moving: Sequence[Sequence[torch.Tensor]],
        lend: Callable[[HostMemory], object],
    ) -> None:
        """Moves the storages of `moving`, each given by all tensors that use it; those that are not copied lie in them.
        lend: is given all of it, one region, before anything moves.

        Raises UNAVAILABLE, and has moved nothing, without room, and what `lend` raises.
        """
        offsets, strides, size = [0] * len(tensors), [contiguous(tensor.shape) for tensor in tensors], 0
        homes: dict[int, int] = {}
        for group in moving:
            homes[storage_key(group[0])] = size
            size = _aligned(size + group[0].untyped_storage().nbytes())
        for index, tensor in enumerate(tensors):
            if copied[index]:
                offsets[index] = size
                size = _aligned(size + tensor.numel() * served[index].itemsize)
            else:
                strides[index] = tensor.stride()
                if tensor.numel():
                    offsets[index] = homes[storage_key(tensor)] + byte_range(tensor)[0]
        self._arena = SharedArena(max(size, ALIGNMENT))
        try:
            lend(self._arena.lendable())
        except BaseException:
            self._arena.close()
            raise
        self.offsets = offsets
        self.memory = [
            self._arena.tensor(offset, tensor.shape, kept, stride)
            for tensor, kept, offset, stride in zip(tensors, served, offsets, strides, strict=True)
        ]
        # What readers read is another object than what the owner's tensors use, so that the latter has no user but
        # them, and can be moved again when they are published again.
        for group in moving:
            old = storage_bytes(group[0])
            home = self._arena.tensor(homes[storage_key(group[0])], old.shape, torch.uint8)
            home.copy_(old)
            move(group, home)

    def close(self) -> None:
        """Lets go of it; what lives in it goes on living."""
        self.memory = []
        self._arena.close()


def contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides, in elements, of a tensor of this shape that lies in one piece."""
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
