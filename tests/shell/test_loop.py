"""One loop, with machines of a few lines: the order of events, timers and tasks, and what a defect leaves behind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from ckpt_engine.core.problems import internal, unavailable
from ckpt_engine.machines.events import (
    CancelTimer,
    Done,
    Key,
    PutBlobs,
    Run,
    SetTimer,
    Start,
    Stop,
    Task,
    TimerFired,
)
from ckpt_engine.shell.loop import Loop
from ckpt_engine.shell.tasks import TaskFailedError, carry_out
from ckpt_engine.v1 import weights_pb2

TASK = PutBlobs((), 5.0)


class Scripted:
    """Answers each event as `script` says, and keeps what happened."""

    def __init__(self, script: Callable[[Any], list[Any]], seconds: float = 0.0) -> None:
        self.script = script
        self.seconds = seconds
        self.events: list[Any] = []
        self.performed: list[Any] = []
        self.failures: list[tuple[object, weights_pb2.Problem]] = []
        self.came = asyncio.Event()
        self.loop = Loop("tester", self, self._perform, self._run, self._failed)

    def handle(self, event: Any, now: float) -> list[Any]:
        self.events.append(event)
        self.came.set()
        return self.script(event)

    def _perform(self, command: Any) -> None:
        self.performed.append(command)
        if callable(command):
            command()

    async def _run(self, key: Key, task: Task) -> Done:
        async def work(task: Task) -> object:
            await asyncio.sleep(self.seconds)
            return "result"

        return await carry_out("tester", key, task, work)

    def _failed(self, event: object, problem: weights_pb2.Problem) -> None:
        self.failures.append((event, problem))

    async def until(self, count: int) -> None:
        async with asyncio.timeout(60):
            while len(self.events) < count:
                self.came.clear()
                await self.came.wait()


async def test_an_event_that_comes_while_commands_are_carried_out_waits_its_turn() -> None:
    def script(event: Any) -> list[Any]:
        return [lambda: made.loop.feed(Stop("second")), "after"] if isinstance(event, Start) else ["second"]

    made = Scripted(script)
    made.loop.feed(Start())
    assert made.performed[1:] == ["after", "second"]


async def test_timers_are_replaced_and_cancelled_and_tasks_answer_once() -> None:
    def script(event: Any) -> list[Any]:
        if isinstance(event, Start):
            timers = [SetTimer(("a",), 0.0), SetTimer(("a",), 0.01), SetTimer(("b",), 0.0), CancelTimer(("b",))]
            return [*timers, CancelTimer(("unknown",)), Run(("task",), TASK)]
        return []

    made = Scripted(script)
    made.loop.feed(Start())
    await made.until(3)
    await asyncio.sleep(0.02)
    assert sorted(made.events[1:], key=str) == [Done(("task",), result="result"), TimerFired(("a",))]
    await made.loop.stop(0.0)


async def test_after_a_defect_nothing_reaches_the_machine() -> None:
    """No timer, no task's result, no event; and of the event's commands the rest is not carried out."""

    def script(event: Any) -> list[Any]:
        if isinstance(event, Start):
            return [SetTimer(("a",), 0.0), Run(("task",), TASK)]
        return ["before", lambda: 1 / 0, "after"]

    made = Scripted(script)
    made.loop.feed(Start())
    made.loop.feed(Stop("broken"))
    made.loop.feed(Start())
    await asyncio.sleep(0.02)
    assert made.events == [Start(), Stop("broken")]
    assert "after" not in made.performed
    [(event, problem)] = made.failures
    assert event == Stop("broken")
    assert problem == made.loop.problem
    assert "the tester failed on Stop: ZeroDivisionError" in problem.message
    await made.loop.stop(1.0)


async def test_stopping_gives_tasks_their_time_and_their_results_to_nobody() -> None:
    for given in (5.0, 0.0):
        made = Scripted(lambda event: [Run(("task",), TASK)] if isinstance(event, Start) else [], seconds=0.01)
        made.loop.feed(Start())
        ended: list[int] = []

        async def work(ended: list[int] = ended) -> None:
            await asyncio.sleep(0.01)
            ended.append(1)

        made.loop.start(work())
        await made.loop.stop(given)
        made.loop.feed(Start())
        assert made.events == [Start()]
        assert ended == [1] * (given > 0)


async def test_each_end_of_a_task_has_its_problem() -> None:
    async def late(task: Task) -> object:
        await asyncio.sleep(10)
        return None

    async def raises(error: Exception) -> object:
        raise error

    Problem = weights_pb2.Problem  # noqa: N806
    quick = PutBlobs((), 0.001)
    done = await carry_out("tester", ("k",), quick, late)
    assert (done.problem and done.problem.code, done.answered) == (Problem.CODE_DEADLINE_EXCEEDED, False)
    assert done.problem is not None
    assert done.problem.message == "put blobs took longer than 0.001 s"
    for error, code, answered in (
        (unavailable("gone"), Problem.CODE_UNAVAILABLE, True),
        (TaskFailedError(internal("no").problem, False), Problem.CODE_INTERNAL, False),
        (TaskFailedError(internal("no").problem, True), Problem.CODE_INTERNAL, True),
        (TimeoutError("somebody else's"), Problem.CODE_INTERNAL, False),
        (ZeroDivisionError("a defect"), Problem.CODE_INTERNAL, False),
    ):
        done = await carry_out("tester", ("k",), TASK, lambda task, error=error: raises(error))  # type: ignore[misc]
        assert (done.problem and done.problem.code, done.answered) == (code, answered)
