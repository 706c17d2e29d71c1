"""Explains why this process cannot write in a directory, with its owner, and what to do about it."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def unwritable(folder: Path, error: Exception) -> str:
    """Why nothing could be written in `folder`, and what to do; empty if `error` says something else."""
    number = error.errno if isinstance(error, OSError) else None
    if number == errno.EROFS:
        return f"{folder} is read-only here: mount a volume that can be written to there"
    if number not in (errno.EACCES, errno.EPERM):
        return ""
    try:
        status = folder.stat()
    except OSError:
        return ""
    user = os.geteuid()
    return (
        f"{folder} belongs to user {status.st_uid} with mode {stat.S_IMODE(status.st_mode):o}, and this process is "
        f"user {user}: give it the directory (chown {user}), or run it as that user"
    )
