"""Batches on their way into a slot: one is brought while those before it are digested.

Decides in which order that happens and on which threads, and nothing about what comes of it. One thread brings, since
links of networks belong to one; what comes over a network is asked for ahead of that. Whoever ends it early finds that
nothing is written any more.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.relay.batches import Batch, Words
from ckpt_engine.relay.sources import Reading
from ckpt_engine.v1.weights_pb2 import Problem

AHEAD = 3
"""Batches that are brought, asked for or digested, or wait for that, behind the one that is waited for."""

DIGESTING = 2
"""Batches that are digested at once, on the same threads: one has work for them while the other one begins or ends."""

Lost = Callable[[Sequence[Reading]], Problem | None]
"""Why some of these cannot be read in this filling."""


def brought(
    batches: Sequence[Batch], lost: Lost, carry_on: Callable[[], None]
) -> Generator[tuple[Batch, Words | Problem], None, None]:
    """Each batch in turn with its digests, or why there are none; meanwhile the next ones are brought and digested.

    carry_on: called before each batch and while a network is waited for; what it raises ends that batch. Close the
    iterator: it waits for what is on its way, and then nothing can land any more.
    """
    line = _Line(batches, lost, carry_on)
    ahead: deque[tuple[Batch, Future[Words | Problem]]] = deque()
    digesting = min(DIGESTING, torch.get_num_threads())
    try:
        with (
            ThreadPoolExecutor(digesting, thread_name_prefix="ckpt-engine fill digest") as digests,
            ThreadPoolExecutor(1, thread_name_prefix="ckpt-engine fill bring") as bringing,
        ):
            try:
                for number, batch in enumerate(batches):
                    first = bringing.submit(line.bring, number) if batch.is_brought_first else None
                    ahead.append((batch, digests.submit(line.digest, batch, first)))
                    if len(ahead) > AHEAD:
                        done, found = ahead.popleft()
                        yield done, found.result()
                while ahead:
                    done, found = ahead.popleft()
                    yield done, found.result()
            finally:
                line.ended = True
                for pool in (bringing, digests):
                    pool.shutdown(wait=False, cancel_futures=True)
    finally:
        for batch in batches:
            batch.abandon()


class _Line:
    def __init__(self, batches: Sequence[Batch], lost: Lost, carry_on: Callable[[], None]) -> None:
        self.ended = False
        self._batches = batches
        self._lost = lost
        self._carry_on = carry_on

    def bring(self, number: int) -> Problem | None:
        """Why it could not be done."""
        batch = self._batches[number]
        try:
            self._go_on()
            if (lost := self._lost(batch.readings)) is not None:
                return lost
            for later in self._batches[number + 1 : number + 1 + AHEAD] if batch.lands else ():
                self._ask(batch, later)
            batch.bring(self._go_on)
        except CkptEngineError as error:
            return error.problem
        return None

    def digest(self, batch: Batch, brought_first: Future[Problem | None] | None) -> Words | Problem:
        """Of a batch that is brought before it is digested, or else along with it."""
        problem = self._lost(batch.readings) if brought_first is None else brought_first.result()
        if problem is not None:
            return problem
        try:
            return batch.digest()
        except CkptEngineError as error:
            return error.problem

    def _ask(self, batch: Batch, later: Batch) -> None:
        with contextlib.suppress(CkptEngineError):  # it is asked once more, and told then
            batch.start()  # first, so that it is served first
            if self._lost(later.readings) is None:
                later.start()

    def _go_on(self) -> None:
        if self.ended:
            raise CkptEngineError(Problem(code=Problem.ABORTED, message="nobody waits for this batch any more"))
        self._carry_on()
