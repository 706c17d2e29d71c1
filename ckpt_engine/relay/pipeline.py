"""Batches on their way into a slot: one is brought while those before it are digested.

Decides only the order and the threads. One thread brings; copies of a GPU are begun ahead. When a caller ends it early,
nothing is written any more.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import numpy as np
import torch

from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.digest.arriving import ArrivingDigests
from ckpt_engine.relay.batches import PieceBatch, Words
from ckpt_engine.relay.read_back import Boxes
from ckpt_engine.relay.sources import Reading
from ckpt_engine.v1.weights_pb2 import Problem

log = logging.getLogger("ckpt_engine.relay")

AHEAD = 6
"""Batches that are brought or digested, or wait for that, beyond the one that is waited for."""

DIGESTING = 2
"""Batches that are digested at once, on the same threads: one keeps them busy while the other one begins or ends."""

_POLL_SECONDS = 100e-6

Lost = Callable[[Sequence[Reading]], Problem | None]
"""Why some of these cannot be read in this filling."""


class Pipeline:
    """The threads of one filling. Used inside `with`, by one thread; they have ended after it.

    carry_on: called before each batch and while a GPU is waited for; an exception of it ends that batch.
    """

    def __init__(self, lost: Lost, carry_on: Callable[[], None]) -> None:
        self._lost = lost
        self._carry_on = carry_on
        self._digests = ThreadPoolExecutor(
            min(DIGESTING, torch.get_num_threads()), thread_name_prefix="ckpt-engine fill digest"
        )
        self._bringing = ThreadPoolExecutor(1, thread_name_prefix="ckpt-engine fill bring")

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, *_: object) -> None:
        for pool in (self._bringing, self._digests):
            pool.shutdown(cancel_futures=True)

    def results(self, batches: Sequence[PieceBatch]) -> Generator[tuple[PieceBatch, Words | Problem], None, None]:
        """Yields each batch with its digests, or why there are none; meanwhile the next ones are brought and digested.

        Close the iterator: that waits for batches in flight, and then nothing can land any more.
        """
        line = _BatchLine(batches, self._lost, self._carry_on)
        ahead: deque[tuple[PieceBatch, Future[Words | Problem]]] = deque()
        futures: list[Future[Any]] = []
        try:
            for number, batch in enumerate(batches):
                first = self._bringing.submit(line.bring, number) if batch.is_brought_first else None
                found = self._digests.submit(line.digest, batch, first)
                futures += [found] if first is None else [first, found]
                ahead.append((batch, found))
                if len(ahead) > AHEAD:
                    done, found = ahead.popleft()
                    yield done, found.result()
            while ahead:
                done, found = ahead.popleft()
                yield done, found.result()
        finally:
            line.ended = True
            wait([each for each in futures if not each.cancel()])
            _abandon(batches)

    def arriving(
        self, batches: Sequence[PieceBatch], digests: ArrivingDigests
    ) -> Generator[tuple[PieceBatch, Words | Problem], None, None]:
        """Yields as `results` does, for batches of GPUs, brought on the calling thread. digests: of all pieces."""
        line = _BatchLine(batches, self._lost, self._carry_on)
        ends = np.cumsum([0, *(len(batch.pieces) for batch in batches)]).tolist()
        problems: list[Problem | None] = []
        count = 0
        arrival = digests.start()
        try:
            while count < len(batches):
                number = len(problems)
                if number < len(batches):
                    problems.append(line.bring(number))
                    arrival.arrived(ends[number + 1])
                else:
                    time.sleep(_POLL_SECONDS)
                    self._carry_on()
                while count < len(problems) and (found := arrival.values(ends[count], ends[count + 1])) is not None:
                    count += 1
                    yield batches[count - 1], problems[count - 1] or found
        finally:
            line.ended = True
            arrival.end()
            _abandon(batches)


def _abandon(batches: Sequence[PieceBatch]) -> None:
    """Abandons all batches, even if one of them raises."""
    with contextlib.ExitStack() as stack:
        for batch in batches:
            stack.callback(batch.abandon)


def arriving_digests(batches: Sequence[PieceBatch]) -> ArrivingDigests | None:
    """Prepares digests of these batches as they arrive; None if some are not brought by GPUs and digested by
    processors, or there is no kernel."""
    boxes: Boxes = []
    for batch in batches:
        if (its := batch.boxes) is None:
            return None
        boxes += its
    try:
        return ArrivingDigests(boxes) if boxes else None
    except Exception as error:  # no Numba: batches are digested one by one
        log.warning("what GPUs bring is not digested as it arrives: %s: %s", type(error).__name__, error)
        return None


class _BatchLine:
    def __init__(self, batches: Sequence[PieceBatch], lost: Lost, carry_on: Callable[[], None]) -> None:
        self.ended = False
        self._batches = batches
        self._lost = lost
        self._carry_on = carry_on

    def bring(self, number: int) -> Problem | None:
        """Brings a batch and starts the next ones; returns why, if that failed."""
        batch = self._batches[number]
        try:
            self._go_on()
            if (lost := self._lost(batch.readings)) is not None:
                return lost
            for later in self._batches[number + 1 : number + 1 + batch.ahead]:
                self._start(batch, later)
            batch.bring(self._go_on)
        except CkptEngineError as error:
            return error.problem
        return None

    def digest(self, batch: PieceBatch, brought_first: Future[Problem | None] | None) -> Words | Problem:
        """Digests a batch after it was brought, or while it is copied."""
        problem = self._lost(batch.readings) if brought_first is None else brought_first.result()
        if problem is not None:
            return problem
        try:
            return batch.digest()
        except CkptEngineError as error:
            return error.problem

    def _start(self, batch: PieceBatch, later: PieceBatch) -> None:
        with contextlib.suppress(CkptEngineError):  # the batch is started again in its turn, and fails then
            batch.start()  # first, so that it is served first
            if self._lost(later.readings) is None:
                later.start()

    def _go_on(self) -> None:
        if self.ended:
            raise CkptEngineError(
                Problem(code=Problem.CODE_ABORTED, message="this filling has ended before this batch")
            )
        self._carry_on()
