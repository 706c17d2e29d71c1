"""The trainer's machine: one rank's session with the manager.

Decides when to connect, publish and seal, as every member that offers weights does (`offering`). UpdateWeights itself
is a call of its own, made by the shell.
"""

from __future__ import annotations

from ckpt_engine.core.deadlines import Deadlines
from ckpt_engine.machines.offering import Kind, OfferingMachine, Told
from ckpt_engine.v1 import manager_pb2, weights_pb2


class TrainerMachine(OfferingMachine):
    """One rank. session_id: of this process; survives reconnects. It offers one table, of weights that have no identity
    yet."""

    def __init__(
        self,
        lineage: str,
        rank: int,
        world_size: int,
        session_id: str,
        host: weights_pb2.Host,
        deadlines: Deadlines | None = None,
    ) -> None:
        def hello(told: Told) -> manager_pb2.TrainerHello:
            return manager_pb2.TrainerHello(
                cluster=told.cluster,
                lineage=lineage,
                rank=rank,
                world_size=world_size,
                session_id=session_id,
                host=host,
                table=told.held[0].table if told.held else None,
                epoch=told.epoch,
            )

        def changed(told: Told) -> manager_pb2.Publish:
            return manager_pb2.Publish(table=told.held[0].table if told.held else None)

        super().__init__(Kind("TrainerSession", manager_pb2.TrainerMessage, hello, changed), deadlines)
