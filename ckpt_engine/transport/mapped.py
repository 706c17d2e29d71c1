"""Reading from mapped memory: what shared memory and files have in common.

Runs in the reader. A `Mapping` is one region, mapped read-only. It is unmapped when the last tensor over it is gone,
never earlier, so no view can outlive its memory. The first copy that touches a page enters it into the page table. To
do that ahead would take as long, and a worker that needs a slice of each tensor would pay for all pages.
"""

from __future__ import annotations

import mmap
import warnings
from collections.abc import Callable, Sequence

import torch

from ckpt_engine.copy.copying import TensorCopy
from ckpt_engine.core.dtypes import itemsize
from ckpt_engine.core.problems import invalid
from ckpt_engine.core.strides import span
from ckpt_engine.cuda.driver import CudaDriverError, driver
from ckpt_engine.cuda.pinning import pin
from ckpt_engine.torch_dtypes import torch_dtype
from ckpt_engine.transport.base import Move
from ckpt_engine.v1.weights_pb2 import Region


class Mapping:
    """`size` bytes of an open file from `offset`, mapped read-only and shared. The descriptor may be closed then."""

    def __init__(self, descriptor: int, size: int, offset: int = 0) -> None:
        skipped = offset % mmap.ALLOCATIONGRANULARITY
        # Nothing can be mapped of an empty region, and nothing needs to be.
        self._memory = (
            mmap.mmap(descriptor, skipped + size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ, offset=offset - skipped)
            if size
            else b""
        )
        self._skipped = skipped
        self._pinned: str | None = None
        self._bases: dict[torch.dtype, torch.Tensor] = {}
        self.size = size

    def pin(self) -> str:
        """Registers the memory with the GPU driver until this object is gone, so that GPUs read it at the speed of the
        link. Takes some 0.1 s a GB, the first time. Returns why it cannot be done; empty if it is. Never raises."""
        if self._pinned is None:
            self._pinned = self._register() if self.size else ""
        return self._pinned

    def view(self, offset: int, shape: Sequence[int], stride: Sequence[int], dtype: str) -> torch.Tensor:
        """The elements at `offset` bytes as a tensor without a copy. Raises INVALID_ARGUMENT if they do not fit."""
        width = itemsize(dtype)
        length = span_of(self.size, offset, shape, stride, width)
        if not length:
            return torch.empty(tuple(shape), dtype=torch_dtype(dtype))
        start = self._skipped + offset
        if start % width:
            return self._tensor(torch_dtype(dtype), length, start).as_strided(tuple(shape), tuple(stride))
        base = self._bases.get(torch_dtype(dtype))
        if base is None:
            base = self._tensor(torch_dtype(dtype), len(self._memory) // width, 0)
            self._bases[torch_dtype(dtype)] = base
        return base.as_strided(tuple(shape), tuple(stride), start // width)

    def _register(self) -> str:
        address = self._tensor(torch.uint8, 1, 0).data_ptr()
        size = -(-len(self._memory) // mmap.PAGESIZE) * mmap.PAGESIZE
        try:
            driver()  # where there is none, torch would fail in words of its own
            pin(self, self._memory, address, size, torch.cuda.current_device(), read_only=True)
        except CudaDriverError as error:
            return str(error)
        return ""

    def _tensor(self, dtype: torch.dtype, count: int, start: int) -> torch.Tensor:
        with warnings.catch_warnings():
            # Torch says once that it cannot mark memory as read-only. Nothing here writes to it.
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            return torch.frombuffer(self._memory, dtype=dtype, count=count, offset=start)


class MappedRegions:
    """OpenedRegions over mappings, by locator. recheck, offered: carry out `check` and `offered`.

    pins: whether memory that goes to a GPU is registered with its driver.
    """

    def __init__(
        self,
        mappings: dict[bytes, Mapping],
        recheck: Callable[[], None],
        offered: Callable[[], bool],
        pins: bool = False,
    ) -> None:
        self._mappings = mappings
        self._recheck = recheck
        self._offered = offered
        self._pins = pins

    def prepare(self, moves: Sequence[Move]) -> TensorCopy:
        """Checks every move and builds its views. Raises INVALID_ARGUMENT."""
        pairs = [(move.destination, self._source(move)) for move in moves]
        used = {move.region.locator: move.region for move in moves if move.destination.device.type == "cuda"}
        notes = [
            f"region {region.id} goes through staging buffers, it cannot be pinned: {problem}"
            for region in (used.values() if self._pins else ())
            if (problem := self._mappings[region.locator].pin())
        ]
        return TensorCopy(pairs, keep=tuple(self._mappings.values()), notes=notes)

    def check(self) -> None:
        """Raises unless the regions are still those that were published."""
        self._recheck()

    def offered(self) -> bool:
        """Whether new readers could still open all of them."""
        return self._offered()

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
        check_destination(move)
        return self.view(move.region, move.offset, move.shape, move.stride, move.stored or move.dtype)


def span_of(size: int, offset: int, shape: Sequence[int], stride: Sequence[int], width: int) -> int:
    """Elements of `width` bytes from the first to the last one of a view, 0 if it has none.

    Raises INVALID_ARGUMENT unless it lies in a region of `size` bytes.
    """
    if len(shape) != len(stride) or offset < 0 or min((*shape, *stride), default=0) < 0:
        raise invalid(
            f"a view needs as many strides as dimensions and no negative number; got offset {offset}, "
            f"shape {list(shape)}, stride {list(stride)}"
        )
    length = span(shape, stride)
    if length and offset + length * width > size:
        raise invalid(
            f"a view of {length} x {width} bytes at {offset} reaches beyond the region of {size} bytes; "
            "the plan was made for another region"
        )
    return length


def check_destination(move: Move) -> None:
    """Raises INVALID_ARGUMENT unless a move's destination has its shape and dtype."""
    destination = move.destination
    if tuple(destination.shape) != tuple(move.shape) or destination.dtype != torch_dtype(move.dtype):
        raise invalid(
            f"a piece of shape {list(move.shape)} and {move.dtype} does not fit a destination of shape "
            f"{list(destination.shape)} and {destination.dtype}; record the loader again"
        )
