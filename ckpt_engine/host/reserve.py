"""Files with all their blocks allocated, and the error where there is no room for them."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from ckpt_engine.core.problems import precondition


def reserve(descriptor: int, path: Path, size: int) -> None:
    """Makes the open file `path` at least `size` bytes long, with all blocks allocated.

    A sparse file ends a process that touches a mapping of it (SIGBUS) once its file system is full.

    Raises:
        CkptEngineError: there is no room for them.
    """
    if os.fstat(descriptor).st_size < size:
        with room_for(size, path.parent):
            os.posix_fallocate(descriptor, 0, size)


@contextlib.contextmanager
def room_for(size: int, directory: Path) -> Iterator[None]:
    """A context for writing files of `size` bytes in all into `directory`.

    Raises:
        CkptEngineError: instead of the OSError of a full file system or a quota that is used up.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        found = os.statvfs(directory)
        free = f"{found.f_bavail * found.f_frsize} bytes and {found.f_favail} files are free"
        raise precondition(
            f"{directory} has no room for an engine's files of {size} bytes ({error.strerror}: {free}); make room, or "
            "set XDG_RUNTIME_DIR to a private directory elsewhere"
        ) from error
