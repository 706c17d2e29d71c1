"""A ledger of updates of long ago, for those who draw them."""

from __future__ import annotations

from pathlib import Path

from ckpt_engine.core.version import Version
from ckpt_engine.manager.ledger import Ledger
from ckpt_engine.v1 import manager_pb2, weights_pb2


async def write_past_updates(path: Path) -> None:
    """What a manager has left: version 1 of two runs, version 2 of one, and a version 3 in which it ended."""
    ledger = await Ledger.open(path)
    updates = [("run-a", 1), ("run-b", 1), ("run-a", 2), ("run-a", 3)]
    for epoch, (lineage, version) in enumerate(updates, start=1):
        identity = weights_pb2.Identity(lineage=lineage, version=version, root=bytes([epoch]) * 32)
        await ledger.record_intent(epoch, Version.of(identity), selection=["one"])
        if version < 3:
            fence = weights_pb2.Fence(cluster=ledger.cluster, epoch=epoch)
            report = manager_pb2.UpdateReport(fence=fence, identity=identity, ok=True, seconds=2.0)
            report.replicas.add(replica="one", outcome=manager_pb2.OUTCOME_NEW_SERVING, sync_seconds=1.0)
            await ledger.record_outcome(report)
    await ledger.close()
