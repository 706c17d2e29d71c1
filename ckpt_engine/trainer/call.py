"""One `update_weights` in flight: the queue from the background thread to the trainer's own thread.

The trainer's thread waits in `serve`. The background thread puts work, events and the end of the call into the queue.
"""

from __future__ import annotations

import asyncio
import math
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from ckpt_engine.core.problems import CkptEngineError, aborted, deadline, internal
from ckpt_engine.options import Progress
from ckpt_engine.v1 import manager_pb2, weights_pb2

T = TypeVar("T")


@dataclass(frozen=True)
class _CallWork(Generic[T]):
    task: str  # for messages
    do: Callable[[], T]
    answer: Future[T]


@dataclass(frozen=True)
class _CallEnd:
    error: BaseException | None


class CallInFlight:
    """One call in flight. The trainer's thread makes it before the call starts, and closes it after `serve`, also when
    that has raised."""

    def __init__(self) -> None:
        self._items: queue.SimpleQueue[_CallWork[Any] | manager_pb2.UpdateEvent | _CallEnd] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False
        self.heard = False
        """Whether the manager has sent or asked anything: then the update has begun."""
        self.sealed = 0
        """The fill epoch of this call's last seal."""
        self.cluster = ""
        """The cluster that this epoch is of."""
        self.version: int | None = None
        """The version that it was sealed as; None: it was not yet."""
        self.end = math.inf
        """Monotonic seconds until which the trainer's thread waits."""

    # --------------------------------------------------------------------------------- background thread

    async def have(self, task: str, do: Callable[[], T]) -> T:
        """Runs `do` on the trainer's thread. task: its name in messages. Raises CkptEngineError: what `do` raised, or
        ABORTED if the thread has left `serve`."""
        answer: Future[T] = Future()
        self.heard = True
        with self._lock:
            if self._closed:
                raise departure_error()
            self._items.put(_CallWork(task, do, answer))
        return await asyncio.wrap_future(answer)

    def event(self, event: manager_pb2.UpdateEvent) -> None:
        """Takes an event of the manager."""
        self.heard = True
        self._items.put(event)

    def finish(self, call: Future[None]) -> None:
        """Takes the end of the call, with or without an error."""
        self._items.put(_CallEnd(CancelledError() if call.cancelled() else call.exception()))

    # ---------------------------------------------------------------------------------- trainer's thread

    def serve(self, on_progress: Progress | None, seconds: float) -> manager_pb2.UpdateReport:
        """Does the call's work on this thread until the report comes. seconds: at most. Raises CkptEngineError, or what
        `on_progress` raises; KeyboardInterrupt passes through at once."""
        report: manager_pb2.UpdateReport | None = None
        refusal: weights_pb2.Problem | None = None
        self.end = time.monotonic() + seconds
        while True:
            try:
                item = self._items.get(timeout=max(0.0, self.end - time.monotonic()))
            except queue.Empty:
                raise deadline(
                    f"no report came within {seconds:.0f} s, although the manager should end by then"
                ) from None
            match item:
                case _CallWork():
                    _do(item)
                case manager_pb2.UpdateEvent():
                    if item.HasField("report"):
                        report = item.report
                    elif item.HasField("refusal"):
                        refusal = item.refusal
                    elif on_progress is not None:
                        on_progress(item.progress)
                case _CallEnd(error):
                    if isinstance(error, CkptEngineError):
                        raise CkptEngineError(refusal or error.problem) from None  # the words are the same
                    if error is not None:
                        raise internal(f"the call ended unexpectedly: {type(error).__name__}: {error}") from error
                    if report is None:
                        raise internal("the manager ended the update without a report")
                    return report

    def close(self) -> None:
        """Refuses work that is still queued, and all later work. May be repeated."""
        with self._lock:
            self._closed = True
        while True:
            try:
                item = self._items.get_nowait()
            except queue.Empty:
                return
            if isinstance(item, _CallWork) and item.answer.set_running_or_notify_cancel():
                item.answer.set_exception(departure_error())


def departure_error() -> CkptEngineError:
    """The error for work that comes after the trainer's thread has left `serve`."""
    return aborted("the trainer rank has left update_weights (an interrupt, an error or its timeout)")


def _do(work: _CallWork[T]) -> None:
    if not work.answer.set_running_or_notify_cancel():
        return  # it was cancelled while it waited
    try:
        result = work.do()
    except CkptEngineError as error:
        work.answer.set_exception(error)
    except Exception as error:
        # Goes to the manager; the call then ends with this very problem.
        work.answer.set_exception(internal(f"{work.task} failed: {type(error).__name__}: {error}"))
    except BaseException:
        work.answer.set_exception(departure_error())
        raise
    else:
        work.answer.set_result(result)
