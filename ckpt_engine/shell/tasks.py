"""Carries out a machine's task: one `Done`, at the latest when its seconds have passed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from ckpt_engine.core.problems import CkptEngineError, deadline, internal
from ckpt_engine.machines.events import Done, Key, Task
from ckpt_engine.trace import span
from ckpt_engine.v1 import weights_pb2

log = logging.getLogger(__name__)


class TaskFailedError(CkptEngineError):
    """A task has failed. answered: False if the request may still be carried out."""

    def __init__(self, problem: weights_pb2.Problem, answered: bool) -> None:
        super().__init__(problem)
        self.answered = answered


async def carry_out(role: str, key: Key, task: Task, work: Callable[[Task], Awaitable[object]]) -> Done:
    """Awaits `work(task)`, which is cancelled when `task.seconds` have passed. Never raises, except when cancelled.

    A CkptEngineError of `work` is the Done's problem; anything else is a defect of ours: logged, and INTERNAL.
    """
    kind = type(task).__name__
    name = words(task)
    limit = asyncio.timeout(task.seconds)
    try:
        async with limit:
            with span(f"{role}.does", kind):
                return Done(key, result=await work(task))
    except CkptEngineError as error:
        return Done(key, problem=error.problem, answered=not isinstance(error, TaskFailedError) or error.answered)
    except Exception as error:
        if limit.expired():
            timeout = deadline(f"{name} took longer than {task.seconds:.3g} s")
            return Done(key, problem=timeout.problem, answered=False)
        log.exception("a task failed in an unforeseen way who=%s task=%s", role, kind)
        text = f"{name} failed in the {role}: {type(error).__name__}: {error}; its log says where"
        return Done(key, problem=internal(text).problem, answered=False)


def words(task: Task) -> str:
    """The task in words: "install engine"."""
    name = type(task).__name__
    return "".join(f" {letter.lower()}" if letter.isupper() else letter for letter in name).strip()
