"""The report of a dry run: which replicas an update would be for, over which edges, and why the others are left out.

A dry run goes as far as the plans. It does not tell what is decided when the weights are sealed, such as whether relays
are filled.
"""

from __future__ import annotations

from ckpt_engine.core.version import Fence
from ckpt_engine.machines.events import Compiled
from ckpt_engine.machines.manager.goal import Goal
from ckpt_engine.machines.manager.recipients import Recipients
from ckpt_engine.machines.manager.report import counts
from ckpt_engine.v1 import manager_pb2, weights_pb2

UNDECIDED = "whether relays are filled is decided when the weights are sealed; edges are those without relays"


def forecast(
    fence: Fence,
    goal: Goal,
    recipients: Recipients,
    compiled: Compiled | None,
    seconds: float,
    refusal: weights_pb2.Problem | None,
) -> manager_pb2.UpdateReport:
    """The report of a dry run.

    fence: of its Prepare commands. compiled: the plans; None: the update would be refused before there are any.
    seconds: since the dry run began. refusal: why the update would be refused; None: it would not.
    """
    report = manager_pb2.UpdateReport(
        fence=fence.message(),
        identity=weights_pb2.Identity(lineage=goal.lineage, version=goal.version),
        ok=refusal is None,
        seconds=seconds,
        tensors=goal.published.tensors,
        dry_run=True,
        prefetch=UNDECIDED,
    )
    if refusal is not None:
        report.warnings.append(f"the update would be refused: {refusal.message}")
    outcomes = recipients.outcomes
    for name in recipients.prepared():
        outcomes[name] = _planned(name, fence, compiled, recipients.cut_off.get(name))
    for name in sorted(outcomes):
        outcomes[name].fence.CopyFrom(fence.message())
        report.replicas.append(outcomes[name])
        report.bytes += outcomes[name].bytes
    counted = filter(counts, report.replicas)
    if goal.min_replicas is None and any(each.outcome != manager_pb2.OUTCOME_PLANNED for each in counted):
        report.ok = False
    return report


def _planned(
    name: str, fence: Fence, compiled: Compiled | None, cut_off: weights_pb2.Problem | None
) -> manager_pb2.ReplicaOutcome:
    """The outcome of a replica that would be installed. cut_off: why it cannot read the sources, so that only relays
    near it can bring it the version; None: it can."""
    planned = manager_pb2.ReplicaOutcome(replica=name, outcome=manager_pb2.OUTCOME_PLANNED)
    if cut_off is not None:
        planned.problem.CopyFrom(cut_off)
        planned.problem.message = f"only relays near it can bring it: {cut_off.message}"
    elif compiled is not None:
        for key in sorted(key for key in compiled.plans if key[0] == name):
            planned.bytes += compiled.bytes[key]
            planned.edges.extend(compiled.edges.get(key, ()))
    return planned
