"""The CUDA driver's C functions that torch does not offer: allocations, handles to share them, plain copies.

It binds and decides nothing. Importing it touches no GPU: the library is initialised by the first `driver()`, which
only code that already holds GPU memory calls. It needs no torch, so that a small probing process can use it.

Devices are ordinals of this process, as torch counts them (both follow CUDA_VISIBLE_DEVICES). Pointers are integers.
Methods that say "current" work in the context that `Driver.on` has pushed on this thread: the device's primary one,
which torch uses too. Any thread. Every method raises CudaDriverError.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_ulonglong, c_void_p
from typing import Any, NamedTuple

from ckpt_engine.cuda.library import load_library

LIBRARY = "libcuda.so.1"

IPC_HANDLE_BYTES = 64

POSIX_DESCRIPTOR = 1
"""CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR: the kind of shareable handle that is a file descriptor."""

HOST_REGISTER_PORTABLE, HOST_REGISTER_READ_ONLY = 1, 8
"""CU_MEMHOSTREGISTER_PORTABLE, _READ_ONLY."""

NOT_FOUND, OUT_OF_MEMORY = 500, 2
"""CUresult codes that callers distinguish."""

_BUFFER_ID, _DEVICE_ORDINAL, _LEGACY_CAPABLE, _ALLOWED_HANDLES = 7, 9, 10, 14
_ON_DEVICE, _READ_WRITE = 1, 3
_RELAXED_CAPTURE = 2
_LAZY_PEER_ACCESS = 1


class CudaDriverError(RuntimeError):
    """A driver call failed, or there is no driver (code -1). `code` is its CUresult."""

    def __init__(self, call: str, code: int, text: str) -> None:
        super().__init__(f"{call}: {text}" if call else text)
        self.call = call
        self.code = code


class Allocation(NamedTuple):
    """One allocation of the driver: its first address and its bytes."""

    pointer: int
    size: int


class _Location(ctypes.Structure):
    _fields_ = [("type", c_int), ("id", c_int)]


class _AccessDescription(ctypes.Structure):
    _fields_ = [("location", _Location), ("flags", c_int)]


class _IpcHandle(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_ubyte * IPC_HANDLE_BYTES)]


class _Uuid(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_ubyte * 16)]


_SIGNATURES: dict[str, list[Any]] = {
    "cuInit": [c_uint],
    "cuGetErrorString": [c_int, POINTER(c_char_p)],
    "cuDeviceGetCount": [POINTER(c_int)],
    "cuDeviceGet": [POINTER(c_int), c_int],
    "cuDeviceGetUuid_v2": [POINTER(_Uuid), c_int],
    "cuDeviceCanAccessPeer": [POINTER(c_int), c_int, c_int],
    "cuDevicePrimaryCtxRetain": [POINTER(c_void_p), c_int],
    "cuCtxPushCurrent_v2": [c_void_p],
    "cuCtxPopCurrent_v2": [POINTER(c_void_p)],
    "cuCtxSynchronize": [],
    "cuThreadExchangeStreamCaptureMode": [POINTER(c_int)],
    "cuMemGetInfo_v2": [POINTER(c_size_t), POINTER(c_size_t)],
    "cuMemAlloc_v2": [POINTER(c_uint64), c_size_t],
    "cuMemFree_v2": [c_uint64],
    "cuMemGetAddressRange_v2": [POINTER(c_uint64), POINTER(c_size_t), c_uint64],
    "cuPointerGetAttribute": [c_void_p, c_int, c_uint64],
    "cuIpcGetMemHandle": [POINTER(_IpcHandle), c_uint64],
    "cuIpcOpenMemHandle_v2": [POINTER(c_uint64), _IpcHandle, c_uint],
    "cuIpcCloseMemHandle": [c_uint64],
    "cuMemRetainAllocationHandle": [POINTER(c_ulonglong), c_void_p],
    "cuMemExportToShareableHandle": [c_void_p, c_ulonglong, c_int, c_ulonglong],
    "cuMemImportFromShareableHandle": [POINTER(c_ulonglong), c_void_p, c_int],
    "cuMemRelease": [c_ulonglong],
    "cuMemAddressReserve": [POINTER(c_uint64), c_size_t, c_size_t, c_uint64, c_ulonglong],
    "cuMemAddressFree": [c_uint64, c_size_t],
    "cuMemMap": [c_uint64, c_size_t, c_size_t, c_ulonglong, c_ulonglong],
    "cuMemUnmap": [c_uint64, c_size_t],
    "cuMemSetAccess": [c_uint64, c_size_t, POINTER(_AccessDescription), c_size_t],
    "cuMemcpyAsync": [c_uint64, c_uint64, c_size_t, c_void_p],
    "cuMemcpy": [c_uint64, c_uint64, c_size_t],
    "cuMemHostRegister_v2": [c_void_p, c_size_t, c_uint],
    "cuMemHostUnregister": [c_void_p],
}


def library_problem() -> str:
    """Why the driver's library cannot be loaded; empty if it can. Initialises nothing: safe in any process."""
    try:
        _library()
    except CudaDriverError as error:
        return str(error)
    return ""


def driver() -> Driver:
    """The driver, initialised. For code that works with GPU memory; a forked child may not use its parent's.

    Raises CudaDriverError if the library is missing or there is no GPU that it can use.
    """
    return _initialised(os.getpid())


@functools.cache
def _initialised(_process: int) -> Driver:
    found = Driver(_library())
    found.call("cuInit", 0)
    return found


@functools.cache
def _library() -> ctypes.CDLL:
    try:
        return load_library(LIBRARY, _SIGNATURES)
    except OSError as error:
        raise CudaDriverError("", -1, f"no NVIDIA driver can be used: {error}") from error


class Driver:
    """The driver's functions; get it from `driver()`."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self._contexts: dict[int, c_void_p] = {}
        self._lock = threading.Lock()

    def call(self, name: str, *arguments: object) -> None:
        """Calls a function of the library. Raises CudaDriverError with the driver's own words."""
        code = getattr(self._library, name)(*arguments)
        if code:
            text = c_char_p()
            known = self._library.cuGetErrorString(code, byref(text)) == 0 and text.value
            words = text.value.decode("ascii", "replace") if known and text.value else "unknown error"
            raise CudaDriverError(name, code, f"{words} (CUresult {code})")

    # ------------------------------------------------------------------------------------------ devices

    def device_count(self) -> int:
        """GPUs that this process may see."""
        found = c_int()
        self.call("cuDeviceGetCount", byref(found))
        return found.value

    def uuid(self, device: int) -> bytes:
        """16 bytes that identify the GPU in every process of the host."""
        found = _Uuid()
        self.call("cuDeviceGetUuid_v2", byref(found), self._device(device))
        return bytes(found.bytes)

    def device_of_uuid(self, uuid: bytes) -> int | None:
        """The ordinal of this GPU in this process; None if the process does not see it."""
        return next((device for device in range(self.device_count()) if self.uuid(device) == uuid), None)

    def can_access_peer(self, device: int, peer: int) -> bool:
        """Whether `device` can read and write the memory of `peer`."""
        found = c_int()
        self.call("cuDeviceCanAccessPeer", byref(found), self._device(device), self._device(peer))
        return bool(found.value)

    @contextmanager
    def on(self, device: int) -> Iterator[None]:
        """Makes the device's primary context the thread's current one within the block."""
        with self._lock:
            context = self._contexts.get(device)
            if context is None:
                context = c_void_p()
                # Never released: torch keeps it as long as the process lives, too.
                self.call("cuDevicePrimaryCtxRetain", byref(context), self._device(device))
                self._contexts[device] = context
        self.call("cuCtxPushCurrent_v2", context)
        try:
            yield
        finally:
            self.call("cuCtxPopCurrent_v2", byref(c_void_p()))

    def synchronize(self) -> None:
        """Waits until the current device has finished all its work."""
        self.call("cuCtxSynchronize")

    @contextmanager
    def beside_captures(self) -> Iterator[None]:
        """Keeps calls of this thread within the block from disturbing, or being refused by, another thread's graph
        capture."""
        mode = c_int(_RELAXED_CAPTURE)
        self.call("cuThreadExchangeStreamCaptureMode", byref(mode))
        try:
            yield
        finally:
            self.call("cuThreadExchangeStreamCaptureMode", byref(mode))

    # ------------------------------------------------------------------------------------------- memory

    def memory_info(self) -> tuple[int, int]:
        """(free, in all) bytes of the current device."""
        free, total = c_size_t(), c_size_t()
        self.call("cuMemGetInfo_v2", byref(free), byref(total))
        return free.value, total.value

    def allocate(self, size: int) -> int:
        """Memory of the current device in an allocation of its own, which can be shared by a legacy handle."""
        pointer = c_uint64()
        self.call("cuMemAlloc_v2", byref(pointer), size)
        return pointer.value

    def free(self, pointer: int) -> None:
        """Frees memory of `allocate`."""
        self.call("cuMemFree_v2", pointer)

    def allocation(self, pointer: int) -> Allocation:
        """The allocation in which `pointer` lies; the piece, if memory was mapped in pieces."""
        base, size = c_uint64(), c_size_t()
        self.call("cuMemGetAddressRange_v2", byref(base), byref(size), pointer)
        return Allocation(base.value, size.value)

    def generation(self, pointer: int) -> int:
        """A number that no other allocation of this process has or had; 0 if the driver has none."""
        found = c_ulonglong()
        return found.value if self._attribute(found, _BUFFER_ID, pointer) else 0

    def device_of(self, pointer: int) -> int:
        """The ordinal of the device on which a pointer's memory lies."""
        found = c_int()
        self.call("cuPointerGetAttribute", byref(found), _DEVICE_ORDINAL, pointer)
        return found.value

    def legacy_capable(self, pointer: int) -> bool:
        """Whether the driver would give a legacy handle (`ipc_handle`) of the memory; it may still fail to open."""
        found = c_int()
        return self._attribute(found, _LEGACY_CAPABLE, pointer) and bool(found.value)

    def descriptor_capable(self, pointer: int) -> bool:
        """Whether the driver would give a file descriptor (`export_descriptor`) of the memory."""
        found = c_ulonglong()
        return self._attribute(found, _ALLOWED_HANDLES, pointer) and bool(found.value & POSIX_DESCRIPTOR)

    # ---------------------------------------------------------------------------------- sharing memory

    def ipc_handle(self, pointer: int) -> bytes:
        """The legacy handle of the allocation at `pointer`."""
        handle = _IpcHandle()
        self.call("cuIpcGetMemHandle", byref(handle), pointer)
        return bytes(handle.bytes)

    def open_ipc_handle(self, handle: bytes) -> int:
        """Maps another process's allocation for the current device, wherever its memory is. Once a process."""
        if len(handle) != IPC_HANDLE_BYTES:
            raise CudaDriverError("", -1, f"a legacy handle has {IPC_HANDLE_BYTES} bytes, not {len(handle)}")
        pointer = c_uint64()
        self.call(
            "cuIpcOpenMemHandle_v2", byref(pointer), _IpcHandle.from_buffer_copy(handle), c_uint(_LAZY_PEER_ACCESS)
        )
        return pointer.value

    def close_ipc_handle(self, pointer: int) -> None:
        """Unmaps what `open_ipc_handle` mapped for the current device."""
        self.call("cuIpcCloseMemHandle", pointer)

    def export_descriptor(self, pointer: int) -> int:
        """A file descriptor of the piece of memory mapped at `pointer`. The caller closes it."""
        handle, descriptor = c_ulonglong(), c_int(-1)
        self.call("cuMemRetainAllocationHandle", byref(handle), pointer)
        try:
            self.call("cuMemExportToShareableHandle", byref(descriptor), handle, POSIX_DESCRIPTOR, 0)
        finally:
            self.call("cuMemRelease", handle)
        os.set_inheritable(descriptor.value, False)
        return descriptor.value

    def import_descriptor(self, descriptor: int) -> int:
        """A handle of the memory behind another process's descriptor; end it with `release_handle`."""
        handle = c_ulonglong()
        self.call("cuMemImportFromShareableHandle", byref(handle), c_void_p(descriptor), POSIX_DESCRIPTOR)
        return handle.value

    def release_handle(self, handle: int) -> None:
        """Releases a handle; mapped memory stays until it is unmapped."""
        self.call("cuMemRelease", handle)

    def reserve(self, size: int) -> int:
        """Reserves addresses without memory; returns the first."""
        pointer = c_uint64()
        self.call("cuMemAddressReserve", byref(pointer), size, 0, 0, 0)
        return pointer.value

    def unreserve(self, pointer: int, size: int) -> None:
        """Releases reserved addresses; nothing may be mapped there."""
        self.call("cuMemAddressFree", pointer, size)

    def map(self, pointer: int, size: int, handle: int) -> None:
        """Maps the whole memory of a handle at reserved addresses. Call `allow` before use."""
        self.call("cuMemMap", pointer, size, 0, handle, 0)

    def unmap(self, pointer: int, size: int) -> None:
        """Undoes `map`. Nothing may use the memory any more."""
        self.call("cuMemUnmap", pointer, size)

    def allow(self, pointer: int, size: int, device: int) -> None:
        """Lets `device` read and write mapped memory."""
        access = _AccessDescription(_Location(_ON_DEVICE, self._device(device)), _READ_WRITE)
        self.call("cuMemSetAccess", pointer, size, byref(access), 1)

    # ------------------------------------------------------------------------------------------- copies

    def copy(self, destination: int, source: int, size: int) -> None:
        """Copies bytes between any memory that the driver knows, and waits."""
        self.call("cuMemcpy", destination, source, size)

    def copy_async(self, destination: int, source: int, size: int, stream: int) -> None:
        """Queues a copy on a stream (`torch.cuda.Stream.cuda_stream`) of the current device."""
        self.call("cuMemcpyAsync", destination, source, size, stream)

    def register_host(self, pointer: int, size: int, flags: int = HOST_REGISTER_PORTABLE) -> None:
        """Pins host memory, so that copies run at the speed of the link. Whole pages."""
        self.call("cuMemHostRegister_v2", pointer, size, flags)

    def unregister_host(self, pointer: int) -> None:
        """Undoes `register_host`."""
        self.call("cuMemHostUnregister", pointer)

    def _device(self, ordinal: int) -> int:
        found = c_int()
        self.call("cuDeviceGet", byref(found), ordinal)
        return found.value

    def _attribute(self, found: Any, attribute: int, pointer: int) -> bool:
        """Fills `found`; returns False if the driver does not have the attribute for this memory."""
        try:
            self.call("cuPointerGetAttribute", byref(found), attribute, pointer)
        except CudaDriverError:
            return False
        return True
