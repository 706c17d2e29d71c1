"""Where relays of this host have their sockets, and what names that directory."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

DIRECTORY = "CKPT_ENGINE_RELAY_DIRECTORY"
"""Environment variable of relays and workers: the directory of the sockets, as this process sees it."""


def relay_directory() -> Path:
    """Where relays of this host have their sockets, as this process sees it."""
    told = os.environ.get(DIRECTORY)
    if told:
        return Path(told)
    user = os.geteuid()
    return Path("/run/ckpt-engine") if user == 0 else Path(f"/tmp/ckpt-engine-{user}")


def directory_identity() -> str:
    """What names that directory on this host, whatever its path is; empty if there is none."""
    try:
        status = os.stat(relay_directory())
    except OSError:
        return ""
    return f"{status.st_dev}:{status.st_ino}" if stat.S_ISDIR(status.st_mode) else ""


@contextlib.contextmanager
def socket_address(name: str) -> Iterator[str]:
    """An address for a socket of that directory: short enough for the kernel, however long the path is."""
    folder = os.open(relay_directory(), os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{name}"
    finally:
        os.close(folder)
