"""Whether the workers of an engine, together, load every tensor of a manifest. Pure.

A worker alone cannot know: under pipeline or expert parallelism it rightly leaves tensors to others. It names those in
`WorkerNeeds.elsewhere`; a tensor that all workers leave would keep its old content. Runs in the manager when it plans,
before any replica is touched.
"""

from __future__ import annotations

from collections.abc import Sequence

from ckpt_engine.core.problems import invalid
from ckpt_engine.v1.weights_pb2 import Manifest, WorkerNeeds


def check_complete(manifest: Manifest, workers: Sequence[WorkerNeeds], replica: str) -> None:
    """Raises INVALID_ARGUMENT, naming the tensors, unless the workers of one replica together load every tensor.

    workers: all of `replica`, in any order.
    """
    unassigned = {index for needs in workers for index in needs.elsewhere}
    if not unassigned:
        return
    unassigned.difference_update(need.tensor for needs in workers for need in needs.needs)
    if unassigned:
        count = len(manifest.tensors)
        names = [manifest.tensors[index].name if index < count else f"number {index}" for index in sorted(unassigned)]
        more = f" and {len(names) - 16} more" if len(names) > 16 else ""
        raise invalid(
            f"each of the {len(workers)} workers of replica {replica!r} leaves {', '.join(names[:16])}{more} to "
            "another pipeline stage or expert rank, and none loads it; publish the names of this model's checkpoint",
            names,
            replica=replica,
        )
