"""The agent's machine: one replica, its engine and its workers."""

from __future__ import annotations

from ckpt_engine.core.deadlines import Deadlines
from ckpt_engine.core.machines.events import AgentCommand, AgentEvent
from ckpt_engine.v1 import manager_pb2, weights_pb2


class AgentMachine:
    """Decides everything that a replica's agent does.

    name: of the replica. session_id: of this agent process. agent_epoch: from the engine's directory.
    transports: available on this host.
    """

    def __init__(
        self,
        name: str,
        session_id: str,
        agent_epoch: int,
        mode: manager_pb2.Mode,
        host: weights_pb2.Host,
        transports: tuple[str, ...],
        deadlines: Deadlines | None = None,
    ) -> None:
        raise NotImplementedError

    def handle(self, event: AgentEvent, now: float) -> list[AgentCommand]:
        """Takes one event and says what is to be done."""
        raise NotImplementedError
