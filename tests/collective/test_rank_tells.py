"""A rank's part that cannot begin, or is out of time: the others are told why while the task has time left."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from ckpt_engine.core.deadlines import Deadlines
from ckpt_engine.core.problems import CkptEngineError, deadline
from ckpt_engine.machines.events import PartTaken, RunPart
from ckpt_engine.machines.trainer.machine import TrainerMachine
from ckpt_engine.trainer.background import Background
from ckpt_engine.trainer.call import CallInFlight
from ckpt_engine.v1 import manager_pb2, weights_pb2
from ckpt_engine.v1.weights_pb2 import Problem


class Session:
    """Not a real one, which needs a manager that answers with anything. What it was asked for is in `seconds`."""

    def __init__(self, answer: bytes | None) -> None:
        self.answer = answer
        self.seconds = 0.0

    async def fetch(self, refs: Any, seconds: float) -> list[bytes]:
        self.seconds = seconds
        if self.answer is None:
            raise deadline("the manager did not answer")
        return [b"plan", self.answer]


@pytest.mark.parametrize(
    ("manifest", "code"),
    [(None, Problem.CODE_DEADLINE_EXCEEDED), (b"no manifest", Problem.CODE_INTERNAL)],
    ids=["not fetched", "not read"],
)
def test_whatever_keeps_a_rank_from_its_part_is_told_to_the_others(manifest: bytes | None, code: int) -> None:
    background = Background("nowhere:1", cast(Any, None), cast(Any, None), Deadlines(), 0)
    session, told = Session(manifest), []
    background._session = cast(Any, session)
    background._manifest = manager_pb2.BlobRef()
    background._call = CallInFlight()
    background._call.sealed = 7

    def refuse(task: RunPart, error: CkptEngineError, meeting: object) -> PartTaken:
        told.append(error.problem.code)
        return PartTaken(error.problem, ("rank 1",))

    background._part.refuse = refuse  # type: ignore[method-assign, assignment]
    task = RunPart(8, 7, manager_pb2.Collective(), 1, 10.0)

    async def taken() -> object:
        unused, background._loop = background._loop, asyncio.get_running_loop()
        unused.close()
        return await background._take_part(task)

    found = asyncio.run(taken())
    assert isinstance(found, PartTaken)
    assert found.blamed == ("rank 1",)
    assert told == [code]
    assert session.seconds < task.seconds, "telling takes time, too"


def test_a_trainer_ends_its_thread_although_its_part_cannot_be_closed() -> None:
    """The error is not a real one: that of a library."""
    machine = TrainerMachine("lineage", 0, 1, "session", weights_pb2.Host())
    background = Background("127.0.0.1:1", machine, cast(Any, None), Deadlines(), 0)
    background.start()

    def fails() -> None:
        raise RuntimeError("NCCL failed")

    background._part.close = fails  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="NCCL failed"):
        background.stop("over")
    background._thread.join(60.0)
    assert not background._thread.is_alive()
