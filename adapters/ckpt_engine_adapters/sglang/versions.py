"""Differences between the versions of SGLang that we drive, 0.5.16 and 0.5.23, for our half inside it.

Importing it does not import SGLang.
"""

from __future__ import annotations

import sys
from typing import Any

_PICTURES = ("sglang.srt.managers.mm_schedule", "sglang.srt.managers.mm_utils")
"""Modules whose `embedding_cache` has what towers made of pictures: in 0.5.23, and in 0.5.16."""


def forget_pictures() -> None:
    """Empties this process's cache of what a model's tower made of pictures, video and sound. SGLang finds these by
    their contents alone, and keeps them when it flushes its caches. Does nothing where there is no such cache."""
    for name in _PICTURES:
        cache = getattr(sys.modules.get(name), "embedding_cache", None)
        if cache is not None:
            cache.clear()


def let_paused_scheduler_flush() -> None:
    """Lets a paused scheduler empty its caches although requests wait, as SGLang 0.5.23 does by itself.

    In 0.5.16 a scheduler refuses that because of a retracted request, which has no cache; old caches would then be used
    with new weights. Called in a scheduler's process; may be called again, and does nothing where it is not needed.
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
