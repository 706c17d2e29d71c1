"""Finds the checkpoint tensors that the engine's own loader must take at every install, since it computes on them.

It seeks the smallest sets: a computed tensor of the model, the checkpoint tensors that it depends on, all tensors that
these are loaded to, and so on until nothing is shared. All else stays plain copies. A loader that decides on values
cannot be split up: then everything goes through it.
"""

from __future__ import annotations

from collections.abc import Iterable

from ckpt_engine.core.boxes import Box
from ckpt_engine.core.parts import by_part
from ckpt_engine.record.coverage import Owners
from ckpt_engine.record.recorder import Recorder
from ckpt_engine.record.recording import Handover


def handovers(recorder: Recorder, owners: Owners) -> list[Handover]:
    """The computed tensors that `recorder` found, as disjoint sets."""
    if recorder.decided:
        return [everything(recorder, owners, recorder.decided)]
    loads: dict[int, set[str]] = {}
    for name, tensors in recorder.writers.items():
        for tensor in tensors:
            loads.setdefault(tensor, set()).add(name)
    found: list[Handover] = []
    covered_names: set[str] = set()
    for name in recorder.computed:
        if name not in covered_names:
            tensors, names = _closure(name, recorder.writers, loads)
            covered_names |= names
            found.append(_handover(recorder, owners, tensors, names))
    return found


def everything(recorder: Recorder, owners: Owners, why: str) -> Handover:
    """One handover of all that the loader takes, because of `why`."""
    names = owner_names(recorder, owners)
    boxes = {name: written_boxes(owners, name) for name in names}
    return Handover(
        tuple(by_part(recorder.manifest, recorder.used)),
        boxes,
        {name: recorder.computed.get(name, why) for name in names},
        True,
    )


def owner_names(recorder: Recorder, owners: Owners) -> list[str]:
    """The tensors of the model that the loader wrote."""
    filled = (owner.name for owner in owners.by_name.values() if owner.filled)
    return sorted({*recorder.writers, *filled})


def written_boxes(owners: Owners, name: str) -> tuple[Box, ...]:
    """The boxes of a tensor of the model that the loader wrote, loaded or filled."""
    owner = owners.by_name[name]
    return tuple(dict.fromkeys(box for box, _ in (*owner.loaded, *owner.filled)))


def _closure(name: str, writers: dict[str, set[int]], loads: dict[int, set[str]]) -> tuple[set[int], set[str]]:
    tensors: set[int] = set()
    names: set[str] = set()
    todo = [name]
    while todo:
        current = todo.pop()
        if current in names:
            continue
        names.add(current)
        for tensor in writers.get(current, set()) - tensors:
            tensors.add(tensor)
            todo += loads[tensor]
    return tensors, names


def _handover(recorder: Recorder, owners: Owners, tensors: Iterable[int], names: Iterable[str]) -> Handover:
    boxes = {name: written_boxes(owners, name) for name in sorted(names)}
    why = {name: recorder.computed.get(name, "loaded from a tensor that the loader computes on") for name in boxes}
    return Handover(tuple(by_part(recorder.manifest, tensors)), boxes, why, False)
