"""Follows every operation of an engine's loader while it runs on tensors that have no memory.

All views of a tensor share its (empty) storage, so memory is identified by storage. It is a checkpoint tensor's, a
clone's, the model's, or *computed*: made from values of checkpoint tensors by anything but moving them (arithmetic,
casts, `cat`, bits read as another dtype). Copies of the first two kinds to the model are noted as copies. For computed
values it notes which tensor of the model depends on which checkpoint tensors (`writers`) and why (`computed`).

A loader that asks for a value (`.item()`, `if weight.any()`) gets the stand-in `answer`, and all that it does from then
on is in doubt (`decided`). Nothing is written to the model. What cannot be followed raises NotRecordable.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from ckpt_engine.core.boxes import Box, intersect, remainder
from ckpt_engine.core.dtypes import widens
from ckpt_engine.core.parts import by_part
from ckpt_engine.core.problems import CkptEngineError, deadline
from ckpt_engine.record.coverage import Owner, Owners
from ckpt_engine.record.origins import (
    ComputedOrigin,
    NotRecordable,
    Origins,
    Watching,
    is_composite,
    memoryless,
    spell,
    written_by,
)
from ckpt_engine.record.recording import Copy, NeedBox
from ckpt_engine.record.views import Undecodable, blocks, copy_of, row_major
from ckpt_engine.torch_storages import storage_key
from ckpt_engine.v1 import weights_pb2

_aten = torch.ops.aten
_CLONES = {_aten.clone.default, _aten._to_copy.default}
_FILLS = {_aten.fill_.Scalar, _aten.fill_.Tensor, _aten.zero_.default}
_VIEWS_IN_PLACE = {
    _aten.squeeze_.default,
    _aten.squeeze_.dim,
    _aten.squeeze_.dims,
    _aten.unsqueeze_.default,
    _aten.t_.default,
    _aten.transpose_.default,
}
_ONLY_SHAPES = {_aten.empty_like.default, _aten.new_empty.default, _aten.is_pinned.default}
_VALUES = {_aten._local_scalar_dense.default, _aten.equal.default}


class Recorder(Watching):
    """One run of a loader."""

    def __init__(
        self,
        manifest: weights_pb2.Manifest,
        owners: Owners,
        stop_at: float,
        answer: bool = False,
        only: Collection[int] | None = None,
    ) -> None:
        """only: indices of the tensors that are handed out; default, all."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.manifest = manifest
        self._specs = manifest.tensors
        self._owners = owners
        self._stop_at = stop_at
        self._answer = answer
        self._only = by_part(manifest, range(len(self._specs)) if only is None else only)
        self._index = {spec.name: index for index, spec in enumerate(manifest.tensors)}
        self._origins = Origins(manifest, self._only)
        self._need_numbers: dict[tuple[int, Box], int] = {}
        self._known_copies: set[Copy] = set()
        self._last = -1
        self._exhausted = False
        self._doubt: frozenset[int] = frozenset()
        self.used: set[int] = set()  # indices of checkpoint tensors
        self.needs: list[NeedBox] = []  # of the copies
        self.copies: list[Copy] = []  # that move elements unchanged
        self.casts: list[tuple[str, str, str, str]] = []  # copies that narrow: model's tensor, name, dtype, model's
        self.writers: dict[str, set[int]] = {}  # by model's tensor: the checkpoint tensors that it depends on
        self.computed: dict[str, str] = {}  # by model's tensor: why its values are computed
        self.decided = ""  # why what is written is in doubt: the loader asked for a value
        self.problem: CkptEngineError | None = None  # our first error, also if the loader has swallowed it

    def hand_out(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the checkpoint tensors to the loader."""
        for count, index in enumerate(self._only):
            if time.monotonic() > self._stop_at:
                self.problem = deadline(f"the loader had only taken {count} of {len(self._only)} tensors in time")
                raise self.problem
            self._last = index
            yield self._specs[index].name, self._origins.tensors[index]
        self._exhausted = True

    def suspect(self, text: str) -> str:
        """The tensor that an exception of the loader is probably about; empty if none can be named."""
        words = [word.strip("'\"`,.:;()[]") for word in text.split()]
        found = next((word for word in words if word in self._index), None)
        return self._current_name() if found is None else found

    def shape_of(self, name: str) -> str:
        return str(list(self._specs[self._index[name]].shape))

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        try:
            return self._dispatch(func, args, kwargs)
        except CkptEngineError as problem:
            self.problem = self.problem or problem  # loaders may swallow exceptions
            raise

    def _dispatch(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if func is _aten.copy_.default and storage_key(args[0]) in self._owners:
            self._copy(args[0], args[1])
            return args[0]
        if func in _FILLS and storage_key(args[0]) in self._owners:
            self._fill(args[0], args[1] if len(args) > 1 else 0)
            return args[0]
        if is_composite(func):  # in inference mode composites arrive whole, else as their parts
            with self:
                return func.decompose(*args, **kwargs)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        ours = [tensor for tensor in tensors if tensor in self._origins]
        if not ours and all(storage_key(tensor) not in self._owners for tensor in tensors):
            return func(*args, **kwargs)
        written = written_by(func, args, kwargs)
        if written and not (func in _VIEWS_IN_PLACE and written[0] in ours):
            return self._write(func, tensors, written, args, kwargs)
        if func.is_view or func in _VIEWS_IN_PLACE or func in _ONLY_SHAPES:
            return func(*args, **kwargs)
        if func in _CLONES and ours and self._origins.why_not_plain(args[0], kwargs.get("dtype")) is None:
            return self._origins.clone(args[0], kwargs)
        dependencies = self._dependencies(tensors, str(func))
        if not ours and not dependencies.tensors:  # values that the model holds by itself
            return func(*args, **kwargs)
        if func in _VALUES:
            return self._decide(func, args[0], dependencies)
        result = self._without_values(func, args, kwargs, ours)
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf not in self._origins:
                self._origins.compute(leaf, dependencies)
        return result

    # -- what values are made of

    def _dependencies(self, tensors: Sequence[torch.Tensor], why: str) -> ComputedOrigin:
        """The origin of a result of an operation on ``tensors``."""
        found: set[int] = set()
        owners: set[str] = set()
        for tensor in tensors:
            origin = self._origins.of(tensor)
            if isinstance(origin, ComputedOrigin):
                found |= origin.tensors
                owners |= origin.owners
                why = origin.why
            elif origin is not None:
                found.add(origin)
            else:
                owners |= {owner.name for owner in self._owners.sharing(tensor)}
        for name in owners:
            found |= self.writers.get(name, set())
        return ComputedOrigin(frozenset(found), frozenset(owners), why)

    def _without_values(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], ours: Sequence[torch.Tensor]
    ) -> Any:
        """Runs the operation on memory-less tensors, for shapes and dtypes of its results and for its errors."""
        plain_args, named_args = tree_map_only(torch.Tensor, memoryless, (args, dict(kwargs)))
        if named_args.get("device") is not None:
            named_args["device"] = torch.device("meta")
        try:
            return func(*plain_args, **named_args)
        except (RuntimeError, NotImplementedError) as error:
            if isinstance(error, NotImplementedError) or "meta" in str(error).lower():
                name = self._origins.name(ours[0]) if ours else self._current_name()
                text = f"what the loader does with {name} depends on its values in a way that cannot be followed"
                raise NotRecordable(f"{text} ({func!s})", name) from error
            raise

    def _decide(self, func: Any, tensor: torch.Tensor, dependencies: ComputedOrigin) -> bool | int | float:
        """Returns the stand-in for a value. From here on all writes may depend on it."""
        names = ", ".join(self._specs[index].name for index in sorted(dependencies.tensors)[:4])
        self.decided = self.decided or f"the loader decides on values of {names}"
        self._doubt |= dependencies.tensors
        self.used |= dependencies.tensors
        if func is _aten.equal.default:
            return not self._answer  # loaders refuse tensors that differ, and what any() finds
        if tensor.dtype is torch.bool:
            return self._answer
        return float(self._answer) if tensor.dtype.is_floating_point else int(self._answer)

    # -- what is written

    def _write(
        self,
        func: Any,
        tensors: Sequence[torch.Tensor],
        written: Sequence[torch.Tensor],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Follows an operation in place, or with `out=`, on the model or on the loader's own memory."""
        ours = [tensor for tensor in tensors if tensor in self._origins]
        dependencies = self._dependencies(tensors, str(func))
        for tensor in written:
            if storage_key(tensor) in self._owners:
                if torch.Tag.pointwise not in func.tags or not dependencies.tensors:
                    raise self._unknown_values(tensor, func, ours)
                owner, boxes = self._find(tensor, "")
                known_boxes = [box for box, _ in (*owner.loaded, *owner.filled)]
                if remainder(boxes, known_boxes):
                    text = f"the loader computes with what the model's tensor {owner.name} held before"
                    raise NotRecordable(f"{text} ({func!s})", self._origins.name(ours[0]) if ours else "")
                self._mark(owner, dependencies)
        self._without_values(func, args, kwargs, ours)
        for tensor in written:
            if storage_key(tensor) not in self._owners:
                self._origins.compute(tensor, dependencies)
        count = len(func._schema.returns)
        return written[0] if count == 1 else tuple(written[:count]) or None

    def _unknown_values(self, destination: torch.Tensor, func: Any, ours: Sequence[torch.Tensor] = ()) -> NotRecordable:
        return NotRecordable(
            f"the loader computes what it writes to a parameter of shape {list(destination.shape)} "
            f"({func!s}), and not from tensors that it was given",
            self._origins.name(ours[0]) if ours else self._current_name(),
        )

    def _mark(self, owner: Owner, dependencies: ComputedOrigin) -> None:
        self.computed.setdefault(owner.name, dependencies.why)
        self.writers.setdefault(owner.name, set()).update(dependencies.tensors)
        self.used |= dependencies.tensors

    def _copy_computed(self, destination: torch.Tensor, source: torch.Tensor, why: str) -> None:
        dependencies = self._dependencies([source], why)
        if self._doubt:
            dependencies = ComputedOrigin(dependencies.tensors | self._doubt, dependencies.owners, self.decided)
        if not dependencies.tensors:
            raise self._unknown_values(destination, _aten.copy_.default)
        source.expand(destination.shape)
        name = self._specs[min(dependencies.tensors)].name
        owner, places = self._find(destination, name)
        self._mark(owner, dependencies)
        if owner.name not in dependencies.owners:  # computing a tensor from itself completes nothing
            owner.loaded += ((place, name) for place in places)

    def _fill(self, destination: torch.Tensor, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            if value in self._origins:
                return self._copy_computed(destination, value, "fill_")
            value = value.item()
        if destination.numel() == 0:
            return None
        owner, boxes = self._find(destination, "")
        for box in boxes:
            overwritten_name = next((name for loaded, name in owner.loaded if intersect(box, loaded) is not None), None)
            if overwritten_name is not None:
                self.computed.setdefault(owner.name, f"overwrites {overwritten_name} with {value}")
            owner.filled.append((box, value))
        if self._doubt:
            self._mark(owner, ComputedOrigin(self._doubt, frozenset(), self.decided))
        return None

    def _copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        origin = self._origins.of(source)
        if origin is None and storage_key(source) not in self._owners:
            if source.numel() == 1 and source.device.type != "meta" and not source.is_complex():
                return self._fill(destination, source.item())
            return self._copy_computed(destination, source, "")
        if destination.numel() == 0:
            self.used |= self._dependencies([source], "").tensors
            return None
        why = "reads what it has loaded before" if origin is None else self._origins.why_not_plain(source)
        if not isinstance(origin, int) or why is not None:
            return self._copy_computed(destination, source, why or "")
        name = self._specs[origin].name
        expanded = source.expand(destination.shape)
        owner, places = self._find(destination, name)
        offset = int(destination.storage_offset()) - owner.offset
        view = copy_of(expanded.shape, expanded.stride(), int(expanded.storage_offset()), destination.stride(), offset)
        try:
            found = [
                block
                for each in self._origins.views(source, view)
                for block in blocks(each, row_major(self._specs[origin].shape))
            ]
        except Undecodable as error:
            return self._copy_computed(destination, source, f"takes a view that is {error}")
        have, want = spell(source.dtype), spell(destination.dtype)
        if have != want and not widens(have, want):
            self.casts.append((owner.name, name, have, want))
        self.used.add(origin)
        self.writers.setdefault(owner.name, set()).add(origin)
        owner.loaded += ((place, name) for place in places)
        for block in found:
            need = self._need(origin, Box(block.start, block.stop))
            self._add(Copy(need, owner.name, block.partner_offset, block.partner_stride))
        return None

    def _find(self, destination: torch.Tensor, name: str) -> tuple[Owner, list[Box]]:
        about = f"{name} to" if name else ""
        try:
            found = self._owners.find(destination)
        except Undecodable as error:
            raise NotRecordable(f"the loader writes {about} a view that cannot be replayed: {error}", name) from error
        if found is None:
            raise NotRecordable(
                f"the loader writes {about} memory of shape {list(destination.shape)} and "
                f"{spell(destination.dtype)} that is part of no single tensor of the model",
                name,
            )
        return found

    # -- small things

    def _current_name(self) -> str:
        """The tensor that the loader was given last; empty after the last one."""
        return self._specs[self._last].name if self._last >= 0 and not self._exhausted else ""

    def _need(self, tensor: int, box: Box) -> int:
        number = self._need_numbers.setdefault((tensor, box), len(self.needs))
        if number == len(self.needs):
            self.needs.append(NeedBox(tensor, box))
        return number

    def _add(self, copy: Copy) -> None:
        if copy not in self._known_copies:
            self._known_copies.add(copy)
            self.copies.append(copy)
