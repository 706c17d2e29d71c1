"""The loop around one state machine: events go in one at a time, its commands are carried out, timers and tasks bring
further events.

It decides nothing. Used on one asyncio loop, as are all its callbacks. README.md describes what happens when the
machine raises; this file does it, for manager, agents and trainers alike.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Protocol

from ckpt_engine.core.problems import internal
from ckpt_engine.machines.events import CancelTimer, Done, Key, Message, Run, SetTimer, Task, TimerFired
from ckpt_engine.v1 import weights_pb2

log = logging.getLogger(__name__)


class Machine(Protocol):
    """A loop's view of its machine; see machines/events.py."""

    def handle(self, event: Any, now: float) -> Sequence[Any]:
        """Handles one event and returns commands. now: monotonic seconds."""
        ...


class Loop:
    """Runs a machine as long as it does not raise.

    role: of the process, for messages ("manager").
    perform: carries out a command that is neither a timer nor a task. It queues and does not wait.
    run: carries out a task: one Done, in time; see tasks.py. None: the machine has no tasks.
    failed: called once with the event and the problem (INTERNAL), after the machine or a command has raised.
    handled: called with each event after its commands were carried out; None: not needed.
    may: asked before each event whether the machine may decide anything; once it may not, events are dropped.
    """

    def __init__(
        self,
        role: str,
        machine: Machine,
        perform: Callable[[Any], None],
        run: Callable[[Key, Task], Awaitable[Done]] | None,
        failed: Callable[[object, weights_pb2.Problem], None],
        handled: Callable[[object, Sequence[Any]], None] | None = None,
        may: Callable[[], bool] = lambda: True,
    ) -> None:
        self.problem: weights_pb2.Problem | None = None
        """Why the machine does not go on; None: it does."""
        self._role = role
        self._machine = machine
        self._perform = perform
        self._run = run
        self._failed = failed
        self._handled = handled
        self._may = may
        self._inbox: deque[object] = deque()
        self._handling = False
        self._stopped = False
        self._timers: dict[Key, asyncio.TimerHandle] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def feed(self, event: object) -> None:
        """Feeds one event to the machine and carries out its commands; events that come meanwhile wait their turn.

        Never raises. Nothing happens after `problem` is set, after `stop`, or once the machine may not decide.
        """
        if self._stopped or not self._may():
            return
        self._inbox.append(event)
        if self._handling:
            return
        self._handling = True
        try:
            while self._inbox and not self._stopped:
                self._take(self._inbox.popleft())
        finally:
            self._handling = False

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs work that a command began, such as the end of a stream, in the background; `stop` waits for it too."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def stop(self, seconds: float) -> None:
        """Ends timers, and tasks after so many `seconds`. No event reaches the machine any more."""
        self._stopped = True
        self._cancel_timers()
        if self._tasks and seconds > 0:
            await asyncio.wait(tuple(self._tasks), timeout=seconds)
        ending = tuple(self._tasks)
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)

    def _take(self, event: object) -> None:
        try:
            commands = self._machine.handle(event, time.monotonic())
            for command in commands:
                self._carry_out(command)
            if self._handled is not None:
                self._handled(event, commands)
        except Exception as error:
            name = type(event.body if isinstance(event, Message) else event).__name__
            log.exception("the state machine failed who=%s event=%s", self._role, name)
            self.problem = internal(f"the {self._role} failed on {name}: {error!r}; its log says where").problem
            self._stopped = True
            self._cancel_timers()
            self._failed(event, self.problem)

    def _carry_out(self, command: Any) -> None:
        match command:
            case SetTimer(key, seconds):
                self._cancel_timer(key)
                self._timers[key] = asyncio.get_running_loop().call_later(seconds, self._fire, key)
            case CancelTimer(key):
                self._cancel_timer(key)
            case Run(key, task):
                self.start(self._finish(key, task))
            case _:
                self._perform(command)

    async def _finish(self, key: Key, task: Task) -> None:
        assert self._run is not None
        self.feed(await self._run(key, task))

    def _fire(self, key: Key) -> None:
        del self._timers[key]
        self.feed(TimerFired(key))

    def _cancel_timer(self, key: Key) -> None:
        if (timer := self._timers.pop(key, None)) is not None:
            timer.cancel()

    def _cancel_timers(self) -> None:
        for key in tuple(self._timers):
            self._cancel_timer(key)
