"""Whether Numba may cache compiled code: decides whether other users could write there, and not what is compiled."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def may_cache(folder: Path) -> bool:
    """Whether only this user, or the one that installed this package, can write to Numba's cache, which is loaded as
    code. Numba takes NUMBA_CACHE_DIR, else `folder`, else a directory in the user's home."""
    if os.environ.get("NUMBA_CACHE_DIR") or os.access(folder, os.W_OK):
        return True
    try:
        home = os.stat(os.path.expanduser("~"))
    except OSError:
        return False
    return home.st_uid == os.geteuid() and not home.st_mode & stat.S_IWOTH
