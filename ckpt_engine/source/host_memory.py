"""CPU memory of a source: one shared arena, in which tensors live or into which they are copied at each seal."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ckpt_engine.source.rehome import byte_range, copy_segment, segments
from ckpt_engine.transport.shared_memory import ALIGNMENT, SharedArena
from ckpt_engine.v1.weights_pb2 import Region


class HostOffer:
    """Room for tensors in shared memory. `offsets[i]`, `memory[i]`: where tensor i lies.

    What is copied there is contiguous; what is to live there keeps its strides.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], served: Sequence[torch.dtype], copied: Sequence[bool]) -> None:
        """Copies in what is to live there; the caller makes the tensors point to it. Raises UNAVAILABLE: no room."""
        offsets, strides, size = [0] * len(tensors), [contiguous(tensor.shape) for tensor in tensors], 0
        moving = [index for index, each in enumerate(copied) if not each]
        placed = []
        for segment in segments([tensors[index] for index in moving]):
            at = segment.place(size)
            for member in segment.members:
                tensor = tensors[moving[member]]
                offsets[moving[member]] = at + byte_range(tensor)[0] - segment.start
            placed.append((segment, at))
            size = at + segment.stop - segment.start
        for index, tensor in enumerate(tensors):
            if copied[index]:
                offsets[index] = -(-size // ALIGNMENT) * ALIGNMENT
                size = offsets[index] + tensor.numel() * served[index].itemsize
            else:
                strides[index] = tensor.stride()
        self._arena = SharedArena(max(size, ALIGNMENT))
        for segment, at in placed:
            copy_segment(segment, self._arena, at)
        self.offsets = offsets
        self.memory = [
            self._arena.tensor(offset, tensor.shape, kept, stride)
            for tensor, kept, offset, stride in zip(tensors, served, offsets, strides, strict=True)
        ]

    def region(self, id: int) -> Region:
        """The one region of it."""
        return self._arena.region(id)

    def close(self) -> None:
        """Nobody can open it from now on; what lives in it goes on living."""
        self.memory = []
        self._arena.close()


def contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides, in elements, of a tensor of this shape that lies in one piece."""
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))
