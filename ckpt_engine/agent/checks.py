"""Remembers which checks of engines passed on this host: a file for each, in the user's cache folder."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path


def has_passed(key: str) -> bool:
    """Whether the check with this key has passed here. Never raises."""
    try:
        return _file(key).read_text() == key
    except (OSError, ValueError):
        return False


def keep(key: str) -> None:
    """Notes that the check with this key has passed. Raises OSError."""
    path = _file(key)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}")
    part.write_text(key)
    part.replace(path)


def _file(key: str) -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "ckpt-engine" / "checked-engines" / hashlib.sha256(key.encode()).hexdigest()[:32]
