"""Putting one engine to sleep and waking it, by the steps of core/sleeping.py, each of them marked.

The mark in the engine's page closes the gate before the first step of going to sleep, and opens it after the last one
of waking. A step that the engine refuses leads back to the mark of what it still has; a step without an answer leaves
the mark of what it may have lost. Nothing here waits for the manager.
"""

from __future__ import annotations

from typing import ClassVar, cast

from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.core.sleeping import KV_CACHE, WEIGHTS, SleepStep, sleep_steps, wake_steps
from ckpt_engine.machines.agent.state import CLEAN, AgentReplica, Operation
from ckpt_engine.machines.events import (
    AgentTask,
    DiscardEngine,
    Done,
    PauseEngine,
    ReadWords,
    SleepEngine,
    WakeEngine,
    Words,
)
from ckpt_engine.v1 import manager_pb2, weights_pb2

Problem = weights_pb2.Problem


class SleepingOrWaking(Operation):
    """Asks the engine to give memory up or to take it back. Ends with a SleepWakeDone in `answer`."""

    kind: ClassVar[str] = "sleep"

    def __init__(self, replica: AgentReplica, command: manager_pb2.SleepWake) -> None:
        super().__init__(replica, command.fence)
        self.answer: manager_pb2.SleepWakeDone | None = None
        self._command = command
        self._steps: list[SleepStep] = []
        self._after = self._undone = replica.sleeping
        self._problem: Problem | None = None
        self._end = 0.0

    def start(self, now: float) -> None:
        """Reads the workers' words: what they hold now decides what waking means."""
        self._end = now + self._command.deadline_seconds
        self.run("look", ReadWords())

    def done(self, step: str, done: Done, now: float) -> None:
        """Takes the step after the one that ended."""
        replica = self.replica
        if step == "undo":
            if done.problem is None:
                replica.sleeping = self._undone
            self._answer(self._problem)
        elif done.problem is not None:
            self._failed(step, done)
        else:
            match step:
                case "look":
                    replica.take_words(cast(Words, done.result))
                    self._plan(now)
                    return
                case "discarded":
                    replica.take_words(cast(Words, done.result))
                    if not self._discarded():
                        return
                case "DISCARD":
                    self.run("discarded", ReadWords())
                    return
                case "ABORT":
                    replica.paused = True
                case "mark":
                    replica.sleeping = self._after
                    self._answer(None)
                    return
            self._next(now)

    def engine_exited(self, reason: str, now: float) -> None:
        """Answers that there is no engine to put to sleep or to wake."""
        self._answer(self.replica.problem(Problem.CODE_UNAVAILABLE, f"the engine ended: {reason}"))

    def _plan(self, now: float) -> None:
        command, replica = self._command, self.replica
        if replica.engine is None:
            self._answer(replica.problem(Problem.CODE_UNAVAILABLE, f"no engine: {replica.engine_reason}"))
            return
        try:
            if command.wake:
                steps, self._after = wake_steps(replica.sleeping, command.tags, replica.words.open)
            else:
                levels = replica.engine.sleep_levels
                whole = replica.words.open
                steps, self._after = sleep_steps(replica.mode, replica.sleeping, command.level, levels, whole)
        except CkptEngineError as error:
            self._answer(replica.problem(error.problem.code, error.problem.message))
            return
        self._steps = list(steps)
        self._next(now)

    def _next(self, now: float) -> None:
        if not self._steps:
            if self._after == self.replica.sleeping:
                self._answer(None)
            else:
                self.run("mark", self.replica.mark(self._after))
            return
        step = self._steps.pop(0)
        task = self._task(step, max(0.001, self._end - now))
        if step is SleepStep.CLOSE:
            self.replica.sleeping = self._after  # also if the mark should fail: careful is closed
        elif step in (SleepStep.ABORT, SleepStep.SLEEP):
            self.replica.paused = None  # to some engines sleeping is a pause
        if step in (SleepStep.DISCARD, SleepStep.SLEEP):
            self.replica.ready.clear()  # workers let go of what they have open
            self.replica.stage_memory.clear()  # and give back their own memory
        self.run(step.name, task)

    def _task(self, step: SleepStep, seconds: float) -> AgentTask:
        match step:
            case SleepStep.CLOSE:
                return self.replica.mark(self._after)
            case SleepStep.DISCARD:
                return DiscardEngine(seconds)
            case SleepStep.ABORT:
                return PauseEngine(manager_pb2.PAUSE_MODE_ABORT, seconds)
            case SleepStep.SLEEP:
                return SleepEngine(self._after.level, seconds)
            case SleepStep.WAKE_WEIGHTS:
                return WakeEngine((WEIGHTS,), seconds)
            case _:
                assert step is SleepStep.WAKE_KV_CACHE, step
                return WakeEngine((KV_CACHE,), seconds)

    def _discarded(self) -> bool:
        """Whether no worker calls its weights clean any more. If one does, begins to go back."""
        clean_ranks = [status.rank for status in self.replica.words.workers if status.state == CLEAN]
        if clean_ranks:
            self._problem = self.replica.problem(
                Problem.CODE_INTERNAL,
                f"workers {clean_ranks} still call their weights clean: nothing was discarded, and the replica stays "
                "awake",
            )
            self._undo()
        return not clean_ranks

    def _failed(self, step: str, done: Done) -> None:
        """Goes back if the engine has refused the step. A step without an answer may have been done."""
        self._problem = done.problem
        unknown = step in ("SLEEP", "WAKE_WEIGHTS", "WAKE_KV_CACHE") and not done.answered
        if unknown or self._command.wake or step in ("look", "mark"):
            self._answer(done.problem)
        else:
            self._undo()

    def _undo(self) -> None:
        self.run("undo", self.replica.mark(self._undone))

    def _answer(self, problem: Problem | None) -> None:
        self.answer = manager_pb2.SleepWakeDone(fence=self._command.fence, problem=problem)
        self.replica.end()
