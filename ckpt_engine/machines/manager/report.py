"""What an update says at its end: outcomes for replicas that gave none, and the report of all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ckpt_engine.core.stages import in_order
from ckpt_engine.machines.events import Published
from ckpt_engine.machines.manager.members import Replica
from ckpt_engine.machines.manager.order import Order
from ckpt_engine.v1 import manager_pb2, weights_pb2

COPIED_TOLD = 16
"""Reasons for copies that a report tells at most."""

COPIED_NAMED = 16
"""Tensors that it names for each."""


def already_there(name: str, fence: weights_pb2.Fence, identity: weights_pb2.Identity) -> manager_pb2.ReplicaOutcome:
    """Of a replica that serves these very weights already: it was left alone."""
    return manager_pb2.ReplicaOutcome(
        replica=name, fence=fence, outcome=manager_pb2.NEW_SERVING, before=identity, after=identity
    )


def left_out(
    name: str, replica: Replica | None, fence: weights_pb2.Fence, problem: weights_pb2.Problem, told: bool
) -> manager_pb2.ReplicaOutcome:
    """Of a replica that gave no outcome.

    told: it was told to install. Then nobody knows what became of it, and it counts as closed. Otherwise it is as it
    was: unknown if it or its engine is not there, else it still serves the old version if that is what it said last.
    """
    named = weights_pb2.Problem()
    named.CopyFrom(problem)
    named.replica = name
    outcome = manager_pb2.ReplicaOutcome(replica=name, fence=fence, outcome=manager_pb2.QUARANTINED, problem=named)
    identity = None if replica is None or told else replica.identity()
    if identity is not None:
        outcome.before.CopyFrom(identity)
    if not told and (replica is None or replica.peer is None or replica.engine is None):
        outcome.outcome = manager_pb2.NOT_REACHED
    elif replica is not None and replica.serving and identity is not None:
        outcome.outcome = manager_pb2.OLD_SERVING
        outcome.after.CopyFrom(identity)
    return outcome


def build_report(
    fence: weights_pb2.Fence,
    identity: weights_pb2.Identity,
    order: Order,
    outcomes: Mapping[str, manager_pb2.ReplicaOutcome],
    seconds: float,
    planning: float,
    relays: Sequence[manager_pb2.RelayReport] = (),
    prefetch: str = "",
    held: bool = False,
) -> manager_pb2.UpdateReport:
    """The report of an update. It is ok with so many replicas as the order asks for, or with all. planning: seconds
    until the first install command. prefetch: why relays were filled or not. held: it is told before installs have
    ended: then it is neither ok nor not, and says nothing of replicas without an outcome."""
    ordered = [outcomes[name] for name in sorted(outcomes)]
    new = [outcome for outcome in ordered if outcome.outcome == manager_pb2.NEW_SERVING]
    ok = not held and len(new) >= (len(ordered) if order.min_replicas is None else order.min_replicas)
    slowest: dict[manager_pb2.Stage, float] = {}
    for outcome in ordered:
        for stage in outcome.stages:
            slowest[stage.stage] = max(slowest.get(stage.stage, 0.0), stage.seconds)
    slowest[manager_pb2.PLAN] = planning + slowest.get(manager_pb2.PLAN, 0.0)
    return manager_pb2.UpdateReport(
        fence=fence,
        identity=identity,
        ok=ok,
        replicas=ordered,
        seconds=seconds,
        stages=in_order(slowest),
        bytes=sum(outcome.bytes for outcome in ordered),
        tensors=order.published.tensors,
        source_copies=max((source.source_copies for source in order.published.sources), default=0),
        verified=ok and all(is_verified(worker) for outcome in new for worker in outcome.workers),
        warnings=_warnings(identity, order.before),
        copied=_copied(order.published),
        relays=relays,
        prefetch=prefetch,
        held=held,
    )


def _copied(published: Published) -> list[weights_pb2.CopiedTensors]:
    """What ranks copied to seal it, one entry a reason: a report must not grow with the number of ranks."""
    merged: dict[str, weights_pb2.CopiedTensors] = {}
    for source in published.sources:
        for entry in source.copied:
            known = merged.get(entry.reason)
            if known is None:
                merged[entry.reason] = known = weights_pb2.CopiedTensors(
                    reason=entry.reason, names=entry.names[:COPIED_NAMED], rank=source.rank
                )
            known.tensors += entry.tensors
            known.bytes += entry.bytes
            known.ranks += 1
    return sorted(merged.values(), key=lambda entry: (-entry.bytes, entry.reason))[:COPIED_TOLD]


def _warnings(identity: weights_pb2.Identity, before: weights_pb2.Identity | None) -> list[str]:
    """Versions without a difference: a step of the optimizer that changed nothing, or that went elsewhere."""
    if before is None or before.root != identity.root or before.version >= identity.version:
        return []
    return [
        f"version {identity.version} has the same weights as version {before.version}: if the model was trained "
        "in between, what the optimizer writes is not what was published"
    ]


def is_verified(worker: manager_pb2.WorkerReport) -> bool:
    """Whether each tensor of which the worker needs a part was read back, or hashed as handed to the loader."""
    return not worker.HasField("problem") and worker.verified + worker.verified_as_loaded >= worker.tensors
