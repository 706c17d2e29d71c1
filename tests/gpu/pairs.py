"""A replica and a server that loaded the same files, for each of many kinds: started ahead of the tests that ask for
them, and ended behind these, so that a bounded number is up at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar("T")


class Pairs(Generic[T]):
    """Starts the servers of some kinds ahead of the test that asks for them, and ends them after it.

    Used on one thread; servers start on another one, since models are made first, and end on a third one.
    """

    def __init__(
        self, names: Sequence[str], start: Callable[[str, contextlib.ExitStack], T], at_a_time: int, seconds: float
    ) -> None:
        """names: in the order in which they are asked for. start: starts what belongs to a name, to be ended by the
        stack. seconds: until a start has returned; also how long the end of one that goes on is waited for."""
        self._names, self._start, self._at_a_time, self._seconds = list(names), start, at_a_time, seconds
        self._started: dict[str, tuple[contextlib.ExitStack, Future[T]]] = {}
        self._starter, self._ender = ThreadPoolExecutor(1), ThreadPoolExecutor(at_a_time)

    def get(self, name: str) -> T:
        """The servers of `name`, which may still be starting."""
        ahead = self._names[self._names.index(name) :][: self._at_a_time]
        for each in ahead:
            if each not in self._started:
                stack = contextlib.ExitStack()
                self._started[each] = (stack, self._starter.submit(self._start, each, stack))
        return self._started[name][1].result(self._seconds)

    def end(self, name: str) -> None:
        """Begins to end the servers of `name`."""
        if name in self._started:
            stack, started = self._started.pop(name)
            self._ender.submit(self._end, stack, started)

    def _end(self, stack: contextlib.ExitStack, started: Future[T]) -> None:
        if not started.cancel():
            started.exception(self._seconds)
        stack.close()

    def close(self) -> None:
        for name in [*self._started]:
            self.end(name)
        self._ender.shutdown()
        self._starter.shutdown()
