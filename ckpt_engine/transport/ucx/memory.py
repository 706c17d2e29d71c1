"""Mappings that are inherited by forked processes and addressed by number. Imports nothing heavy."""

from __future__ import annotations

import ctypes
import mmap
import os

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.prctl.argtypes = (ctypes.c_int, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong)

_FAILED = ctypes.c_void_p(-1).value
_PR_SET_PDEATHSIG = 1
_POPULATE_READ, _POPULATE_WRITE = 22, 23


def map_shared(descriptor: int, size: int, writable: bool) -> int:
    """Maps a file's first `size` bytes, shared; returns the address. Raises OSError."""
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    address = _libc.mmap(None, size, protection, mmap.MAP_SHARED, descriptor, 0)
    if address is None or address == _FAILED:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    if hasattr(mmap, "MADV_HUGEPAGE"):
        _libc.madvise(address, size, mmap.MADV_HUGEPAGE)  # as the relay maps it; kernels without them say no
    return int(address)


def unmap(address: int, size: int) -> None:
    """Ends a mapping. Raises OSError."""
    if _libc.munmap(address, size):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def populate(address: int, size: int, writable: bool) -> None:
    """Takes the page faults of a mapping all at once. Kernels before 5.14 take them one by one later."""
    _libc.madvise(address, size, _POPULATE_WRITE if writable else _POPULATE_READ)


def die_with_parent(number: int) -> None:
    """Has this process get the signal when the thread that made it ends; goes on if the kernel refuses."""
    _libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
