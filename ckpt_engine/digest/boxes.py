"""Digests of boxes, wherever they lie: on a CPU by digest/host.py, on a GPU by digest/cuda.py. The formula is
that of digest/factors.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ckpt_engine.digest.factors import SEED
from ckpt_engine.digest.host import digest_host_boxes
from ckpt_engine.digest.prepared import digest_anywhere

__all__ = ["SEED", "digest_box", "digest_boxes"]


def digest_box(tensor_view: torch.Tensor, start: Sequence[int], seed: int = SEED) -> int:
    """The digest of one box. `tensor_view` holds its elements (any strides), `start` is its first global coordinate.

    Raises INVALID_ARGUMENT for an unsupported dtype or a start that does not fit the tensor.
    """
    return digest_boxes([(tensor_view, start)], seed)[0]


def digest_boxes(
    boxes: Sequence[tuple[torch.Tensor, Sequence[int]]],
    seed: int = SEED,
    served: Sequence[torch.dtype | None] | None = None,
) -> list[int]:
    """The digest of each box, in order; see `digest_box`. Meant for thousands of them.

    served: the dtype as which each box is digested; None: its own. digest/prepared.py explains it, and is for boxes
    that are digested repeatedly. Boxes on a GPU are digested there. On a CPU, uses as many threads as torch does in the
    calling one (`torch.get_num_threads()`), but not torch's, and holds the interpreter's lock for microseconds only. A
    process's first call compiles for a second or two, unless `digest_host.warm_up` has.
    """
    if served is None and all(view.device.type == "cpu" for view, _ in boxes):
        return digest_host_boxes(boxes, seed)
    return digest_anywhere(boxes, seed, served)
