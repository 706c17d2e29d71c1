"""Whether the workers of an engine, together, load every tensor of a manifest, and get all their models. Pure.

A worker alone cannot know: under pipeline or expert parallelism it rightly leaves tensors to others. It names those in
`WorkerNeeds.elsewhere`; a tensor that all workers leave would keep its old content. One that its model was made without
(the tower of a vision model that serves text only) it names in `WorkerNeeds.absent`. An engine that keeps a tower on
its first pipeline stage only leaves it out of the others in the same way, so a worker cannot tell whether another one
has it; where all workers are without, none computes with it. A draft model that the version has no weights for
(`WorkerNeeds.unfilled_parts`) would keep its old content, too; a part that an engine has no model for it may leave.
Runs in the manager when it plans, before any replica is touched.
"""

from __future__ import annotations

from collections.abc import Sequence

from ckpt_engine.core.problems import invalid
from ckpt_engine.v1.weights_pb2 import Manifest, WorkerNeeds


def check_complete(manifest: Manifest, workers: Sequence[WorkerNeeds], replica: str) -> None:
    """Raises INVALID_ARGUMENT, naming the tensors, unless the workers of one replica together load every tensor but
    those that are absent in all of them.

    workers: all of `replica`, in any order.
    """
    untaken = {index for needs in workers for index in (*needs.elsewhere, *needs.absent)}
    untaken.difference_update(need.tensor for needs in workers for need in needs.needs)
    if not untaken:
        return
    absences = [frozenset(needs.absent) for needs in workers]
    if refused := sorted(untaken.difference(frozenset.intersection(*absences))):
        count = len(manifest.tensors)
        names = [manifest.tensors[index].name if index < count else f"number {index}" for index in refused]
        more = f" and {len(names) - 16} more" if len(names) > 16 else ""
        without = [number for number, absent in enumerate(absences) if absent.intersection(refused)]
        but = f" (workers {', '.join(map(str, without))} have models made without some of them)" if without else ""
        raise invalid(
            f"each of the {len(workers)} workers of replica {replica!r} leaves {', '.join(names[:16])}{more} to "
            f"another pipeline stage or expert rank, and none loads it{but}; publish the names of this model's "
            "checkpoint",
            names,
            replica=replica,
        )


def check_unfilled(workers: Sequence[WorkerNeeds], replica: str) -> None:
    """Raises INVALID_ARGUMENT, naming the part, if a model of this replica would keep its old weights, since the
    version has none for it.

    workers: all of `replica`, in any order.
    """
    parts = sorted({part for needs in workers for part in needs.unfilled_parts})
    if parts:
        part = parts[0]
        raise invalid(
            f"the server of replica {replica!r} has a {part} model, and the version has no weights for it, so that it "
            f'would guess by old ones: publish them too, publish(..., {part}=MODEL), or update with {part}="keep" '
            "to leave it as it is",
            replica=replica,
        )
