"""What workers of this host may read over, as an agent tells the manager, without what a worker would load for it.

An agent stands beside every engine, so nothing here imports torch or starts CUDA. How a transport works is decided in
its own module; here only whether a host has what it needs.
"""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Sequence
from typing import Any

from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.core.transports import Availability, Maker, TransportKind, made, transport_kinds, worker_kinds
from ckpt_engine.cuda.driver import library_problem
from ckpt_engine.host.relay_directory import directory_identity, made_directory, relay_directory

log = logging.getLogger(__name__)

MARK = b"ckpt-engine"


def worker_transports(only: Sequence[str] = ()) -> tuple[str, ...]:
    """What workers of an engine on this host may use.

    only: the names that a user allows; none: all that work. Raises ValueError for a name that is unknown or does not
    work here.
    """
    found = {name: _on_host(kind) for name, kind in worker_kinds().items()}
    for name in only:
        if name not in found and name in transport_kinds():
            raise ValueError(
                f"transport {name} is between relays; workers of a host read its relay over relay_memory: start one "
                "(ckpt-engine relay)"
            )
        if name not in found:
            raise ValueError(f"there is no transport {name!r}; there are {', '.join(found)}")
        if not found[name].ok:
            raise ValueError(f"transport {name} does not work on this host: {found[name].reason}")
    return tuple(name for name, each in found.items() if each.ok and (not only or name in only))


def loaded(kind: TransportKind, maker: Maker) -> Any:
    """What it makes, or an Availability that says why not, which is in the log: no transport of others may stop a
    worker or an agent."""
    try:
        return made(maker)
    except Exception as error:
        log.exception("ckpt-engine: transport %s cannot be loaded", kind.name)
        return Availability(False, f"it cannot be loaded: {type(error).__name__}: {error}")


def shared_memory() -> Availability:
    """Makes one page of an anonymous file and reads it back through /proc."""
    try:
        descriptor = os.memfd_create("ckpt-engine-probe", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, mmap.PAGESIZE)
            os.pwrite(descriptor, MARK, 0)
            reader = os.open(f"/proc/{os.getpid()}/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
            try:
                with mmap.mmap(reader, mmap.PAGESIZE, prot=mmap.PROT_READ) as page:
                    same = page[: len(MARK)] == MARK
            finally:
                os.close(reader)
        finally:
            os.close(descriptor)
    except OSError as error:
        return Availability(False, f"memory files cannot be shared here: {error}")
    if not same:
        return Availability(False, "a page of shared memory read back through /proc differs")
    return Availability(True, "memory files of this user's processes open through /proc")


def file() -> Availability:
    """Always: a file that this process may not read is refused when it is opened."""
    return Availability(True, "files that this process may read")


def relay_memory() -> Availability:
    """Whether there is a directory in which relays could be; made if it is missing, so that a relay that starts after
    its readers is within their reach."""
    if not directory_identity():
        try:
            made_directory(shared=False)
        except CkptEngineError as error:
            return Availability(False, error.problem.message)
    return Availability(True, f"relays lend their memory in {relay_directory()}")


def cuda_ipc() -> Availability:
    """Whether there is a driver. Whether a worker uses a GPU, it tells itself; this process's torch says nothing."""
    problem = library_problem()
    return Availability(not problem, problem or "an NVIDIA driver is installed")


def nccl() -> Availability:
    """Always: a worker without Gloo, or with an NCCL that is too old, says so when it is made ready for one."""
    driver = library_problem()
    gpus = f"not between GPUs: {driver}" if driver else "between GPUs over NCCL"
    return Availability(True, f"between CPUs over Gloo; {gpus}")


def _on_host(kind: TransportKind) -> Availability:
    if kind.on_host is None:
        reader = loaded(kind, kind.reader)
        return reader if isinstance(reader, Availability) else reader.availability()
    found: Availability = loaded(kind, kind.on_host)
    return found
