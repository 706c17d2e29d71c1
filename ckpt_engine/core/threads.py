"""Threads that share out digests, each running torch on itself alone.

torch's own threads wait for each other after every operation, which costs milliseconds each time one of them has lost
its processor to somebody else; trainers and engines keep processors busy. Threads that only meet at the end lose
nothing. There is one pool a process, made when first needed and as large as `torch.get_num_threads()` was then.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

import torch

Work = TypeVar("Work")
Result = TypeVar("Result")

_lock = threading.Lock()
_pools: dict[tuple[int, int], ThreadPoolExecutor] = {}


def share_out(do: Callable[[Work], Result], work: Sequence[Work], threads: int) -> list[Result]:
    """`do` of each piece of work, in order, on `threads` threads. Raises the first error, once all are done."""
    futures = [_pool(threads).submit(do, each) for each in work]
    wait(futures)
    return [future.result() for future in futures]


def _pool(threads: int) -> ThreadPoolExecutor:
    key = os.getpid(), threads  # threads do not survive a fork
    with _lock:
        if key not in _pools:
            _pools[key] = _alone(threads)
        return _pools[key]


def _alone(threads: int) -> ThreadPoolExecutor:
    """A pool with all its threads started and set to run torch on one thread."""
    everyone = threading.Barrier(threads)
    before = torch.get_num_threads()

    def settle() -> None:
        torch.get_num_threads()  # a thread takes torch's default at its first call; what is set earlier is lost
        torch.set_num_threads(1)
        everyone.wait(timeout=60)

    pool = ThreadPoolExecutor(threads, thread_name_prefix="ckpt-engine-digest")
    for future in [pool.submit(settle) for _ in range(threads)]:
        future.result()
    torch.set_num_threads(before)  # the default of threads yet to come is shared
    return pool
