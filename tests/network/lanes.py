"""The connections of this process to slots of owners."""

from __future__ import annotations

from ckpt_engine.host import forks
from ckpt_engine.transport.tcp.connection import Lane


def lanes() -> list[Lane]:
    """Those that are not collected yet, whether they run or have ended."""
    return [each for each in forks._registered if isinstance(each, Lane)]
