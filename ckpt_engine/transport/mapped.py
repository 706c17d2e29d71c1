"""Reading from memory that is mapped: what shared memory and files have in common.

Runs in the reader. A `Mapping` is one region, mapped read-only. It is unmapped when the last tensor over it is gone,
never earlier, so no view can outlive its memory.
"""

from __future__ import annotations

import mmap
import warnings
from collections.abc import Callable, Sequence

import torch

from ckpt_engine.core.dtypes import itemsize, torch_dtype
from ckpt_engine.core.problems import invalid
from ckpt_engine.transport.base import Move
from ckpt_engine.v1.weights_pb2 import Region

BATCH_BYTES = 64 << 20
"""How much is copied between two calls of `on_bytes`: some 10 ms of work."""

BATCH_MOVES = 4096
"""Most small moves between two calls of `on_bytes`."""

_LANES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Mapping:
    """`size` bytes of an open file from `offset`, mapped read-only and shared. The descriptor may be closed then."""

    def __init__(self, descriptor: int, size: int, offset: int = 0, populate: bool = False) -> None:
        skipped = offset % mmap.ALLOCATIONGRANULARITY
        flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if populate else 0)
        # Nothing can be mapped of an empty region, and nothing needs to be.
        self._memory = (
            mmap.mmap(descriptor, skipped + size, flags=flags, prot=mmap.PROT_READ, offset=offset - skipped)
            if size
            else b""
        )
        self._skipped = skipped
        self._bases: dict[torch.dtype, torch.Tensor] = {}
        self.size = size

    def view(self, offset: int, shape: Sequence[int], stride: Sequence[int], dtype: str) -> torch.Tensor:
        """The elements at `offset` bytes as a tensor without a copy. Raises INVALID_ARGUMENT if they do not fit."""
        width = itemsize(dtype)
        if len(shape) != len(stride) or offset < 0 or min((*shape, *stride), default=0) < 0:
            raise invalid(f"a view at {offset} bytes with shape {list(shape)} and stride {list(stride)} makes no sense")
        if 0 in shape:
            return torch.empty(tuple(shape), dtype=torch_dtype(dtype))
        span = 1 + sum((extent - 1) * step for extent, step in zip(shape, stride, strict=True))
        if offset + span * width > self.size:
            raise invalid(
                f"a view of {span} x {width} bytes at {offset} reaches beyond the region of {self.size} bytes; "
                "the plan was made for another region"
            )
        start = self._skipped + offset
        if start % width:
            return self._tensor(torch_dtype(dtype), span, start).as_strided(tuple(shape), tuple(stride))
        base = self._bases.get(torch_dtype(dtype))
        if base is None:
            base = self._tensor(torch_dtype(dtype), len(self._memory) // width, 0)
            self._bases[torch_dtype(dtype)] = base
        return base.as_strided(tuple(shape), tuple(stride), start // width)

    def _tensor(self, dtype: torch.dtype, count: int, start: int) -> torch.Tensor:
        with warnings.catch_warnings():
            # Torch says once that it cannot mark memory as read-only. Nothing here writes to it.
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            return torch.frombuffer(self._memory, dtype=dtype, count=count, offset=start)


class MappedRegions:
    """OpenedRegions over mappings, by locator. `recheck` does what `check` promises."""

    def __init__(self, mappings: dict[bytes, Mapping], recheck: Callable[[], None]) -> None:
        self._mappings = mappings
        self._recheck = recheck

    def prepare(self, moves: Sequence[Move]) -> MappedCopy:
        """Checks every move and builds its views. Raises INVALID_ARGUMENT."""
        return MappedCopy([(move.destination, self._source(move)) for move in moves])

    def check(self) -> None:
        """Raises unless the regions are still those that were published."""
        self._recheck()

    def view(
        self, region: Region, offset: int, shape: Sequence[int], stride: Sequence[int], dtype: str
    ) -> torch.Tensor:
        """The source's memory as a tensor; see OpenedRegions."""
        mapping = self._mappings.get(region.locator)
        if mapping is None:
            raise invalid(f"region {region.id} ({region.transport}) was not opened, or was closed")
        return mapping.view(offset, shape, stride, dtype)

    def close(self) -> None:
        """Forgets the regions."""
        self._mappings = {}

    def _source(self, move: Move) -> torch.Tensor:
        destination = move.destination
        if tuple(destination.shape) != tuple(move.shape) or destination.dtype != torch_dtype(move.dtype):
            raise invalid(
                f"a piece of shape {list(move.shape)} and {move.dtype} does not fit a destination of shape "
                f"{list(destination.shape)} and {destination.dtype}; record the loader again"
            )
        return self.view(move.region, move.offset, move.shape, move.stride, move.dtype)


class MappedCopy:
    """PreparedCopy of pairs (destination, source) of equal shape and dtype.

    Elements are copied as integers of the same width, so every bit pattern arrives unchanged. Pairs go to torch in
    batches: one call from Python costs as much as copying some ten kilobytes, and torch spreads a large pair over its
    threads by itself.
    """

    def __init__(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._batches: list[tuple[list[torch.Tensor], list[torch.Tensor], int]] = []
        self.bytes = 0
        destinations: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        filled = 0
        for whole_destination, whole_source in pairs:
            for destination, source in _parts(_lanes(whole_destination), _lanes(whole_source)):
                destinations.append(destination)
                sources.append(source)
                filled += destination.numel() * destination.element_size()
                if filled >= BATCH_BYTES or len(destinations) >= BATCH_MOVES:
                    self._batches.append((destinations, sources, filled))
                    self.bytes += filled
                    destinations, sources, filled = [], [], 0
        if destinations:
            self._batches.append((destinations, sources, filled))
            self.bytes += filled

    @torch.inference_mode()
    def run(self, on_bytes: Callable[[int], None] | None = None) -> int:
        """Writes every destination; see PreparedCopy."""
        for destinations, sources, filled in self._batches:
            torch._foreach_copy_(destinations, sources)
            if on_bytes is not None:
                on_bytes(filled)
        return self.bytes


def _lanes(tensor: torch.Tensor) -> torch.Tensor:
    lane = _LANES.get(tensor.element_size())
    return tensor.detach() if lane is None else tensor.detach().view(lane)


def _parts(destination: torch.Tensor, source: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Cuts a large pair along its first axis, so that progress is seen and a deadline is kept inside it."""
    if destination.numel() == 0:
        return []
    size = destination.numel() * destination.element_size()
    if size <= 2 * BATCH_BYTES or destination.dim() == 0 or destination.shape[0] < 2:
        return [(destination, source)]
    count = min(destination.shape[0], -(-size // BATCH_BYTES))
    return list(zip(destination.chunk(count), source.chunk(count), strict=True))
