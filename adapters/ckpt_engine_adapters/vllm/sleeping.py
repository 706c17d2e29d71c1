"""Keeps state words right over vLLM's sleep level 2, inside a worker, and gives our own memory back at any level.

`guard_sleep` makes the worker itself mark that it holds nothing before its memory is discarded, for calls to sleep in
any order and from anywhere.

Runs in the worker, on its main thread; nothing here raises.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

WORKERS = (("vllm.v1.worker.gpu_worker", "Worker"), ("vllm.v1.worker.cpu_worker", "CPUWorker"))
DISCARDS = 2


def guard_sleep(discard: Callable[[Any], None], give_back: Callable[[Any], None]) -> None:
    """Has every worker class of vLLM that is loaded in this process call discard(worker) before it discards memory, and
    give_back(worker) before it sleeps at any other level.

    May be called more than once.
    """
    for module, name in WORKERS:
        kind = getattr(sys.modules.get(module), name, None)
        sleep = vars(kind).get("sleep") if kind is not None else None
        if sleep is None or hasattr(sleep, "ckpt_engine"):
            continue
        setattr(kind, "sleep", _guarded(sleep, discard, give_back))  # noqa: B010


def _guarded(
    sleep: Callable[..., Any], discard: Callable[[Any], None], give_back: Callable[[Any], None]
) -> Callable[..., Any]:
    @functools.wraps(sleep)
    def guarded(worker: Any, level: int = 1) -> Any:
        if level >= DISCARDS:
            discard(worker)
        else:
            give_back(worker)
        return sleep(worker, level)

    guarded.ckpt_engine = True  # type: ignore[attr-defined]
    return guarded
