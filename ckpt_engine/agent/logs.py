"""Log files for the output of launched engines: one for each launch, with a bound on their number and bytes."""

from __future__ import annotations

import contextlib
import os
import re
import time
from pathlib import Path

MODE = 0o600
FOLDER_MODE = 0o700

MOST_FILES = 50
"""Most files in the folder: the oldest ones are deleted when a new one is made."""

MOST_BYTES = 2 << 30
"""Most bytes of all files together: beyond that, too, the oldest ones are deleted."""


def new_log(root: Path, name: str) -> Path:
    """Creates a new, empty log file below `root`, named after the engine and the time."""
    folder = root / "logs"
    folder.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
    _forget_old(folder)
    start = f"{re.sub(r'[^A-Za-z0-9._-]', '_', name)}.{time.strftime('%Y%m%d-%H%M%S')}"
    number = 1
    while True:
        path = folder / (f"{start}.log" if number == 1 else f"{start}.{number}.log")
        try:
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, MODE))
        except FileExistsError:
            number += 1
        else:
            return path


def _forget_old(folder: Path) -> None:
    files = []
    for path in folder.iterdir():
        with contextlib.suppress(OSError):  # another agent has just deleted it
            status = path.stat()
            files.append((status.st_mtime, status.st_size, path))
    total = 0
    for number, (_, size, path) in enumerate(sorted(files, reverse=True)):
        total += size
        if number >= MOST_FILES - 1 or total > MOST_BYTES:
            path.unlink(missing_ok=True)
