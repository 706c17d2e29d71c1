"""What GetStatus answers: members as they were heard of last."""

from __future__ import annotations

from ckpt_engine.core.machines.manager_state import State
from ckpt_engine.core.machines.members import Replica
from ckpt_engine.v1 import manager_pb2


def status_of(state: State, phase: str, software_version: str) -> manager_pb2.GetStatusResponse:
    """All members by name, the last sealed version, and what goes on."""
    answer = manager_pb2.GetStatusResponse(
        fence=state.fence(),
        phase=phase,
        latest=None if state.latest is None else state.latest.identity,
        software_version=software_version,
    )
    for key in sorted(state.members.trainers):
        trainer = state.members.trainers[key]
        answer.trainers.add(
            lineage=trainer.lineage,
            rank=trainer.rank,
            world_size=trainer.world_size,
            connected=trainer.peer is not None,
            published=trainer.table is not None,
            description=trainer.host.name,
        )
    for name in sorted(state.members.replicas):
        answer.replicas.append(_replica(state.members.replicas[name]))
    return answer


def _replica(replica: Replica) -> manager_pb2.ReplicaStatus:
    return manager_pb2.ReplicaStatus(
        name=replica.name,
        engine=replica.engine,
        mode=replica.mode,
        connected=replica.peer is not None,
        serving=replica.serving,
        asleep=replica.asleep,
        closed_reason=replica.closed_reason,
        workers=replica.workers,
        identity=replica.identity(),
        last_outcome=replica.last_outcome,
        host=replica.host,
    )
