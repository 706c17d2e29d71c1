"""Checks what works on this host, by trying it. For `ckpt-engine doctor`; no check raises.

A check says `ok` only after it has done the thing itself: it opened another process's memory, bound the socket,
imported the library. What merely deserves attention (a low limit) is a note.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum

PROBE_SECONDS = 20.0
"""Most seconds of a check's child process: it only starts Python."""
OPEN_FILES_NEEDED = 4096
"""Every region, worker connection and log takes one; engines themselves take hundreds."""

SHARED_MEMORY_CHECK = "memory of another process"


class Result(StrEnum):
    OK = "ok"
    NO = "no"
    NOTE = "note"


@dataclass(frozen=True, slots=True)
class HostCheck:
    """One row of the report."""

    group: str
    name: str
    result: Result
    detail: str  # what was found; for `no`, why, and what to do


def all_checks() -> Iterable[HostCheck]:
    """Every check, in the order in which people should read them. Imports torch; takes a few seconds."""
    for check in (
        software,
        host_digests,
        shared_memory_between_processes,
        memory_facts,
        engine_directory,
        relays,
        networks,
        limits,
        graphics,
        transports,
        adapters,
    ):
        yield from _guard(check)


def _guard(check: Callable[[], Iterable[HostCheck]]) -> Iterable[HostCheck]:
    try:
        yield from check()
    except ModuleNotFoundError as error:
        reason = f"needs {error.name}: pip install 'ckpt-engine[trainer]', if anything but a manager shall run here"
        yield HostCheck("doctor", check.__name__, Result.NO, reason)
    except Exception as error:
        yield HostCheck(
            "doctor", check.__name__, Result.NO, f"the check itself failed: {type(error).__name__}: {error}"
        )


def software() -> Iterable[HostCheck]:
    """Checks Python and the required libraries, by importing them."""
    yield HostCheck("software", "python", Result.OK, f"{platform.python_version()} at {sys.executable}")
    for package, module in (
        ("torch", "torch"),
        ("grpcio", "grpc"),
        ("protobuf", "google.protobuf"),
        ("pyzmq", "zmq"),
        ("fastapi", "fastapi"),
        ("httpx", "httpx"),
    ):
        try:
            importlib.import_module(module)
            version = importlib.metadata.version(package)
        except Exception as error:  # a broken library may raise anything while it is imported
            yield HostCheck("software", package, Result.NO, f"{type(error).__name__}: {error}")
        else:
            yield HostCheck("software", package, Result.OK, version)
    try:
        importlib.import_module("ckpt_engine.v1.manager_pb2_grpc")
    except Exception as error:  # generated code refuses a protobuf or grpcio older than its generator
        yield HostCheck("software", "generated code", Result.NO, f"{type(error).__name__}: {error}")
    else:
        yield HostCheck("software", "generated code", Result.OK, "fits the installed protobuf and grpcio")


def host_digests() -> Iterable[HostCheck]:
    """Checks how weights in this host's memory are digested. Without Numba it works slowly, so that is a note only."""
    from ckpt_engine.digest.host import warm_up

    if why := warm_up():
        slow = f"{why}: digests of host memory come from numpy, at a tenth of the speed; pip install numba"
        yield HostCheck("software", "numba", Result.NOTE, slow)
    else:
        found = f"{importlib.metadata.version('numba')}; compiled the digests of host memory"
        yield HostCheck("software", "numba", Result.OK, found)


def _run_child(code: str, *arguments: str, descriptors: tuple[int, ...] = ()) -> tuple[bool, str]:
    """Runs Python code in a child; returns whether it succeeded, and the last line that it printed."""
    try:
        child = subprocess.run(
            [sys.executable, "-I", "-c", code, *arguments],
            capture_output=True,
            text=True,
            timeout=PROBE_SECONDS,
            pass_fds=descriptors,
            check=False,
        )
    except (OSError, subprocess.SubprocessError) as error:
        return False, str(error)
    lines = (child.stderr if child.returncode else child.stdout).strip().splitlines()
    return child.returncode == 0, lines[-1] if lines else f"the child exited with status {child.returncode}"


_READ_PARENTS_MEMORY = """
import mmap, os, sys
path, expected = sys.argv[1], bytes.fromhex(sys.argv[2])
descriptor = os.open(path, os.O_RDONLY)
with mmap.mmap(descriptor, 0, mmap.MAP_SHARED, mmap.PROT_READ) as memory:
    if memory[:len(expected)] != expected:
        sys.exit("read other bytes than were written")
print("a child process read it through", path)
"""


def shared_memory_between_processes() -> Iterable[HostCheck]:
    """Checks the shared memory path itself: another process opens a memory file of this one through /proc."""
    if not hasattr(os, "memfd_create"):
        yield HostCheck("shared memory", SHARED_MEMORY_CHECK, Result.NO, "this system has no memfd_create (Linux only)")
        return
    secret = os.urandom(32)
    try:
        descriptor = os.memfd_create("ckpt-engine-doctor", os.MFD_CLOEXEC)
    except OSError as error:
        yield HostCheck("shared memory", SHARED_MEMORY_CHECK, Result.NO, f"memfd_create: {error}")
        return
    try:
        os.ftruncate(descriptor, 1 << 20)
        os.pwrite(descriptor, secret, 0)
        # /proc/self means the child there, so it is named by pid: as one process opens another's in an update.
        path = f"/proc/{os.getpid()}/fd/{descriptor}"
        ok, detail = _run_child(_READ_PARENTS_MEMORY, path, secret.hex())
    finally:
        os.close(descriptor)
    yield HostCheck("shared memory", SHARED_MEMORY_CHECK, Result.OK if ok else Result.NO, detail)


def memory_facts() -> Iterable[HostCheck]:
    """Facts about memory and its sharing. They are notes: none fails the check."""
    with contextlib.suppress(OSError):
        yield HostCheck("shared memory", "pid namespace", Result.NOTE, os.readlink("/proc/self/ns/pid"))
    try:
        usage = shutil.disk_usage("/dev/shm")
    except OSError as error:
        yield HostCheck("shared memory", "/dev/shm", Result.NOTE, f"{error}; weights do not need it, some engines do")
    else:
        # Memory files (memfd) live on a mount of the kernel's own; the size of /dev/shm does not bound them.
        text = f"{usage.free / 2**30:.1f} of {usage.total / 2**30:.1f} GiB free; used by engines, not for weights"
        yield HostCheck("shared memory", "/dev/shm", Result.NOTE, text)
    with contextlib.suppress(OSError, StopIteration):
        with open("/proc/meminfo", encoding="ascii") as file:
            available = next(line for line in file if line.startswith("MemAvailable:"))
        gibibytes = int(available.split()[1]) / 2**20
        yield HostCheck(
            "shared memory", "available memory", Result.NOTE, f"{gibibytes:.1f} GiB; weights are kept in it"
        )


def engine_directory() -> Iterable[HostCheck]:
    """Makes a runtime directory with a worker channel in it, as an agent does."""
    import zmq

    from ckpt_engine.gate.directory import EngineDirectory

    directory = EngineDirectory.create()
    try:
        with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
            socket.bind(directory.endpoint)
        directory.lock()
        detail = f"below {directory.path.parent}: private directory, lock and worker channel work"
        yield HostCheck("agent", "engine directory", Result.OK, detail)
    finally:
        directory.remove()


def relays() -> Iterable[HostCheck]:
    """Checks whether a relay could run here. Relays are optional, so a `no` breaks nothing."""
    from ckpt_engine.doctor.relay_checks import relay_rows

    for name, ok, detail in relay_rows():
        yield HostCheck("relay", name, Result.NOTE if ok is None else Result.OK if ok else Result.NO, detail)


def networks() -> Iterable[HostCheck]:
    """Runs the checks of transports between relays, which are optional too."""
    from ckpt_engine.core.transports import make, transport_kinds

    rows = (row for kind in transport_kinds().values() if kind.checks is not None for row in make(kind.checks))
    for name, ok, detail in rows:
        yield HostCheck("relay", name, Result.NOTE if ok is None else Result.OK if ok else Result.NO, detail)


def limits() -> Iterable[HostCheck]:
    """Checks the ulimits that matter. A low one is a note: small models work with little."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    low = soft != resource.RLIM_INFINITY and soft < OPEN_FILES_NEEDED
    advice = f"; below {OPEN_FILES_NEEDED}: raise it (ulimit -n)" if low else ""
    yield HostCheck(
        "limits", "open files", Result.NOTE if low else Result.OK, f"{_limit(soft)} of {_limit(hard)}{advice}"
    )
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    text = _limit(soft if soft == resource.RLIM_INFINITY else soft // 1024, "KiB")
    yield HostCheck(
        "limits", "locked memory", Result.NOTE, f"{text}; network transports register (lock) what they read"
    )


def _limit(value: int, unit: str = "") -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else f"{value} {unit}".strip()


def graphics() -> Iterable[HostCheck]:
    """Checks GPUs: what they are, which others they reach, and whether their memory can be lent and digested."""
    from ckpt_engine.doctor.gpu_checks import gpu_rows

    for name, ok, detail in gpu_rows():
        result = Result.NOTE if ok is None else Result.OK if ok else Result.NO
        yield HostCheck("GPU", name, result, detail)


def transports() -> Iterable[HostCheck]:
    """Has every transport try itself."""
    from ckpt_engine.transport.registry import transport_rows

    for row in transport_rows():
        yield HostCheck("transports", row.name, Result.OK if row.ok else Result.NO, row.reason)


def adapters() -> Iterable[HostCheck]:
    """Checks for every engine that we can drive whether it is installed, in a version that we know."""
    from ckpt_engine.engine.adapter import load_adapter
    from ckpt_engine.engine.kinds import UnknownAdapterError, engine_names

    for kind in engine_names():
        try:
            found = load_adapter(kind).availability()
        except UnknownAdapterError as error:
            yield HostCheck("engines", kind, Result.NO, str(error))
        else:
            text = f"{found.version}; {found.reason}".strip("; ")
            yield HostCheck("engines", kind, Result.OK if found.ok else Result.NO, text)


def works(checks: Iterable[HostCheck]) -> bool:
    """Whether an update over shared memory can work here: that check and the software under it."""
    needed = {("software", "torch"), ("software", "grpcio"), ("software", "protobuf"), ("software", "pyzmq")}
    needed |= {("shared memory", SHARED_MEMORY_CHECK), ("agent", "engine directory")}
    found = {(check.group, check.name) for check in checks if check.result is Result.OK}
    return needed <= found


def as_json(checks: Iterable[HostCheck]) -> str:
    """One object: `ok`, and a list of rows with group, name, result and detail."""
    rows = list(checks)
    entries = [{"group": c.group, "name": c.name, "result": c.result.value, "detail": c.detail} for c in rows]
    return json.dumps({"ok": works(rows), "checks": entries}, indent=2)
