"""Registers host memory that this process has mapped with the driver: GPUs then reach it at their link's speed."""

from __future__ import annotations

import logging
import weakref

from ckpt_engine.cuda.driver import (
    HOST_REGISTER_PORTABLE,
    HOST_REGISTER_READ_ONLY,
    CudaDriverError,
    driver,
)

log = logging.getLogger(__name__)


class Pin:
    """Memory that is registered. `release` may be repeated."""

    def __init__(self, finalizer: weakref.finalize[..., object]) -> None:
        self._finalizer = finalizer

    def release(self) -> None:
        """Undoes the registration; no copy to or from the memory may be in flight. Never raises."""
        self._finalizer()


def pin(owner: object, memory: object, address: int, size: int, device: int, read_only: bool = False) -> Pin:
    """Registers whole pages for all GPUs of this process, until `owner` is gone. Takes some 0.1 s a GB.

    memory: the object that keeps them mapped; held until they are unregistered. device: one on which CUDA was started.
    Raises CudaDriverError.
    """
    found = driver()
    with found.on(device):
        found.register_host(address, size, HOST_REGISTER_PORTABLE | (HOST_REGISTER_READ_ONLY if read_only else 0))
    finalizer = weakref.finalize(owner, _unregister, address, memory)
    finalizer.atexit = False
    return Pin(finalizer)


def _unregister(address: int, _memory: object) -> None:
    try:
        driver().unregister_host(address)
    except CudaDriverError:
        log.exception("ckpt-engine: the GPU driver cannot let go of memory at %#x", address)
