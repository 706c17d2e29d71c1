"""What WatchReplicas tells: who serves which version where, and what changed since it was told last. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ckpt_engine.core.version import Fence, Version
from ckpt_engine.machines.manager.members import Replica
from ckpt_engine.machines.manager.state import State
from ckpt_engine.machines.manager.update import Update
from ckpt_engine.v1 import manager_pb2, weights_pb2


@dataclass(frozen=True)
class Watched:
    """All that is told, at one moment. latest: by lineage. settling: replicas that are not named may still dial in."""

    fence: Fence
    replicas: Mapping[str, manager_pb2.WatchedReplica]
    latest: Mapping[str, Version]
    settling: bool


def watched(state: State, updates: Sequence[Update], settled: bool) -> Watched:
    """What watchers are told, as members were heard of last. updates: those that run; at most one of them writes to a
    replica."""
    writing = {name: update for update in updates for name in update.under_way()[0]}
    replicas = {}
    for name in sorted(state.members.replicas):
        seen = _replica(state.members.replicas[name])
        update = writing.get(name)
        if update is not None and seen.state != manager_pb2.AWAY:
            brings = update.under_way()[1]
            seen.state, seen.pause_mode = manager_pb2.DRAINING, update.goal.pause_mode
            seen.reason = update.describe()
            if brings is not None:
                seen.next.CopyFrom(brings.message())
        replicas[name] = seen
    latest = {lineage: last.identity for lineage, last in sorted(state.versions.latest.items())}
    return Watched(state.fence(state.installs), replicas, latest, not settled)


def snapshot(now: Watched) -> manager_pb2.WatchReplicasResponse:
    """All of it; the first message of a stream."""
    return manager_pb2.WatchReplicasResponse(
        fence=now.fence.message(),
        snapshot=True,
        settling=now.settling,
        replicas=now.replicas.values(),
        latest=[each.message() for each in now.latest.values()],
    )


def changes(before: Watched, now: Watched) -> manager_pb2.WatchReplicasResponse | None:
    """What became different; None: nothing that a watcher would act on. A fence alone is nothing."""
    message = manager_pb2.WatchReplicasResponse(
        fence=now.fence.message(),
        settling=now.settling,
        replicas=[replica for name, replica in now.replicas.items() if before.replicas.get(name) != replica],
        gone=sorted(before.replicas.keys() - now.replicas.keys()),
        latest=[each.message() for each in now.latest.values()],
    )
    same = not message.replicas and not message.gone and before.settling == now.settling
    return None if same and before.latest == now.latest else message


def _replica(replica: Replica) -> manager_pb2.WatchedReplica:
    seen = manager_pb2.WatchedReplica(name=replica.name, label_problem=replica.label_problem, pool=replica.pool)
    if replica.identity is not None:
        seen.identity.CopyFrom(replica.identity.message())
    if replica.engine is not None:
        seen.url, seen.engine, seen.engine_version = replica.engine.url, replica.engine.kind, replica.engine.version
    installed = _just_installed(replica)
    if replica.peer is None:
        seen.state, seen.reason = manager_pb2.AWAY, "its agent is not connected"
    elif installed is not None:
        seen.state = manager_pb2.SERVING
        seen.identity.CopyFrom(installed)
    elif replica.asleep:
        seen.state, seen.reason = manager_pb2.ASLEEP, replica.closed_reason
    elif replica.serving:
        seen.state = manager_pb2.SERVING
    else:
        seen.state, seen.reason = manager_pb2.CLOSED, replica.closed_reason or "no heartbeat has told its state yet"
    return seen


def _just_installed(replica: Replica) -> weights_pb2.Identity | None:
    """What it serves by an outcome that came after its last heartbeat."""
    outcome = replica.last_outcome
    if outcome is None or outcome.outcome != manager_pb2.NEW_SERVING:
        return None
    told = max((worker.epoch for worker in replica.workers), default=0)
    return outcome.after if outcome.fence.epoch > told else None
