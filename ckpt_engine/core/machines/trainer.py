"""The trainer's machine: one rank's session with the manager."""

from __future__ import annotations

from ckpt_engine.core.deadlines import Deadlines
from ckpt_engine.core.machines.events import TrainerCommand, TrainerEvent
from ckpt_engine.v1 import weights_pb2


class TrainerMachine:
    """Decides everything that a trainer rank's session does. session_id: of this process."""

    def __init__(
        self,
        lineage: str,
        rank: int,
        world_size: int,
        session_id: str,
        host: weights_pb2.Host,
        deadlines: Deadlines | None = None,
    ) -> None:
        raise NotImplementedError

    def handle(self, event: TrainerEvent, now: float) -> list[TrainerCommand]:
        """Takes one event and says what is to be done."""
        raise NotImplementedError
