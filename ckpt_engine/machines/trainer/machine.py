"""The trainer's machine: one rank's session with the manager, and its part in collectives.

Decides when to connect, publish and seal, as every member that offers weights does (`offering`), and when to take part
in a collective. UpdateWeights itself is a call of its own, made by the shell.
"""

from __future__ import annotations

from typing import cast

from ckpt_engine.core.deadlines import Deadlines, bounded
from ckpt_engine.core.manifest import DIGEST_FORMAT
from ckpt_engine.core.version import Fence
from ckpt_engine.machines.events import Done, PartTaken, Run, RunPart, TrainerEvent
from ckpt_engine.machines.offering import HelloState, MemberKind, OfferingMachine
from ckpt_engine.v1 import manager_pb2, weights_pb2


class TrainerMachine(OfferingMachine):
    """One rank. It offers one table, of weights that have no identity yet.

    It takes part in a collective once per install fence, and in none of a lower fence; a repeated command is answered
    as before. What has begun goes on without the manager. session_id: of this process; survives reconnects.
    """

    def __init__(
        self,
        lineage: str,
        rank: int,
        world_size: int,
        session_id: str,
        host: weights_pb2.Host,
        deadlines: Deadlines | None = None,
    ) -> None:
        def hello(state: HelloState) -> manager_pb2.TrainerHello:
            return manager_pb2.TrainerHello(
                cluster=state.cluster,
                lineage=lineage,
                rank=rank,
                world_size=world_size,
                session_id=session_id,
                host=host,
                table=state.held[0].table if state.held else None,
                epoch=state.epoch,
                digest_format=DIGEST_FORMAT,
                sealed=state.sealed,
            )

        def changed(state: HelloState) -> manager_pb2.Publish:
            return manager_pb2.Publish(table=state.held[0].table if state.held else None)

        super().__init__(MemberKind("TrainerSession", manager_pb2.TrainerMessage, hello, changed), deadlines)
        self._part = Fence()
        self._took: manager_pb2.TookPart | None = None

    def _take(self, event: TrainerEvent, now: float) -> None:
        match event:
            case Done(("part", int() as epoch), result, problem):
                if epoch == self._part.epoch:
                    self._part_over(result, problem)
            case _:
                super()._take(event, now)

    def _message(self, body: object, now: float) -> None:
        if isinstance(body, manager_pb2.TakePart):
            self._take_part(body)
        else:
            super()._message(body, now)

    def _take_part(self, body: manager_pb2.TakePart) -> None:
        fence = Fence.of(body.fence)
        if fence == self._part:
            if self._took is not None:
                self._session.send(self._took)
            return
        stale = fence.cluster == self._part.cluster and fence.epoch < self._part.epoch
        if stale or fence.cluster != self._session.cluster:
            return
        self._part, self._took = fence, None
        task = RunPart(fence.epoch, body.sealed.epoch, body.collective, body.member, bounded(body.deadline_seconds))
        self._out.append(Run(("part", fence.epoch), task))

    def _part_over(self, result: object, problem: weights_pb2.Problem | None) -> None:
        part = PartTaken(problem) if problem is not None else cast(PartTaken, result)
        self._took = manager_pb2.TookPart(fence=self._part.message(), problem=part.problem, blamed=part.blamed)
        self._session.send(self._took)
