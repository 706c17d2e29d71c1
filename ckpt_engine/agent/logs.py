"""Where the output of an engine that we launch goes: a file for each launch, and only so many of them."""

from __future__ import annotations

import contextlib
import os
import re
import time
from pathlib import Path

MODE = 0o600
FOLDER_MODE = 0o700

KEPT = 50
"""Files that stay in the folder, those that were written to last; an older one is deleted when a new one is made."""

KEPT_BYTES = 2 << 30
"""Bytes that they may take together; beyond that, too, the oldest go."""


def new_log(root: Path, name: str) -> Path:
    """An empty file below `root`, named after the engine and the moment, that nobody else writes to."""
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
    written = []
    for path in folder.iterdir():
        with contextlib.suppress(OSError):  # another agent has just deleted it
            status = path.stat()
            written.append((status.st_mtime, status.st_size, path))
    taken = 0
    for number, (_, size, path) in enumerate(sorted(written, reverse=True)):
        taken += size
        if number >= KEPT - 1 or taken > KEPT_BYTES:
            path.unlink(missing_ok=True)
