"""Checks that a recording accounts for every byte of a model: loaded, filled, derived or constant.

Identifies the model's tensors by storage and position, so that tied weights count once and views of a tensor are
distinguished. Integers only, once a tensor's layout has been read.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from ckpt_engine.core.boxes import Box, intersect, remainder, whole
from ckpt_engine.core.parts import part_of
from ckpt_engine.core.problems import CkptEngineError, invalid
from ckpt_engine.core.strides import span
from ckpt_engine.record.recording import Fill, TensorLayout
from ckpt_engine.record.views import Digit, Undecodable, View, ViewBlock, blocks, view_of
from ckpt_engine.torch_storages import storage_key
from ckpt_engine.v1 import weights_pb2

_Row = weights_pb2.Accounted


class StorageSlice(NamedTuple):
    """Where a tensor lies."""

    key: int
    offset: int
    layout: TensorLayout

    @classmethod
    def of(cls, tensor: torch.Tensor) -> StorageSlice:
        key = storage_key(tensor)
        return cls(key, int(tensor.storage_offset()) if key > 0 else 0, TensorLayout.of(tensor))


@dataclass(slots=True)
class Owner:
    """A tensor of the model that no other one contains, and what the loader did to it, in boxes of its axes."""

    name: str
    layout: TensorLayout
    offset: int  # of its first element in its storage, elements
    digits: tuple[Digit, ...]
    end: int  # behind its last element, elements from the start of its storage
    loaded: list[tuple[Box, str]] = field(default_factory=list)  # with the checkpoint name
    filled: list[tuple[Box, bool | int | float]] = field(default_factory=list)
    aliases: list[str] = field(default_factory=list)  # names of tensors that lie within it

    def boxes(self, view: View) -> list[Box]:
        """The boxes of this tensor that a view of its storage shows. Raises Undecodable if it shows other elements."""
        found: list[ViewBlock] = blocks(view._replace(offset=view.offset - self.offset), self.digits)
        return [Box(block.start, block.stop) for block in found]

    @property
    def bytes(self) -> int:
        return whole(self.layout.shape).volume * self.layout.dtype.itemsize


class Owners:
    """The tensors of a model, found by storage and position."""

    def __init__(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Raises INVALID_ARGUMENT if a name occurs twice."""
        self.slices: dict[str, StorageSlice] = {}
        self.by_name: dict[str, Owner] = {}
        self._by_storage: dict[int, list[Owner]] = {}
        self._alive: list[torch.Tensor] = []  # a storage's key may be used again once it is freed
        groups: dict[int, list[str]] = {}
        for name, tensor in tensors:
            if name in self.slices:
                raise invalid(f"the model names two tensors {name!r}", tensors=[name])
            self.slices[name] = StorageSlice.of(tensor)
            self._alive.append(tensor.detach())
            groups.setdefault(self.slices[name].key, []).append(name)
        for key, names in groups.items():
            self._by_storage[key] = self._owners(names)

    def _owners(self, names: list[str]) -> list[Owner]:
        found: list[Owner] = []
        for name in sorted(names, key=lambda name: -whole(self.slices[name].layout.shape).volume):
            owner = _owner(name, self.slices[name])
            for other in found if owner.end > owner.offset else []:
                if other.layout.dtype == owner.layout.dtype and _shows(other, owner):
                    other.aliases.append(name)
                    break
            else:
                found.append(owner)
                self.by_name[name] = owner
        return sorted(found, key=lambda owner: owner.offset)

    def __contains__(self, key: int) -> bool:
        return key in self._by_storage

    def sharing(self, tensor: torch.Tensor) -> list[Owner]:
        """The tensors of the model that ``tensor`` may show elements of."""
        try:
            found = self.find(tensor)
        except Undecodable:
            found = None
        return self._by_storage.get(storage_key(tensor), []) if found is None else [found[0]]

    def find(self, tensor: torch.Tensor) -> tuple[Owner, list[Box]] | None:
        """The tensor of the model that ``tensor`` is a view of, and its boxes; None if there is none.

        Raises Undecodable if it is a view of one, but not of a few boxes.
        """
        owners = self._by_storage.get(storage_key(tensor), [])
        view = view_of(tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset()))
        end = view.offset + span(tensor.shape, tensor.stride())
        problem: Undecodable | None = None
        for owner in reversed(owners[: bisect_right(owners, view.offset, key=lambda owner: owner.offset)]):
            if owner.end >= end and owner.layout.dtype == tensor.dtype:
                try:
                    return owner, owner.boxes(view)
                except Undecodable as error:
                    problem = error
        if problem is not None:
            raise problem
        return None


def _owner(name: str, place: StorageSlice) -> Owner:
    shape, stride = place.layout.shape, place.layout.stride
    digits = tuple(map(Digit, shape, stride))
    return Owner(name, place.layout, place.offset, digits, place.offset + span(shape, stride))


def _shows(owner: Owner, other: Owner) -> bool:
    if other.offset < owner.offset or other.end > owner.end:
        return False
    try:
        return bool(owner.boxes(view_of(other.layout.shape, other.layout.stride, other.offset)))
    except Undecodable:
        return False


def account(
    owners: Owners,
    derived: Mapping[str, str],
    constant: Mapping[str, str],
    manifest_names: Iterable[str],
    unfilled: Collection[str] = (),
) -> tuple[list[weights_pb2.Accounted], list[Fill]]:
    """One row for every tensor of the model, and the fills of what no copy writes. unfilled: parts of
    which nothing is loaded.

    Raises INVALID_ARGUMENT naming each tensor with bytes that come from nowhere.
    """
    rows: list[weights_pb2.Accounted] = []
    fills: list[Fill] = []
    missing: list[tuple[Owner, list[Box]]] = []
    for owner in owners.by_name.values():
        names = [owner.name, *owner.aliases]
        everything = whole(owner.layout.shape)
        unloaded = remainder([everything], [box for box, _ in owner.loaded])
        missing_boxes = remainder(unloaded, [box for box, _ in owner.filled])
        reason: tuple[weights_pb2.Accounted.Kind, str] | None = None
        if part_of(owner.name) in unfilled:
            reason = _Row.KIND_KEPT, "the version has no such part"
        for declarations, kind in ((derived, _Row.KIND_DERIVED), (constant, _Row.KIND_CONSTANT)):
            reason = reason or next(((kind, declarations[name]) for name in names if name in declarations), None)
        if not missing_boxes:
            fills += _fills(owner, unloaded)
            rows.append(
                _Row(name=owner.name, kind=_Row.KIND_FILLED if unloaded else _Row.KIND_LOADED, bytes=owner.bytes)
            )
        elif reason is not None and not owner.loaded and not owner.filled:
            rows.append(_Row(name=owner.name, kind=reason[0], bytes=owner.bytes, note=reason[1]))
        else:
            missing.append((owner, missing_boxes))
            continue
        for name in owner.aliases:
            rows.append(_Row(name=name, kind=rows[-1].kind, bytes=0, note=f"shares memory with {owner.name}"))
    if missing:
        raise _incomplete(missing, owners, set(manifest_names))
    return rows, fills


def _fills(owner: Owner, unloaded: list[Box]) -> list[Fill]:
    """The fills of parts that nothing loads. Where fills overlap, the last one counts."""
    fills = []
    open_boxes = unloaded
    for box, value in reversed(owner.filled):
        for part in open_boxes:
            common = intersect(part, box)
            if common is not None and common.volume:
                fills.append(Fill(owner.name, common, value))
        open_boxes = remainder(open_boxes, [box])
    return fills


_DESCRIBED = 2
"""Tensors of which a message says what they lack; a model of another depth lacks hundreds."""


def _incomplete(missing: list[tuple[Owner, list[Box]]], owners: Owners, published: set[str]) -> CkptEngineError:
    siblings: dict[str, list[Owner]] = {}
    for owner in owners.by_name.values():
        siblings.setdefault(_pattern(owner.name), []).append(owner)
    sentences = []
    for owner, boxes in missing[:_DESCRIBED]:
        size = owner.layout.dtype.itemsize
        text = f"{owner.name}: {sum(box.volume for box in boxes) * size} of {owner.bytes} bytes come from nowhere"
        names = sorted({name for _, name in owner.loaded})
        if names:
            text += f" (the rest from {', '.join(names[:4])})"
        guesses = _guesses(owner, boxes, siblings[_pattern(owner.name)], published)
        if guesses:
            text += f"; is {' or '.join(guesses[:3])} missing?"
        sentences.append(text)
    hidden = [owner.name for owner, _ in missing[_DESCRIBED:]]
    more = f"; and so for {len(hidden)} more tensors, the last one {hidden[-1]}" if hidden else ""
    return invalid(
        "the published tensors do not fill this model: "
        + "; ".join(sentences)
        + more
        + ". Publish what is missing, or let the engine's adapter declare what needs no weights",
        tensors=[owner.name for owner, _ in missing[:16]],
    )


def _pattern(name: str) -> str:
    return re.sub(r"\d+", "#", name)


def _guesses(owner: Owner, missing: list[Box], siblings: list[Owner], published: set[str]) -> list[str]:
    """Checkpoint names that may fill the missing boxes: those that fill the same place in tensors of other layers."""
    numbers = re.findall(r"\d+", owner.name)
    found: list[str] = []
    for other in siblings:
        own = re.findall(r"\d+", other.name)
        for box, name in other.loaded:
            if all(intersect(box, part) is None for part in missing):
                continue
            guess = _renumbered(name, own, numbers)
            if guess not in published and guess not in found:
                found.append(guess)
    if not found and owner.name not in published and not owner.loaded:
        found.append(owner.name)
    return found


def _renumbered(name: str, old: list[str], new: list[str]) -> str:
    """``name`` with its first numbers, as far as they are ``old`` ones, replaced: layers.1.x to layers.0.x."""
    parts = re.split(r"(\d+)", name)
    for index, (old_number, new_number) in enumerate(zip(old, new, strict=True)):
        place = 2 * index + 1
        if place < len(parts) and parts[place] == old_number:
            parts[place] = new_number
    return "".join(parts)
