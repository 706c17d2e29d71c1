"""Decides how readers get each tensor of this process: where it lies, moved into shared memory, or copied."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ckpt_engine.core.dtypes import CASTABLE as CASTABLE_NAMES
from ckpt_engine.core.dtypes import UnsupportedDtypeError
from ckpt_engine.core.kept import Kept, narrow_dtype
from ckpt_engine.core.problems import invalid
from ckpt_engine.core.transports import GPU_MEMORY, HOST_MEMORY, lending
from ckpt_engine.source.held import HeldBox
from ckpt_engine.source.rehome import why_not
from ckpt_engine.torch_dtypes import dtype_name, torch_dtype
from ckpt_engine.transport.shared_memory.memory import arena_at
from ckpt_engine.v1.weights_pb2 import CopiedTensors

CASTABLE = frozenset(getattr(torch, name) for name in CASTABLE_NAMES)
"""Dtypes of tensors that a served dtype applies to."""

ASKED = "is copied since snapshot=True asks for it"
STAYS = "lies on a CPU, and moves into shared memory only with move=True"
NAMED_MOST = 16


@dataclass(frozen=True, slots=True)
class PublishWish:
    """The options of a publication."""

    snapshot: bool | None = None  # True: copy all. False: refuse what needs a copy. None: copy only what needs it
    move: bool = False  # move CPU memory into shared memory where possible; not with snapshot=True
    dtype: torch.dtype | None = None  # served, of floating-point tensors; None: their own, or that of `kept_dtypes`
    transport: str | None = None  # None: all that lend unasked, on the GPU where that works
    kept_dtypes: Kept = field(default_factory=dict)  # narrower ones that models keep, see core/kept.py
    first_region: int = 0  # the lowest number of its regions: those of a version's other part are below


def served_dtype(name: str, dtype: torch.dtype, wish: PublishWish) -> torch.dtype:
    """The dtype in which a tensor of ``dtype`` is served. Raises INVALID_ARGUMENT if weights cannot have it."""
    try:
        if dtype not in CASTABLE:
            dtype_name(dtype)
            return dtype
        return wish.dtype or torch_dtype(narrow_dtype(name, dtype_name(dtype), wish.kept_dtypes))
    except UnsupportedDtypeError as error:
        raise invalid(f"{name!r} cannot be published: {error.problem.message}", tensors=[name]) from error


def may_share(box: HeldBox, wish: PublishWish) -> bool:
    """Whether a tensor may be offered on its GPU."""
    return box.tensor.device.type == "cuda" and bool(lending(GPU_MEMORY, wish.transport))


def copy_reasons(boxes: Sequence[HeldBox], served: Sequence[torch.dtype], wish: PublishWish) -> list[str]:
    """Why each box is copied at each seal; empty if it is not. What lies in an arena of this process is offered there.

    Raises INVALID_ARGUMENT for a wish that cannot be fulfilled.
    """
    reasons_of = [_must_copy(box, dtype, wish) for box, dtype in zip(boxes, served, strict=True)]
    if wish.snapshot is True:
        return [why or ASKED for why in reasons_of]
    moving = [index for index, box in enumerate(boxes) if not box.must_copy and _moves(box.tensor)]
    reasons = [STAYS] * len(moving)
    if wish.move:
        reasons = why_not([(boxes[index].tensor, *boxes[index].twins) for index in moving])
    for index, why in zip(moving, reasons, strict=True):
        reasons_of[index] = reasons_of[index] or why
    for box, why in zip(boxes, reasons_of, strict=True):
        if why and wish.snapshot is False:
            raise invalid(
                f"{box.name!r} {why}, so it must be copied at each seal: do not pass snapshot=False", [box.name]
            )
    return reasons_of


def tell_copied(
    rank: int, boxes: Sequence[HeldBox], served: Sequence[torch.dtype], reasons: Sequence[str]
) -> list[CopiedTensors]:
    """The copied tensors, for the report: one entry a reason, most bytes first."""
    entries: dict[str, CopiedTensors] = {}
    for box, dtype, why in zip(boxes, served, reasons, strict=True):
        if why and box.tensor.numel():
            entry = entries.setdefault(why, CopiedTensors(reason=why, rank=rank, ranks=1))
            entry.tensors += 1
            entry.bytes += box.tensor.numel() * dtype.itemsize
            if len(entry.names) < NAMED_MOST:
                entry.names.append(box.name)
    return sorted(entries.values(), key=lambda entry: (-entry.bytes, entry.reason))


def _moves(tensor: torch.Tensor) -> bool:
    """Whether offering it without a copy would move it."""
    return tensor.device.type == "cpu" and bool(tensor.numel()) and arena_at(tensor.data_ptr()) is None


def _must_copy(box: HeldBox, served: torch.dtype, wish: PublishWish) -> str:
    """Why a box cannot be offered where it is, apart from other users of its memory; empty if it can."""
    device = box.tensor.device
    if may_share(box, wish):
        return box.must_copy
    if not lending(HOST_MEMORY, wish.transport):
        raise invalid(f"{box.name!r} is on {device}: transport={wish.transport!r} is for GPU tensors", [box.name])
    if box.must_copy:
        return box.must_copy
    if device.type != "cpu":
        return f"is on {device}"
    return "" if served == box.tensor.dtype else f"is {box.tensor.dtype} and served as {served}"
