"""Says which bytes of a worker's model a scrub can compare with what was sealed, and why not the others.

It decides from a recording, on the engine's thread, before any pause; it hashes nothing (scrub.py does).
"""

from __future__ import annotations

from collections.abc import Collection
from math import prod

from torch import Tensor

from ckpt_engine.core.parts import part_of
from ckpt_engine.engine.target import LoadTarget
from ckpt_engine.record.recording import Recording
from ckpt_engine.v1 import manager_pb2

STAGED = "that the engine keeps in another form than its loader writes (repacked or quantised)"
BY_LOADER = "that the engine's own loader computes"
DERIVED = "that are derived from other weights"
CONSTANT = "that no update brings"
FILLED = "that the loader fills without weights"
KEPT = "of a draft model that the version has no weights for"


def unscrubbed(recording: Recording, target: LoadTarget) -> list[manager_pb2.Unscrubbed]:
    """The bytes of a model that a scrub does not compare, by reason; a tensor that shares memory counts once."""
    staged = frozenset(target.staged())
    computed = {name for handover in recording.handovers for name in handover.owners}
    compared: dict[str, int] = {}
    for copy in recording.copies:
        if copy.tensor not in staged and copy.tensor in recording.layouts:
            size = recording.needs[copy.need].box.volume * recording.layouts[copy.tensor].dtype.itemsize
            compared[copy.tensor] = compared.get(copy.tensor, 0) + size
    found: dict[str, list[int]] = {}
    for name, layout in recording.layouts.items():
        if name in staged:
            found.setdefault(STAGED, []).append(prod(layout.shape) * layout.dtype.itemsize)
    for name, tensor in _distinct(target, staged, compared):
        rest = tensor.nbytes - min(compared.get(name, 0), tensor.nbytes)
        if rest:
            found.setdefault(_reason(name, target, computed, recording.unfilled_parts), []).append(rest)
    return [
        manager_pb2.Unscrubbed(reason=reason, bytes=sum(sizes), tensors=len(sizes)) for reason, sizes in found.items()
    ]


def _distinct(target: LoadTarget, staged: Collection[str], compared: Collection[str]) -> list[tuple[str, Tensor]]:
    """The resident tensors, those first that are compared; without others in the same memory."""
    resident = [(name, tensor) for name, tensor in target.named_tensors() if name not in staged]
    places: set[tuple[int, int]] = set()
    found = []
    for name, tensor in sorted(resident, key=lambda item: item[0] not in compared):
        place = tensor.data_ptr(), tensor.nbytes
        if tensor.nbytes and place not in places:
            places.add(place)
            found.append((name, tensor))
    return found


def _reason(name: str, target: LoadTarget, computed: Collection[str], unfilled_parts: Collection[str]) -> str:
    if part_of(name) in unfilled_parts:
        return KEPT
    if name in computed:
        return BY_LOADER
    if name in target.derived():
        return DERIVED
    return CONSTANT if name in target.constant() else FILLED
