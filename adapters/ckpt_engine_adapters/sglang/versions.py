"""Which versions of SGLang we drive, and what differs between them.

Importing it does not import SGLang.
"""

from __future__ import annotations

import os
from typing import Any

SUPPORTED = ("0.5.16", "0.5.23")
"""Versions that the tests run against; others are refused by name unless forced."""

FORCE = "CKPT_ENGINE_FORCE_ENGINE_VERSION"
"""Set to 1 to drive a version that nobody has tested."""


def is_supported(version: str) -> tuple[bool, str]:
    """Whether `version` may be driven, and a sentence that says why not, or why nevertheless."""
    if version in SUPPORTED:
        return True, ""
    tested = " and ".join(SUPPORTED)
    if os.environ.get(FORCE) == "1":
        return True, f"SGLang {version} is driven because {FORCE}=1; tested are {tested}"
    return False, f"SGLang {version} is not supported: tested are {tested}; set {FORCE}=1 to try"


def let_paused_scheduler_flush() -> None:
    """Lets a scheduler that is paused empty its caches although requests wait, as SGLang 0.5.23 does by itself.

    In 0.5.16 a retracted request, which waits without any cache, makes the scheduler refuse. Then old caches would meet
    new weights. Called in a scheduler's process; may be called again, and does nothing where it is not needed.
    """
    import inspect

    from sglang.srt.managers.scheduler import Scheduler

    scheduler: Any = Scheduler
    original = scheduler.is_fully_idle
    if "ignore_waiting" in inspect.signature(original).parameters:
        return

    def is_fully_idle(self: Any, for_health_check: bool = False, ignore_waiting: bool = True) -> bool:
        if for_health_check or not ignore_waiting or not self._engine_paused:
            return bool(original(self, for_health_check))
        waiting, self.waiting_queue = self.waiting_queue, []
        try:
            return bool(original(self))
        finally:
            self.waiting_queue = waiting

    scheduler.is_fully_idle = is_fully_idle
