"""The manager's machine: who is there, and one update at a time."""

from __future__ import annotations

from collections.abc import Sequence

from ckpt_engine.core.deadlines import Deadlines
from ckpt_engine.core.machines.events import ManagerCommand, ManagerEvent
from ckpt_engine.v1 import manager_pb2, weights_pb2


class ManagerMachine:
    """Decides everything that the manager does.

    cluster, epoch: from the ledger. intents: the latest identity of each lineage, oldest first (Ledger.last_intents).
    """

    def __init__(
        self,
        cluster: str,
        epoch: int,
        intents: Sequence[weights_pb2.Identity] = (),
        deadlines: Deadlines | None = None,
        software_version: str = "",
    ) -> None:
        raise NotImplementedError

    def handle(self, event: ManagerEvent, now: float) -> list[ManagerCommand]:
        """Takes one event and says what is to be done."""
        raise NotImplementedError

    def status(self) -> manager_pb2.GetStatusResponse:
        """What GetStatus answers."""
        raise NotImplementedError

    def blobs_in_use(self) -> dict[str, list[manager_pb2.BlobRef]]:
        """Blobs that must stay, by what needs them; for BlobStore.pin after each event that changed something."""
        raise NotImplementedError
