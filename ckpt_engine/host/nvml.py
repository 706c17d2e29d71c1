"""The GPUs of this host as NVIDIA's management library has them: their links, also of GPUs that CUDA hides here.

It does not start CUDA and holds no GPU memory, so any process may ask. A missing library raises NvmlError.
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import POINTER, byref, c_char, c_char_p, c_int, c_uint, c_ulonglong, c_void_p
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from ckpt_engine.cuda.library import load_library
from ckpt_engine.v1.weights_pb2 import GpuReach

LIBRARY = "libnvidia-ml.so.1"

_READ, _NVLINK = 0, 2  # nvmlGpuP2PCapsIndex_t
_OK = 0  # nvmlGpuP2PStatus_t


class _Pci(ctypes.Structure):
    _fields_ = [
        ("legacy_id", c_char * 16),
        ("domain", c_uint),
        ("bus", c_uint),
        ("device", c_uint),
        ("vendor_and_device", c_uint),
        ("subsystem", c_uint),
        ("id", c_char * 32),
    ]


_SIGNATURES: dict[str, list[Any]] = {
    "nvmlInit_v2": [],
    "nvmlErrorString": [c_int],
    "nvmlDeviceGetCount_v2": [POINTER(c_uint)],
    "nvmlDeviceGetHandleByIndex_v2": [c_uint, POINTER(c_void_p)],
    "nvmlDeviceGetUUID": [c_void_p, POINTER(c_char), c_uint],
    "nvmlDeviceGetName": [c_void_p, POINTER(c_char), c_uint],
    "nvmlDeviceGetPciInfo_v3": [c_void_p, POINTER(_Pci)],
    "nvmlDeviceGetMemoryInfo": [c_void_p, POINTER(c_ulonglong)],
    "nvmlDeviceGetP2PStatus": [c_void_p, c_void_p, c_int, POINTER(c_int)],
}


class NvmlError(RuntimeError):
    """The library is missing, or a call of it failed; with the library's message."""


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU."""

    uuid: bytes  # 16 bytes
    name: str
    pci: str  # its address on the PCI bus
    memory: int  # bytes


@functools.cache
def devices() -> tuple[Device, ...]:
    """Every GPU that the library shows to this process. Raises NvmlError."""
    library = _library()
    found = c_uint()
    _call(library, "nvmlDeviceGetCount_v2", byref(found))
    return tuple(_device(library, _handle(library, index)) for index in range(found.value))


@functools.cache
def link(uuid: bytes, other: bytes) -> GpuReach.Link:
    """How one GPU reaches the memory of another one. Raises NvmlError, also for a GPU that the library hides."""
    library = _library()
    indices = {device.uuid: index for index, device in enumerate(devices())}
    if uuid not in indices or other not in indices:
        raise NvmlError(f"{LIBRARY} does not show GPU {UUID(bytes=other if uuid in indices else uuid)}")
    one, two = _handle(library, indices[uuid]), _handle(library, indices[other])
    if not _can(library, one, two, _READ):
        return GpuReach.LINK_NONE
    return GpuReach.LINK_NVLINK if _can(library, one, two, _NVLINK) else GpuReach.LINK_PCIE


def used_bytes(uuid: bytes) -> int:
    """Bytes of a GPU's memory that any process has taken. Raises NvmlError, also for a GPU that the library hides."""
    library = _library()
    for index, device in enumerate(devices()):
        if device.uuid == uuid:
            memory = (c_ulonglong * 3)()  # total, free, used
            _call(library, "nvmlDeviceGetMemoryInfo", _handle(library, index), memory)
            return int(memory[2])
    raise NvmlError(f"{LIBRARY} does not show GPU {UUID(bytes=uuid)}")


def _can(library: ctypes.CDLL, one: c_void_p, two: c_void_p, what: int) -> bool:
    status = c_int(-1)
    _call(library, "nvmlDeviceGetP2PStatus", one, two, what, byref(status))
    return status.value == _OK


def _handle(library: ctypes.CDLL, index: int) -> c_void_p:
    handle = c_void_p()
    _call(library, "nvmlDeviceGetHandleByIndex_v2", index, byref(handle))
    return handle


def _device(library: ctypes.CDLL, handle: c_void_p) -> Device:
    uuid, name, pci = ctypes.create_string_buffer(96), ctypes.create_string_buffer(96), _Pci()
    memory = (c_ulonglong * 3)()
    _call(library, "nvmlDeviceGetUUID", handle, uuid, len(uuid))
    _call(library, "nvmlDeviceGetName", handle, name, len(name))
    _call(library, "nvmlDeviceGetPciInfo_v3", handle, byref(pci))
    _call(library, "nvmlDeviceGetMemoryInfo", handle, memory)
    text = uuid.value.decode("ascii", "replace").removeprefix("GPU-")
    try:
        raw = UUID(text).bytes
    except ValueError as error:
        raise NvmlError(f"{LIBRARY} names a GPU {text!r}, which is not a UUID") from error
    return Device(raw, name.value.decode("utf-8", "replace"), pci.id.decode("ascii", "replace"), memory[0])


def _call(library: ctypes.CDLL, name: str, *arguments: object) -> None:
    code = getattr(library, name)(*arguments)
    if code:
        text = library.nvmlErrorString(code)
        raise NvmlError(f"{name}: {text.decode('ascii', 'replace') if text else code}")


@functools.cache
def _library() -> ctypes.CDLL:
    try:
        found = load_library(LIBRARY, _SIGNATURES)
    except OSError as error:
        raise NvmlError(f"the management library of the NVIDIA driver cannot be used: {error}") from error
    found.nvmlErrorString.restype = c_char_p
    _call(found, "nvmlInit_v2")
    return found
