"""Numbers the workers' requests to an agent's machine, and waits for its answers. It does not decide the answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ckpt_engine.machines.events import WorkerAsked
from ckpt_engine.v1 import worker_pb2


class Questions:
    """The open requests. On the agent's loop. seconds: for each answer; None: no limit until `close`."""

    def __init__(self, feed: Callable[[WorkerAsked], None], seconds: float | None = None) -> None:
        self._feed = feed
        self._seconds = seconds
        self._count = 0
        self._open: dict[int, asyncio.Future[worker_pb2.AgentReply | None]] = {}

    async def ask(self, request: worker_pb2.WorkerRequest) -> worker_pb2.AgentReply | None:
        """Feeds a request and waits for the machine's answer; None: none came in time, or before `close`."""
        self._count += 1
        number = self._count
        answer = self._open[number] = asyncio.get_running_loop().create_future()
        try:
            self._feed(WorkerAsked(number, request))
            return await asyncio.wait_for(answer, self._seconds)
        except TimeoutError:
            return None
        finally:
            del self._open[number]

    def answer(self, number: int, reply: worker_pb2.AgentReply | None) -> None:
        """Delivers the machine's answer, if a worker still waits for it."""
        answer = self._open.get(number)
        if answer is not None and not answer.done():
            answer.set_result(reply)

    def close(self) -> None:
        """Ends all waits, without an answer."""
        for number in self._open:
            self.answer(number, None)
