"""Learns what a worker needs by running the engine's own weight loader once, on tensors that have no memory.

The loader gets one torch meta tensor for every checkpoint tensor. Whatever views it takes of them share the tensor's
(empty) storage, so when a view ends in a ``copy_``, its offset, sizes and strides tell the box that it shows. The
copy itself is not done: the model is left as it was. Clones and copies to another device are followed, since loaders
do ``weight.t().contiguous()``. Fills of the model's tensors (padding) are noted.

Decides: what each copy means, and whether the loader accounts for every byte. Does not decide where bytes come from.
What computes on values (arithmetic, casts, ``.item()``, ``cat``) cannot be replayed and raises NotRecordable.

A tensor that is loaded twice to the same place is allowed: both needs are recorded, and as each is verified against
the same place after installing, the update succeeds only if both have equal content.

Runs on the engine's thread. Takes some ten microseconds a tensor operation; no weight is read or written.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ckpt_engine.core.boxes import Box, intersect
from ckpt_engine.core.dtypes import UnsupportedDtypeError, torch_dtype
from ckpt_engine.core.manifest import blob_digest, canonical
from ckpt_engine.core.problems import CkptEngineError, deadline, invalid
from ckpt_engine.install.coverage import Owners, Place, account, storage_key
from ckpt_engine.install.recording import Copy, NeedBox, Recording
from ckpt_engine.install.target import LoadTarget
from ckpt_engine.install.views import Digit, Undecodable, View, blocks, copy_of, row_major, through
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


class NotRecordable(CkptEngineError):  # noqa: N818
    """The loader does with a tensor what cannot be replayed. INVALID_ARGUMENT, naming the tensor and the operation."""

    def __init__(self, message: str, tensor: str = "") -> None:
        code = weights_pb2.Problem.INVALID_ARGUMENT
        super().__init__(weights_pb2.Problem(code=code, message=message, tensors=[tensor] if tensor else []))


def record(
    manifest: weights_pb2.Manifest, target: LoadTarget, stop_at: float = float("inf"), digest: bytes = b""
) -> Recording:
    """Runs the target's loader over ``manifest``.

    digest: of the manifest's blob; computed if it is not given.
    stop_at: time.monotonic() after which no further tensor is handed to the loader.

    Raises CkptEngineError: NotRecordable; INVALID_ARGUMENT for a tensor that the model does not take, a tensor of the
    model that is not accounted for, a dtype that differs, or an exception of the loader; DEADLINE_EXCEEDED.
    """
    with target.recording(), torch.no_grad():
        tensors = list(target.named_tensors())
        owners = Owners(tensors)
        recorder = _Recorder(manifest, owners, stop_at)
        inference = torch.is_inference_mode_enabled() or any(tensor.is_inference() for _, tensor in tensors)
        with torch.inference_mode(inference):  # tensors that were made in it can only be written to in it
            _run(recorder, target)
        _check_unchanged(owners, target)
        _check_used(recorder, target)
        names = [spec.name for spec in manifest.tensors]
        accounted, fills = account(owners, target.derived(), target.constant(), names)
    written = {copy.tensor for copy in recorder.copies} | {fill.tensor for fill in fills}
    needs = weights_pb2.WorkerNeeds(manifest_digest=digest or blob_digest(canonical(manifest)), accounted=accounted)
    for need in recorder.needs:
        needs.needs.add(tensor=need.tensor, start=need.box.start, stop=need.box.stop)
    needs_bytes = canonical(needs)
    return Recording(
        manifest=manifest,
        manifest_digest=needs.manifest_digest,
        needs=tuple(recorder.needs),
        copies=tuple(recorder.copies),
        fills=tuple(fills),
        accounted=tuple(accounted),
        layouts={name: owners.by_name[name].layout for name in sorted(written)},
        needs_bytes=needs_bytes,
        needs_digest=blob_digest(needs_bytes),
    )


def _run(recorder: _Recorder, target: LoadTarget) -> None:
    try:
        with recorder:
            target.load_weights(recorder.hand_out())
    except CkptEngineError:
        if recorder.problem is None:
            raise
    except Exception as error:
        # A bug of the loader and a tensor that it rightly refuses look alike; both are answered with its own words.
        recorder.problem = recorder.problem or _loader_failed(recorder, error)
    if recorder.problem is not None:  # also when the loader has swallowed it
        raise recorder.problem
    if recorder.casts:
        text = "; ".join(f"{name} is {have}, the model keeps it as {want}" for name, have, want in recorder.casts[:16])
        wanted = sorted({want for _, _, want in recorder.casts})
        raise invalid(
            f"published in other dtypes than the model's: {text}. Publish with dtype={' or '.join(wanted)}",
            tensors=[name for name, _, _ in recorder.casts[:16]],
        )


def _loader_failed(recorder: _Recorder, error: Exception) -> CkptEngineError:
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    name = recorder.suspect(text)
    about = f"loading {name} {recorder.shape_of(name)}" if name else "loading the weights"
    if "meta tensor" in text or "incompatible tensor type" in text or "meta device" in text:
        return NotRecordable(f"{about}: the loader uses values or replaces a parameter's memory ({text})", name)
    return invalid(f"{about}: the engine's loader says {text}", tensors=[name] if name else [])


def _check_unchanged(owners: Owners, target: LoadTarget) -> None:
    """A loader that assigns (``parameter.data = weight``) would have to be run at every update."""
    now = dict(target.named_tensors())
    for name, place in owners.places.items():
        if name not in now:
            raise NotRecordable(f"the loader removed the model's tensor {name}", name)
        if Place.of(now[name]) != place:
            raise NotRecordable(f"the loader replaced the model's tensor {name} instead of writing to it", name)
    added = sorted(now.keys() - owners.places.keys())
    if added:
        raise NotRecordable(f"the loader added the tensor {added[0]} to the model", added[0])


def _check_used(recorder: _Recorder, target: LoadTarget) -> None:
    unknown = [name for name in recorder.unused() if target.ignored(name) is None]
    if unknown:
        more = f" and {len(unknown) - 16} more" if len(unknown) > 16 else ""
        raise invalid(
            f"the model takes no tensor {', '.join(unknown[:16])}{more}; publish the names of this model's checkpoint",
            tensors=unknown[:16],
        )


def _meta(spec: weights_pb2.TensorSpec) -> torch.Tensor:
    try:
        return torch.empty(tuple(spec.shape), dtype=torch_dtype(spec.dtype), device="meta")
    except UnsupportedDtypeError as error:
        raise invalid(f"{spec.name}: {error.problem.message}", tensors=[spec.name]) from error
    except RuntimeError as error:
        raise invalid(f"{spec.name} of shape {list(spec.shape)}: {error}", tensors=[spec.name]) from error


@dataclass(frozen=True, slots=True)
class _Clone:
    """A clone's memory: ``digits`` of the clone walk ``strides`` from ``offset`` in the storage ``parent``."""

    parent: int
    digits: tuple[Digit, ...]
    strides: tuple[int, ...]
    offset: int


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operation of the loader. Tensors are told by their storage, which all views of them share."""

    def __init__(self, manifest: weights_pb2.Manifest, owners: Owners, stop_at: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._specs = manifest.tensors
        self._owners = owners
        self._stop_at = stop_at
        self._index = {spec.name: index for index, spec in enumerate(manifest.tensors)}
        self._bases = [_meta(spec) for spec in manifest.tensors]
        self._origin: dict[int, int | _Clone] = {storage_key(base): index for index, base in enumerate(self._bases)}
        self._alive: list[torch.Tensor] = []
        self._used: set[int] = set()
        self._known: dict[tuple[int, Box], int] = {}
        self._done: set[Copy] = set()
        self._last = -1
        self._exhausted = False
        self.needs: list[NeedBox] = []
        self.copies: list[Copy] = []
        self.casts: list[tuple[str, str, str]] = []
        self.problem: CkptEngineError | None = None

    def hand_out(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What the loader iterates over."""
        for index, (spec, base) in enumerate(zip(self._specs, self._bases, strict=True)):
            if time.monotonic() > self._stop_at:
                self.problem = deadline(f"the loader had only taken {index} of {len(self._specs)} tensors in time")
                raise self.problem
            self._last = index
            yield spec.name, base
        self._exhausted = True

    def suspect(self, text: str) -> str:
        """The tensor that an exception of the loader is about, as far as can be told; else an empty string."""
        named = [word.strip("'\"`,.:;()[]") for word in text.split()]
        found = next((word for word in named if word in self._index), None)
        if found is not None:
            return found
        return self._specs[self._last].name if self._last >= 0 and not self._exhausted else ""

    def shape_of(self, name: str) -> str:
        return str(list(self._specs[self._index[name]].shape))

    def unused(self) -> list[str]:
        return [spec.name for index, spec in enumerate(self._specs) if index not in self._used]

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
        if func is _aten.copy_.default and storage_key(args[1]) in self._origin:
            name = self._name(args[1])
            raise NotRecordable(f"the loader copies {name} to memory that is not part of the model", name)
        if _is_composite(func):  # in inference mode they arrive whole, else as what they are made of
            with self:
                return func.decompose(*args, **kwargs)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        ours = [tensor for tensor in tensors if storage_key(tensor) in self._origin]
        for tensor in self._written(func, args, kwargs):
            if storage_key(tensor) in self._owners:
                raise NotRecordable(
                    f"the loader computes what it writes to a parameter of shape {list(tensor.shape)} ({func})",
                    self._name(ours[0]) if ours else "",
                )
            if ours and (tensor is not ours[0] or func not in _VIEWS_IN_PLACE):
                raise self._computes(ours[0], func)
        if not ours:
            return func(*args, **kwargs)
        if func in _CLONES:
            return self._clone(args[0], func, kwargs)
        if len(ours) != len(tensors):
            raise self._computes(ours[0], func)
        try:
            result = func(*args, **kwargs)
        except (RuntimeError, NotImplementedError) as error:
            if "meta tensor" in str(error):
                raise self._computes(ours[0], func) from error
            raise
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and storage_key(leaf) not in self._origin and func not in _ONLY_SHAPES:
                raise self._computes(ours[0], func)
        return result

    def _computes(self, tensor: torch.Tensor, func: Any) -> NotRecordable:
        name = self._name(tensor)
        return NotRecordable(f"the loader computes on the values of {name} ({func}), which cannot be replayed", name)

    def _written(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
        for position, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[position] if position < len(args) else kwargs.get(argument.name)
                yield from (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))

    def _name(self, tensor: torch.Tensor) -> str:
        origin = self._origin[storage_key(tensor)]
        while isinstance(origin, _Clone):
            origin = self._origin[origin.parent]
        return self._specs[origin].name

    def _check_plain(self, tensor: torch.Tensor, doing: str) -> str:
        """Views that show other numbers than the elements themselves cannot be told by strides."""
        name = self._name(tensor)
        dtype = self._specs[self._index[name]].dtype
        if tensor.dtype != torch_dtype(dtype):
            raise NotRecordable(f"the loader reads {name}, which is {dtype}, as {_spell(tensor.dtype)}", name)
        if tensor.is_conj() or tensor.is_neg():
            raise NotRecordable(f"the loader {doing} the conjugate or negative of {name}", name)
        return name

    def _clone(self, tensor: torch.Tensor, func: Any, kwargs: Mapping[str, Any]) -> torch.Tensor:
        name = self._check_plain(tensor, "clones")
        dtype = kwargs.get("dtype")
        if dtype is not None and dtype != tensor.dtype:
            have, want = _spell(tensor.dtype), _spell(dtype)
            raise NotRecordable(f"the loader casts {name} from {have} to {want}; publish with dtype={want}", name)
        clone: torch.Tensor = _aten.clone.default(tensor, memory_format=kwargs.get("memory_format"))
        digits = tuple(Digit(size, weight) for size, weight in zip(clone.shape, clone.stride(), strict=True))
        self._origin[storage_key(clone)] = _Clone(
            storage_key(tensor), digits, tuple(tensor.stride()), int(tensor.storage_offset())
        )
        self._alive += (tensor, clone)  # a storage's key may be used again once it is freed
        return clone

    def _fill(self, destination: torch.Tensor, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            if storage_key(value) in self._origin:
                raise self._computes(value, _aten.fill_.Tensor)
            value = value.item()
        if destination.numel() == 0:
            return
        owner, boxes = self._find(destination, "")
        for box in boxes:
            for loaded, name in owner.loaded:
                if intersect(box, loaded) is not None:
                    raise NotRecordable(f"the loader overwrites {name} in {owner.name} with {value}", name)
            owner.filled.append((box, value))

    def _copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        if storage_key(source) not in self._origin:
            if source.numel() == 1 and source.device.type != "meta" and not source.is_complex():
                return self._fill(destination, source.item())
            raise NotRecordable(
                f"the loader computes what it writes to a parameter of shape {list(destination.shape)}",
                self._specs[self._last].name if self._last >= 0 and not self._exhausted else "",
            )
        name = self._check_plain(source, "copies")
        index = self._index[name]
        self._used.add(index)
        shown = source.expand(destination.shape)
        if destination.dtype != source.dtype:
            self.casts.append((name, _spell(source.dtype), _spell(destination.dtype)))
            return None
        if destination.numel() == 0:
            return None
        owner, places = self._find(destination, name)
        offset = int(destination.storage_offset()) - owner.offset
        view = copy_of(shown.shape, shown.stride(), int(shown.storage_offset()), destination.stride(), offset)
        owner.loaded += ((place, name) for place in places)
        try:
            for each in self._of_base(storage_key(source), view):
                for block in blocks(each, row_major(self._specs[index].shape)):
                    need = self._need(index, Box(block.start, block.stop))
                    self._add(Copy(need, owner.name, block.partner_offset, block.partner_stride))
        except Undecodable as error:
            raise NotRecordable(f"the loader's view of {name} cannot be replayed: {error}", name) from error
        return None

    def _find(self, destination: torch.Tensor, name: str) -> tuple[Any, list[Box]]:
        about = f"{name} to" if name else ""
        try:
            found = self._owners.find(destination)
        except Undecodable as error:
            raise NotRecordable(f"the loader writes {about} a view that cannot be replayed: {error}", name) from error
        if found is None:
            raise NotRecordable(
                f"the loader writes {about} memory of shape {list(destination.shape)} and "
                f"{_spell(destination.dtype)} that is part of no single tensor of the model",
                name,
            )
        return found

    def _of_base(self, key: int, view: View) -> list[View]:
        """``view`` of the storage ``key``, as views of the checkpoint tensor behind it."""
        origin = self._origin[key]
        if not isinstance(origin, _Clone):
            return [view]
        parents = through(view, origin.digits, origin.strides, origin.offset)
        return [base for parent in parents for base in self._of_base(origin.parent, parent)]

    def _need(self, tensor: int, box: Box) -> int:
        number = self._known.setdefault((tensor, box), len(self.needs))
        if number == len(self.needs):
            self.needs.append(NeedBox(tensor, box))
        return number

    def _add(self, copy: Copy) -> None:
        if copy not in self._done:
            self._done.add(copy)
            self.copies.append(copy)


@cache
def _is_composite(func: Any) -> bool:
    return bool(func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd))


def _spell(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
