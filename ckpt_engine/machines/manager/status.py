"""Messages about members, as they were last heard of. Pure functions.

GetStatus answers with all of it. WatchReplicas tells gateways which replica serves which version where, and then what
has changed. Also the blobs that must stay for all members.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ckpt_engine.core.version import Fence, Version
from ckpt_engine.machines.events import OperatorHold
from ckpt_engine.machines.manager.holdings import Holdings, sealed_versions
from ckpt_engine.machines.manager.lineages import lineages
from ckpt_engine.machines.manager.members import Holder, Replica
from ckpt_engine.machines.manager.publications import Publications
from ckpt_engine.machines.manager.reconcile import Drift
from ckpt_engine.machines.manager.relay_facts import slow_relays
from ckpt_engine.machines.manager.state import ManagerState
from ckpt_engine.machines.manager.update import Update
from ckpt_engine.v1 import manager_pb2, weights_pb2

REPLICA_STATES = ("serving", "asleep", "closed", "disconnected")


def replica_state(replica: manager_pb2.ReplicaStatus) -> str:
    """One word for a replica: the first of disconnected, asleep, serving, closed that is true."""
    if not replica.connected:
        return "disconnected"
    if replica.asleep:
        return "asleep"
    return "serving" if replica.serving else "closed"


def status_of(
    state: ManagerState,
    phase: str,
    software_version: str,
    warnings: Sequence[str],
    holdings: Mapping[str, Sequence[manager_pb2.BlobRef]],
    drifts: Mapping[str, Drift] | None,
    deployments: Sequence[manager_pb2.Deployment],
) -> manager_pb2.GetStatusResponse:
    """The answer to GetStatus: all members by name, the last sealed version, the phase, the blobs that are stored for
    each, and warnings for operators. drifts: by replica, of those that have one; None: replicas are left out."""
    newest = state.versions.newest()
    answer = manager_pb2.GetStatusResponse(
        fence=state.fence(state.epoch).message(),
        phase=phase,
        latest=None if newest is None else newest.message(),
        software_version=software_version,
        warnings=warnings,
        deployments=deployments,
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
            gpus=_gpus_of(trainer.host),
        )
    answer.lineages.extend(lineage.message() for lineage in lineages(state).values())
    slow = slow_relays(state.members.holders.values())
    for source in sorted(state.members.holders):
        holder = state.members.holders[source]
        answer.holders.add(
            kind=holder.kind,
            name=holder.name,
            connected=holder.peer is not None,
            held=[held.identity.message() for held in holder.held],
            description=holder.host.name,
            filling=_without_keys(holder.filling),
            last_filled=holder.words.last_filled,
            progress=holder.words.progress,
            slow=slow.get(source, ""),
            shares=_shares(holder),
        )
    answer.sealed.extend(sealed_versions(state))
    for owner in sorted(holdings):
        if size := sum({ref.digest: ref.size for ref in holdings[owner]}.values()):
            answer.holdings.add(owner=owner, bytes=size)
    for name in sorted(state.members.replicas) if drifts is not None else ():
        replica, drift = state.members.replicas[name], None if drifts is None else drifts.get(name)
        content = state.versions.of(name) if replica.receives else None
        desired = None if content is None else content.identity
        answer.replicas.append(_replica(replica, desired, drift, state.holds.get(name)))
    return answer


def _shares(holder: Holder) -> list[manager_pb2.VersionShare]:
    """How much of each version a holder has; the one that is being brought is last, and once."""
    progress = holder.words.progress if holder.peer is not None else None
    coming = None if progress is None else Version.or_none(progress.identity)
    shares = [
        manager_pb2.VersionShare(identity=held.identity.message(), bytes=held.bytes, wanted_bytes=held.wanted_bytes)
        for held in holder.held
        if held.identity != coming
    ]
    if progress is not None and coming is not None:
        done, total = progress.bytes_done, progress.bytes_total
        shares.append(manager_pb2.VersionShare(identity=progress.identity, bytes=done, wanted_bytes=total, coming=True))
    return shares


def _replica(
    replica: Replica, desired: Version | None, drift: Drift | None, hold: OperatorHold | None
) -> manager_pb2.ReplicaStatus:
    message = manager_pb2.ReplicaStatus(
        name=replica.name,
        engine=replica.engine,
        mode=replica.mode,
        connected=replica.peer is not None,
        serving=replica.serving,
        asleep=replica.asleep,
        closed_reason=replica.closed_reason,
        label_problem=replica.label_problem,
        engine_check=replica.engine_check,
        stage_memory=replica.stage_memory,
        scrubs=replica.scrubs,
        guesses=replica.guesses,
        workers=replica.workers,
        identity=None if replica.identity is None else replica.identity.message(),
        last_outcome=replica.last_outcome,
        host=replica.host,
        unfit=replica.why_unfit(),
        pool=replica.pool,
        gpus=_gpus(replica),
        unopened=replica.shut.unopened(replica.boot_ids()),
        desired=None if desired is None else desired.message(),
    )
    if hold is not None:
        message.hold.CopyFrom(hold.message())
    if drift is not None:
        message.drift.CopyFrom(drift.message())
    if message.HasField("unfit"):
        message.unfit.kept.clear()
    return message


def _gpus(replica: Replica) -> list[manager_pb2.WorkerGpus]:
    """The GPUs of each present worker that has reported them."""
    prepared = [replica.prepared.get(worker.rank) for worker in replica.workers if worker.boot_id]
    boots = set(replica.boot_ids())
    current = [each for each in prepared if each is not None and each.boot_id in boots and each.host.gpus]
    return [manager_pb2.WorkerGpus(rank=each.rank, gpus=_gpus_of(each.host)) for each in current]


def _gpus_of(host: weights_pb2.Host) -> list[weights_pb2.Gpu]:
    """A host's GPUs, without the list of others that they reach."""
    return [weights_pb2.Gpu(uuid=gpu.uuid, name=gpu.name, pci=gpu.pci) for gpu in host.gpus]


def _without_keys(filling: manager_pb2.Filling | None) -> manager_pb2.Filling | None:
    """A copy without the keys that let their bearer read a relay."""
    if filling is None:
        return None
    copy = manager_pb2.Filling()
    copy.CopyFrom(filling)
    copy.ClearField("chunks")
    return copy


def blobs_in_use(
    state: ManagerState, publications: Publications, holdings: Holdings, updates: Sequence[Update]
) -> dict[str, list[manager_pb2.BlobRef]]:
    """Blobs that must stay, by what needs them."""
    used = holdings.blobs()
    for lineage, publication in publications.lineages.items():
        if publication.published is not None:
            used.setdefault(f"lineage {lineage!r}", []).append(publication.published.manifest)
    for trainer in state.members.trainers.values():
        if trainer.table is not None:
            used.setdefault(f"lineage {trainer.lineage!r}", []).append(trainer.table)
    for replica in state.members.replicas.values():
        used[f"replica {replica.name!r}"] = [prepared.needs for prepared in replica.prepared.values()]
    for content in state.versions.contents.values():
        refs = used.setdefault(f"lineage {content.identity.lineage!r}", [])
        refs += [ref for ref in (content.record, content.probe) if ref is not None]
        if content.published is not None:
            refs += [content.published.manifest, *(source.table for source in content.published.sources)]
    if updates:
        used["the update that runs"] = [ref for update in updates for ref in update.blobs()]
    return used


@dataclass(frozen=True)
class Watched:
    """All that WatchReplicas tells, at one moment."""

    fence: Fence
    replicas: Mapping[str, manager_pb2.WatchedReplica]
    latest: Mapping[str, Version]  # by lineage
    settling: bool  # the manager was restarted, and replicas that are not named may still dial in


def watched(state: ManagerState, updates: Sequence[Update], settled: bool) -> Watched:
    """The state for watchers, as members were last heard of. updates: those that run; at most one of them writes to a
    replica."""
    writing = {name: update for update in updates for name in update.under_way()[0]}
    replicas = {}
    for name in sorted(state.members.replicas):
        entry = _watched_replica(state.members.replicas[name])
        update = writing.get(name)
        if update is not None and entry.state != manager_pb2.REPLICA_STATE_AWAY:
            version = update.under_way()[1]
            entry.state, entry.pause_mode = manager_pb2.REPLICA_STATE_DRAINING, update.goal.pause_mode
            entry.reason = update.describe()
            if version is not None:
                entry.next.CopyFrom(version.message())
        replicas[name] = entry
    latest = {lineage: last.identity for lineage, last in sorted(state.versions.last.items())}
    return Watched(state.fence(state.installs), replicas, latest, not settled)


def snapshot(now: Watched) -> manager_pb2.WatchReplicasResponse:
    """The first message of a stream: the whole state."""
    return manager_pb2.WatchReplicasResponse(
        fence=now.fence.message(),
        snapshot=True,
        settling=now.settling,
        replicas=now.replicas.values(),
        latest=[each.message() for each in now.latest.values()],
    )


def changes(before: Watched, now: Watched) -> manager_pb2.WatchReplicasResponse | None:
    """What has changed; None: nothing that a watcher would act on, such as a new fence alone."""
    message = manager_pb2.WatchReplicasResponse(
        fence=now.fence.message(),
        settling=now.settling,
        replicas=[replica for name, replica in now.replicas.items() if before.replicas.get(name) != replica],
        gone=sorted(before.replicas.keys() - now.replicas.keys()),
        latest=[each.message() for each in now.latest.values()],
    )
    same = not message.replicas and not message.gone and before.settling == now.settling
    return None if same and before.latest == now.latest else message


def _watched_replica(replica: Replica) -> manager_pb2.WatchedReplica:
    entry = manager_pb2.WatchedReplica(name=replica.name, label_problem=replica.label_problem, pool=replica.pool)
    if replica.identity is not None:
        entry.identity.CopyFrom(replica.identity.message())
    if replica.engine is not None:
        entry.url, entry.engine, entry.engine_version = replica.engine.url, replica.engine.kind, replica.engine.version
    installed = _just_installed(replica)
    if replica.peer is None:
        entry.state, entry.reason = manager_pb2.REPLICA_STATE_AWAY, "its agent is not connected"
    elif installed is not None:
        entry.state = manager_pb2.REPLICA_STATE_SERVING
        entry.identity.CopyFrom(installed)
    elif replica.asleep:
        entry.state, entry.reason = manager_pb2.REPLICA_STATE_ASLEEP, replica.closed_reason
    elif replica.serving:
        entry.state = manager_pb2.REPLICA_STATE_SERVING
    else:
        entry.state, entry.reason = (
            manager_pb2.REPLICA_STATE_CLOSED,
            replica.closed_reason or "no heartbeat has told its state yet",
        )
    return entry


def _just_installed(replica: Replica) -> weights_pb2.Identity | None:
    """The version that a replica serves by an outcome that came after its last heartbeat; None: there is none."""
    outcome = replica.last_outcome
    if outcome is None or outcome.outcome != manager_pb2.OUTCOME_NEW_SERVING:
        return None
    beat_epoch = max((worker.epoch for worker in replica.workers), default=0)
    return outcome.after if outcome.fence.epoch > beat_epoch else None
