"""One relay a directory: the process that has the directory's lock, which ends with the process."""

from __future__ import annotations

import fcntl
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ckpt_engine.core.problems import CkptEngineError, precondition
from ckpt_engine.host.processes import peer
from ckpt_engine.host.relay_directory import DIRECTORY, socket_address


class TakenError(CkptEngineError):
    """Another relay has the directory. The message says which, and what to do."""


@contextmanager
def alone(folder: Path, patience: float = 0.0) -> Iterator[None]:
    """Holds the directory's lock; leaves nothing on the disk. Raises TakenError if another process keeps it.

    patience: seconds to wait for the lock; above 0 for a relay, since processes that only look for one take the lock
    for a moment.
    """
    until = time.monotonic() + patience
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        while not _try_lock(descriptor):
            if time.monotonic() < until:
                time.sleep(0.05)
                continue
            error = precondition(
                f"{folder} has a relay already{_listening_process(folder)}: replicas of this host use that one. For a "
                f"second one name another directory with --directory, and give its replicas the same with {DIRECTORY}"
            )
            raise TakenError(error.problem)
        yield
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _listening_process(folder: Path) -> str:
    """Names the relay's process in the directory, if one answers."""
    for path in sorted(folder.glob("relay-*.sock")):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC) as probe, suppress(OSError):
            probe.setblocking(False)
            with socket_address(path.name) as address:
                probe.connect(address)
            return f" (process {peer(probe)[0]})"
    return ""
