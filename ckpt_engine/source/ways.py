"""Which way each tensor of this process goes to readers: read where it lies, moved into shared memory, or copied."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ckpt_engine.core.dtypes import CASTABLE as CASTABLE_NAMES
from ckpt_engine.core.dtypes import UnsupportedDtypeError
from ckpt_engine.core.problems import invalid
from ckpt_engine.core.transports import GPU_MEMORY, HOST_MEMORY, lending
from ckpt_engine.source.held import Held
from ckpt_engine.source.rehome import why_not
from ckpt_engine.torch_dtypes import dtype_name
from ckpt_engine.v1.weights_pb2 import CopiedTensors

CASTABLE = frozenset(getattr(torch, name) for name in CASTABLE_NAMES)
"""What a served dtype applies to."""

ASKED = "is copied since snapshot=True asks for it"
NAMED_MOST = 16


@dataclass(frozen=True, slots=True)
class Wish:
    """What the caller asks for.

    snapshot: True: all are copied. False: none may need it. None: only those that need it.
    dtype: served dtype of floating-point tensors; None: their own.
    transport: the one that all are offered over; None: all that lend unasked, on the GPU where that works.
    """

    snapshot: bool | None = None
    dtype: torch.dtype | None = None
    transport: str | None = None


def served_dtype(box: Held, dtype: torch.dtype | None) -> torch.dtype:
    """The dtype that readers get it in. Raises INVALID_ARGUMENT if that is none that weights can have."""
    served = dtype if dtype is not None and box.tensor.dtype in CASTABLE else box.tensor.dtype
    try:
        dtype_name(served)
    except UnsupportedDtypeError as error:
        raise invalid(f"{box.name!r} cannot be published: {error}", tensors=[box.name]) from error
    return served


def may_share(box: Held, wish: Wish) -> bool:
    """Whether it is offered on its GPU, if that works."""
    return box.tensor.device.type == "cuda" and bool(lending(GPU_MEMORY, wish.transport))


def copy_reasons(boxes: Sequence[Held], served: Sequence[torch.dtype], wish: Wish, keep: str) -> list[str]:
    """Why each box is copied at each seal; empty if it is not.

    keep: why CPU memory is not to be moved although it could be, if the wish does not say; empty: it is to be. Raises
    INVALID_ARGUMENT for a wish that cannot be fulfilled.
    """
    must = [_must_copy(box, kept, wish) for box, kept in zip(boxes, served, strict=True)]
    if wish.snapshot is True:
        return [why or ASKED for why in must]
    on_cpu = [index for index, box in enumerate(boxes) if box.tensor.device.type == "cpu"]
    if wish.snapshot is None and keep:
        return [why or (keep if box.tensor.device.type == "cpu" else "") for why, box in zip(must, boxes, strict=True)]
    movable = [index for index in on_cpu if not boxes[index].must_copy]
    fixed = why_not([(boxes[index].tensor, *boxes[index].twins) for index in movable])
    for index, why in zip(movable, fixed, strict=True):
        must[index] = must[index] or why
    for box, why in zip(boxes, must, strict=True):
        if why and wish.snapshot is False:
            raise invalid(
                f"{box.name!r} {why}, so it must be copied at each seal: do not pass snapshot=False", [box.name]
            )
    return must


def tell_copied(
    rank: int, boxes: Sequence[Held], served: Sequence[torch.dtype], reasons: Sequence[str]
) -> list[CopiedTensors]:
    """What is copied at each seal, for the report: one entry a reason, most bytes first."""
    told: dict[str, CopiedTensors] = {}
    for box, kept, why in zip(boxes, served, reasons, strict=True):
        if why and box.tensor.numel():
            entry = told.setdefault(why, CopiedTensors(reason=why, rank=rank, ranks=1))
            entry.tensors += 1
            entry.bytes += box.tensor.numel() * kept.itemsize
            if len(entry.names) < NAMED_MOST:
                entry.names.append(box.name)
    return sorted(told.values(), key=lambda entry: (-entry.bytes, entry.reason))


def _must_copy(box: Held, served: torch.dtype, wish: Wish) -> str:
    """Why it cannot be offered where it is, whoever else uses its memory."""
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
