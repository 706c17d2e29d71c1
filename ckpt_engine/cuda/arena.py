"""GPU memory that is not torch's: an arena in an allocation of its own, and tensors over any address.

Torch's allocator may hand out memory that cannot be shared (`expandable_segments`, memory pools); plain memory of the
driver can. Owner's side for the arena; any thread.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ckpt_engine.core.problems import invalid, unavailable
from ckpt_engine.cuda.driver import CudaDriverError, driver

ALIGNMENT = 256
"""Bytes; where tensors start in an arena, as torch's allocator has it."""


class CudaArena:
    """`size` bytes of one GPU."""

    def __init__(self, device: int, size: int) -> None:
        """Takes the memory. Raises UNAVAILABLE if that is more than half of what the GPU has left: an engine may need
        it."""
        self.device = device
        self.size = size
        try:
            with driver().on(device):
                free, _ = driver().memory_info()
                if size > free // 2:
                    raise unavailable(
                        f"a copy of {size} bytes would take more than half of the {free} bytes free on cuda:{device}"
                    )
                self.pointer = driver().allocate(size)
        except CudaDriverError as error:
            raise unavailable(f"cannot allocate {size} bytes on cuda:{device}: {error}") from error
        self._bytes: torch.Tensor | None = device_bytes(self.pointer, size, device)

    def tensor(self, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Contiguous memory of the arena from `offset` bytes (a multiple of ALIGNMENT); not to be used after `close`.

        Raises INVALID_ARGUMENT if it does not fit, or after `close`.
        """
        size = torch.Size(shape).numel() * dtype.itemsize
        if self._bytes is None or offset % ALIGNMENT or not 0 <= offset <= offset + size <= self.size:
            raise invalid(f"a tensor of {size} bytes cannot lie at {offset} in {self.size} bytes")
        return self._bytes[offset : offset + size].view(dtype).view(tuple(shape))

    def close(self) -> None:
        """Frees the memory, which stays taken while another process maps it. May be repeated."""
        if self._bytes is not None:
            self._bytes = None
            with driver().on(self.device):
                driver().free(self.pointer)


def device_bytes(pointer: int, size: int, device: int) -> torch.Tensor:
    """Memory of the driver as uint8[size] on `device`, not owned by the tensor.

    Torch's public functions ask the driver for a pointer's device; for another process's memory that may be a device
    that this process cannot see.
    """
    where = torch.device("cuda", device)
    storage = torch._C._construct_storage_from_data_pointer(pointer, where, size)
    return torch.empty(0, dtype=torch.uint8, device=where).set_(storage, 0, (size,), (1,))
