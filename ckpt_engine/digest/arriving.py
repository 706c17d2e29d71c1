"""Digests of memory of this host that arrives while it is digested, such as memory that a GPU writes.

Threads digest pieces in the order of their arrival, and stay outside of the interpreter's lock until all are done: no
thread is woken for a part, and none waits for another one.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import torch

from ckpt_engine.digest.factors import SEED, Words
from ckpt_engine.digest.host import HostBox, HostDigests

if TYPE_CHECKING:
    from ckpt_engine.digest.host_kernel import ArrivingKernel


class ArrivingDigests:
    """Prepared digests of boxes of this host's memory, in the order in which they arrive. Keeps the views.

    Raises as HostDigests; ImportError where Numba is missing.
    """

    def __init__(self, boxes: Sequence[HostBox], seed: int = SEED) -> None:
        self._kernel = _kernel()
        self._digests = HostDigests(boxes, seed)
        self.count = len(boxes)

    def start(self) -> Arrival:
        """Begins to wait for the boxes, on as many threads as torch would use. `Arrival.end` must follow."""
        return Arrival(self._kernel, self._digests)


class Arrival:
    """One run. One thread."""

    def __init__(self, kernel: ArrivingKernel, digests: HostDigests) -> None:
        from ckpt_engine.digest.host_kernel import ENDED, READY, STATE

        self._ended, self._ready = ENDED, READY
        jobs = digests._jobs_now()
        self._of_job, self._zeros = digests._of_job, digests._zeros
        self._first = np.searchsorted(self._of_job, np.arange(len(digests._boxes) + 1))
        self._found = np.zeros(len(jobs), dtype=np.uint64)
        self._finished = np.zeros(len(jobs), dtype=np.uint8)
        self._state = np.zeros(STATE, dtype=np.int64)
        threads = torch.get_num_threads()
        pool = _pool(os.getpid(), threads)
        self._running: list[Future[object]] = []
        try:
            for _ in range(threads):
                self._running.append(pool.submit(kernel, jobs, self._found, self._finished, self._state))
        except BaseException:
            self.end()  # those that run would never end by themselves
            raise

    def arrived(self, boxes: int) -> None:
        """Notes that so many boxes, from the first on, have arrived."""
        self._state[self._ready] = self._first[boxes]

    def values(self, first: int, end: int) -> Words | None:
        """The digests of these boxes; None until all of them are known."""
        jobs = slice(int(self._first[first]), int(self._first[end]))
        if not self._finished[jobs].all():
            return None
        values = self._zeros[first:end].copy()
        np.add.at(values, self._of_job[jobs] - first, self._found[jobs])
        return values

    def end(self) -> None:
        """Ends the run: no thread reads memory any more when it returns."""
        self._state[self._ended] = 1
        wait([each for each in self._running if not each.cancel()])


@cache
def _kernel() -> ArrivingKernel:
    from ckpt_engine.digest.host_kernel import compiled_arriving

    return compiled_arriving()


@cache
def _pool(process: int, threads: int) -> ThreadPoolExecutor:
    """The threads of a process (they do not survive a fork); others digest at once, and must not wait for arrivals."""
    return ThreadPoolExecutor(threads, thread_name_prefix="ckpt-engine-arriving")
