"""The directory in which relays of this host have their sockets, and its identity."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from ckpt_engine.core.problems import precondition, unavailable

DIRECTORY = "CKPT_ENGINE_RELAY_DIRECTORY"
"""Environment variable of relays and workers: the directory of the sockets, as this process sees it."""


def relay_directory() -> Path:
    """Where relays of this host have their sockets, as this process sees it."""
    path = os.environ.get(DIRECTORY)
    if path:
        return Path(path)
    user = os.geteuid()
    return Path("/run/ckpt-engine") if user == 0 else Path(f"/tmp/ckpt-engine-{user}")


def directory_identity() -> str:
    """Identifies that directory on this host under any path; empty if there is none."""
    try:
        status = os.stat(relay_directory())
    except OSError:
        return ""
    return f"{status.st_dev}:{status.st_ino}" if stat.S_ISDIR(status.st_mode) else ""


def made_directory(shared: bool) -> Path:
    """Makes the relays' directory if it is missing; returns it. shared: other users are to reach the sockets in it.

    Raises UNAVAILABLE if there can be none, FAILED_PRECONDITION if others could put their sockets in a relay's place.
    """
    folder = relay_directory()
    try:
        folder.mkdir(mode=0o755 if shared else 0o700, parents=True, exist_ok=True)
        status = os.stat(folder)
    except OSError as error:
        why = "it is not a directory" if folder.is_file() else error.strerror
        raise unavailable(
            f"relays cannot have their sockets in {folder}: {why}; name another directory with --directory or "
            f"{DIRECTORY}, to the replicas of this host as well"
        ) from error
    if shared and status.st_uid == os.geteuid() and not status.st_mode & stat.S_IXOTH:
        os.chmod(folder, stat.S_IMODE(status.st_mode) | 0o055)  # an agent of this user may have made it before
    writable = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not status.st_mode & stat.S_ISVTX
    if status.st_uid not in (os.geteuid(), 0) or writable:
        raise precondition(
            f"{folder} belongs to user {status.st_uid} with mode {stat.S_IMODE(status.st_mode):o}: others could put "
            "their sockets in a relay's place; give it to root or to this user, and let no other user write to it"
        )
    return folder


@contextlib.contextmanager
def socket_address(name: str) -> Iterator[str]:
    """An address of a socket in that directory that is short enough for the kernel, even if the path is not."""
    folder = os.open(relay_directory(), os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{name}"
    finally:
        os.close(folder)
