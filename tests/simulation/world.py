"""Virtual time, seeded chance and generator processes: what everything in the simulation runs on.

A process is a generator: `yield 0.5` sleeps, `value = yield signal` waits for a Signal. It runs until it ends or its
owner kills it (a crash). Nothing here knows what is simulated.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Generator
from typing import Any

STANDSTILL = 2000
"""Events at one moment after which time counts as stopped."""

Steps = Generator["float | Signal", Any, Any]


class BrokenPromiseError(AssertionError):
    """A promise was broken."""


class Signal:
    """Something to wait for. The first value counts; later ones are dropped."""

    def __init__(self) -> None:
        self.ready = False
        self.value: Any = None
        self._waiting: list[Callable[[Any], None]] = []

    def set(self, value: Any = None) -> None:
        """Wakes all who wait."""
        if self.ready:
            return
        self.ready, self.value = True, value
        waiting, self._waiting = self._waiting, []
        for wake in waiting:
            wake(value)

    def then(self, wake: Callable[[Any], None]) -> None:
        """Calls `wake` with the value, now or later."""
        if self.ready:
            wake(self.value)
        else:
            self._waiting.append(wake)


class Process:
    """A running generator. `over` is set with what it returned; never if it was killed."""

    def __init__(self, world: World, steps: Steps) -> None:
        self._world = world
        self._steps: Steps | None = steps
        self.over = Signal()
        world.after(0.0, lambda: self._step(None))

    def kill(self) -> None:
        """It takes no further step."""
        self._steps = None

    def _step(self, value: Any) -> None:
        if self._steps is None:
            return
        try:
            wanted = self._steps.send(value)
        except StopIteration as stop:
            self._steps = None
            self.over.set(stop.value)
            return
        if isinstance(wanted, Signal):
            wanted.then(lambda result: self._world.after(0.0, lambda: self._step(result)))
        else:
            self._world.after(wanted, lambda: self._step(None))


class World:
    """The clock and the dice. check: called after every event; raises what it finds wrong."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.now = 1000.0
        self.events = 0
        self.check: Callable[[], None] = lambda: None
        self.log: list[str] = []
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._sequence = 0

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Has something happen later; what is due at the same time happens in the order of these calls."""
        self._sequence += 1
        heapq.heappush(self._queue, (self.now + max(0.0, seconds), self._sequence, action))

    def spawn(self, steps: Steps) -> Process:
        """Starts a process."""
        return Process(self, steps)

    def run(self, until: float) -> None:
        """Lets time pass up to this moment."""
        at_once = 0
        while self._queue and self._queue[0][0] <= until:
            before, (self.now, _, action) = self.now, heapq.heappop(self._queue)
            at_once = at_once + 1 if self.now == before else 0
            if at_once > STANDSTILL:
                raise AssertionError("time stands still: something answers itself without end")
            action()
            self.events += 1
            self.check()
        self.now = max(self.now, until)

    def chance(self, probability: float) -> bool:
        """True with this probability."""
        return probability > 0 and self.random.random() < probability

    def between(self, least: float, most: float) -> float:
        """Some seconds."""
        return self.random.uniform(least, most)

    def note(self, text: str) -> None:
        """Remembers what happened, for the report of a failing seed."""
        self.log.append(f"{self.now - 1000.0:9.3f} {text}")

    def first_of(self, signal: Signal, seconds: float) -> Signal:
        """Set with the signal's value, or with None after so long."""
        either = Signal()
        signal.then(either.set)
        self.after(seconds, lambda: either.set(None))
        return either
