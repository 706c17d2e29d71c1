"""NCCL's C functions that a schedule needs, bound without a compiler, and a communicator that can be given up.

`ProcessGroupNCCL` is not used: it keeps a watchdog that ends the process when an operation hangs, and the process is
the user's. A communicator here is made non-blocking: every call returns at once and is polled, so that a deadline is
kept, and another thread may abort it while this one waits.

The layout of ncclConfig_t follows github.com/NVIDIA/nccl src/nccl.h.in: up to `splitShare` it is that of
`ncclConfig_v21700` in v2.18.1, later versions add fields behind it. `parseCommConfig` in src/init.cc copies as many
bytes as `size` says and takes defaults for what is newer than `version`, so one layout serves every NCCL from 2.18 on.
Any thread, with the device of the communicator current. Every method raises NcclError.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from ctypes import POINTER, byref, c_char, c_char_p, c_int, c_size_t, c_uint, c_void_p
from pathlib import Path
from typing import Any

from ckpt_engine.core.transports import Availability
from ckpt_engine.cuda.library import load_library

LIBRARY = "libnccl.so.2"

ID_BYTES = 128
"""NCCL_UNIQUE_ID_BYTES."""

OLDEST = 21800
"""NCCL_VERSION_CODE of 2.18.0."""

_PACKAGES = ("nvidia.nccl",)
_SUCCESS, _IN_PROGRESS = 0, 7  # ncclResult_t
_UINT8 = 1  # ncclDataType_t
_MAGIC = 0xCAFEBEEF
_UNDEFINED = -(1 << 31)  # NCCL_CONFIG_UNDEF_INT
_POLL_SECONDS = 50e-6
_SPIN_SECONDS = 1e-3  # queueing takes some 50 us, a sleep as long again: a bucket of 64 MiB travels for 190
_ABORT_LOCK_SECONDS = 2.0


class NcclError(RuntimeError):
    """A call of NCCL failed, or there is no NCCL (code -1). `code` is its ncclResult_t."""

    def __init__(self, call: str, code: int, text: str) -> None:
        super().__init__(f"{call}: {text}" if call else text)
        self.code = code


class _UniqueId(ctypes.Structure):
    _fields_ = [("internal", c_char * ID_BYTES)]


class _Config(ctypes.Structure):
    _fields_ = [
        ("size", c_size_t),
        ("magic", c_uint),
        ("version", c_uint),
        ("blocking", c_int),
        ("cga_cluster_size", c_int),
        ("min_ctas", c_int),
        ("max_ctas", c_int),
        ("net_name", c_char_p),
        ("split_share", c_int),
    ]


_SIGNATURES: dict[str, list[Any]] = {
    "ncclGetVersion": [POINTER(c_int)],
    "ncclGetUniqueId": [POINTER(_UniqueId)],
    "ncclCommInitRankConfig": [POINTER(c_void_p), c_int, _UniqueId, c_int, POINTER(_Config)],
    "ncclCommGetAsyncError": [c_void_p, POINTER(c_int)],
    "ncclCommAbort": [c_void_p],
    "ncclGroupStart": [],
    "ncclGroupEnd": [],
    "ncclSend": [c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p],
    "ncclRecv": [c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p],
}


class Nccl:
    """The library of this process. version: as NCCL_VERSION_CODE counts, 22705 for 2.27.5."""

    def __init__(self, path: str) -> None:
        """Raises NcclError if it cannot be loaded or is too old."""
        try:
            self._library = load_library(path, _SIGNATURES)
        except OSError as error:
            raise NcclError("", -1, str(error)) from error
        self._library.ncclGetErrorString.restype = c_char_p
        self._library.ncclGetErrorString.argtypes = [c_int]
        found = c_int()
        self.call("ncclGetVersion", byref(found))
        self.path, self.version = path, found.value
        if self.version < OLDEST:
            raise NcclError("", -1, f"NCCL {version_text(self.version)} is older than {version_text(OLDEST)}")

    def unique_id(self) -> bytes:
        """A new id, which all members of one communicator must get. The process that makes it answers the others."""
        unique = _UniqueId()
        self.call("ncclGetUniqueId", byref(unique))
        return bytes(memoryview(unique))

    def call(self, name: str, *arguments: Any) -> int:
        """Calls one function; returns its result if that is success or in progress."""
        code = int(getattr(self._library, name)(*arguments))
        if code not in (_SUCCESS, _IN_PROGRESS):
            raise NcclError(name, code, self.text(code))
        return code

    def text(self, code: int) -> str:
        """What a result means."""
        return str(self._library.ncclGetErrorString(code).decode())


def version_text(version: int) -> str:
    """A NCCL_VERSION_CODE as people write it: 2.27.5 for 22705."""
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


@functools.cache
def nccl() -> Nccl:
    """NCCL as torch has loaded it, or from NVIDIA's wheel. Raises NcclError, naming the paths that were tried."""
    tried = []
    for path in (LIBRARY, *_in_packages()):
        try:
            return Nccl(path)
        except NcclError as error:
            tried.append(f"{path}: {error}")
    raise NcclError("", -1, f"no NCCL was found ({'; '.join(tried)}); a CUDA build of torch brings it")


def nccl_availability() -> Availability:
    """Whether this process has NCCL. Never raises; loads the library."""
    try:
        found = nccl()
    except NcclError as error:
        return Availability(False, str(error))
    return Availability(True, f"NCCL {version_text(found.version)} ({found.path})")


def _in_packages() -> list[str]:
    found = []
    for name in _PACKAGES:
        try:
            spec = importlib.util.find_spec(name)
        except ModuleNotFoundError:
            continue
        for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
            found += [str(path) for path in Path(folder).glob(f"lib/{LIBRARY}")]
    return found


class Communicator:
    """A communicator of one member. rank: its number; id: of `unique_id`, the same for all.

    check: called while this polls, every fraction of a millisecond; an exception of it ends the wait. Made by all
    members at once, each with its device current. Raises NcclError, and what `check` raises.
    """

    def __init__(self, library: Nccl, id: bytes, rank: int, members: int, check: Callable[[], None]) -> None:
        self._library = library
        self._lock = threading.Lock()
        self._comm: c_void_p | None = c_void_p()
        config = _Config(
            size=ctypes.sizeof(_Config),
            magic=_MAGIC,
            version=min(library.version, OLDEST),
            blocking=0,
            cga_cluster_size=_UNDEFINED,
            min_ctas=_UNDEFINED,
            max_ctas=_UNDEFINED,
            net_name=None,
            split_share=_UNDEFINED,
        )
        unique = _UniqueId.from_buffer_copy(id)
        try:
            library.call("ncclCommInitRankConfig", byref(self._comm), members, unique, rank, byref(config))
            self.complete(check)
        except BaseException:
            self.abort()
            raise

    def exchange(
        self,
        sends: Sequence[tuple[int, int, int]],
        receives: Sequence[tuple[int, int, int]],
        stream: int,
    ) -> None:
        """Queues all of these at once on a stream: (peer, address, bytes). `complete` waits until they are queued."""
        with self._lock:
            comm = self._handle()
            self._library.call("ncclGroupStart")
            try:
                for call, transfers in (("ncclSend", sends), ("ncclRecv", receives)):
                    for peer, address, size in transfers:
                        self._library.call(call, address, size, _UINT8, peer, comm, stream)
            except BaseException:
                # A group that stays open would only queue all that this thread asks of NCCL later, torch's calls too.
                with suppress(NcclError):
                    self._library.call("ncclGroupEnd")
                raise
            self._library.call("ncclGroupEnd")

    def look(self) -> bool:
        """Whether all requests are queued. Raises NcclError for an error that came since."""
        with self._lock:
            code = c_int()
            self._library.call("ncclCommGetAsyncError", self._handle(), byref(code))
        if code.value not in (_SUCCESS, _IN_PROGRESS):
            raise NcclError("NCCL", code.value, self._library.text(code.value))
        return code.value == _SUCCESS

    def abort(self) -> None:
        """Gives the communicator up, which ends what is queued here. Any thread, also while another one waits. May be
        repeated. Never raises."""
        # A call that hangs inside NCCL keeps the lock, and only an abort ends it.
        held = self._lock.acquire(timeout=_ABORT_LOCK_SECONDS)
        try:
            comm, self._comm = self._comm, None
            if comm is not None and comm.value:
                self._library._library.ncclCommAbort(comm)
        finally:
            if held:
                self._lock.release()

    def _handle(self) -> c_void_p:
        if self._comm is None:
            raise NcclError("", -1, "the communicator was given up")
        return self._comm

    def complete(self, check: Callable[[], None]) -> None:
        """Waits until all requests are queued, or the communicator is made; not until transfers have ended."""
        spin_until = time.perf_counter() + _SPIN_SECONDS
        while not self.look():
            check()
            if time.perf_counter() > spin_until:
                time.sleep(_POLL_SECONDS)
