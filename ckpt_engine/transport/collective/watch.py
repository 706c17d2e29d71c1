"""A thread that watches over one member's part in a collective. It polls the meeting, and aborts the part when the
collective was ended or the deadline has passed, even while the part waits inside a library."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType

from ckpt_engine.core.problems import CkptEngineError, deadline, unavailable
from ckpt_engine.transport.collective.meeting import Attendance

HEAR_SECONDS = 0.1
"""Seconds between two polls."""

_JOIN_SECONDS = 30.0


class Watch:
    """A context manager around one member's run of its part of a collective.

    An exception that leaves the context ends the collective for all members. What is then raised names the first reason
    that any member gave, since one failure causes others.
    """

    def __init__(self, attendance: Attendance, seconds: float, abort: Callable[[], None]) -> None:
        """seconds: until the deadline. abort: called at most once, on another thread, to end any wait of the part."""
        self._attendance = attendance
        self._abort = abort
        self._seconds = seconds
        self._stop_at = time.monotonic() + seconds
        self._finished = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ckpt-engine collective", daemon=True)
        self._timed_out = False
        self.why = ""
        self.waits_for = "its peers"

    @property
    def remaining(self) -> float:
        """Seconds until the deadline, at least 0.001."""
        return max(0.001, self._stop_at - time.monotonic())

    def check(self) -> None:
        """Raises if the collective was ended, or if its deadline has passed. Does not ask the lead."""
        if self.why:
            raise self._error(self.why)

    def __enter__(self) -> Watch:
        if why := self._attendance.hear(running=True):  # first, so that a member that stops at once is missed
            raise unavailable(f"the collective was ended: {why}")
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        stands = ""
        if error is not None:
            message = error.problem.message if isinstance(error, CkptEngineError) else f"{error}"
            stands = self._end(self.why or f"{self._attendance.name} failed: {message}")
        self._finished.set()
        self._thread.join(_JOIN_SECONDS)
        if error is None:
            self._attendance.hear(running=False)
        elif isinstance(error, Exception):
            raise self._error(stands) from error

    def _run(self) -> None:
        while not self.why and not self._finished.wait(HEAR_SECONDS):
            try:
                why = self._attendance.hear(running=True)
            except CkptEngineError as error:
                why = error.problem.message
            if not why and time.monotonic() > self._stop_at:
                self._timed_out = True
                why = self._end(
                    f"{self._attendance.name} was not done within {self._seconds:g} s: it waited for {self.waits_for}",
                    overdue=True,
                )
            if why:
                self.why = why
                self._abort()

    def _end(self, why: str, overdue: bool = False) -> str:
        try:
            return self._attendance.end(why, overdue)
        except CkptEngineError as error:
            return error.problem.message

    def _error(self, why: str) -> CkptEngineError:
        return (deadline if self._timed_out else unavailable)(f"the collective was ended: {why}")
