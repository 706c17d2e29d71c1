"""The origin of memory while a loader runs on tensors without memory: a checkpoint tensor, a clone, or computed values.

All views of a tensor share its (empty) storage, so memory is identified by storage. Memory of the model, and memory
that the loader made without checkpoint tensors, has no origin here.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ckpt_engine.core.dtypes import UnsupportedDtypeError
from ckpt_engine.core.problems import CkptEngineError, invalid
from ckpt_engine.record.views import Digit, View, through
from ckpt_engine.torch_dtypes import torch_dtype
from ckpt_engine.torch_storages import storage_key
from ckpt_engine.v1 import weights_pb2


class NotRecordable(CkptEngineError):  # noqa: N818
    """The loader uses a tensor in a way that cannot be followed. INVALID_ARGUMENT, naming tensor and operation."""

    def __init__(self, message: str, tensor: str = "") -> None:
        code = weights_pb2.Problem.CODE_INVALID_ARGUMENT
        super().__init__(weights_pb2.Problem(code=code, message=message, tensors=[tensor] if tensor else []))


@dataclass(frozen=True, slots=True)
class _Clone:
    """A clone's memory: ``digits`` of the clone walk ``strides`` from ``offset`` in the storage ``parent``."""

    parent: int
    digits: tuple[Digit, ...]
    strides: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class ComputedOrigin:
    """Values that a loader computed."""

    tensors: frozenset[int]  # indices of the checkpoint tensors that they depend on
    owners: frozenset[str]  # tensors of the model that they were partly read from
    why: str


class Origins:
    """The checkpoint tensors that a loader is given, and the memory that it makes from them."""

    def __init__(self, manifest: weights_pb2.Manifest, only: Collection[int]) -> None:
        """only: indices of the tensors that are given. Raises INVALID_ARGUMENT for an impossible shape or dtype."""
        self._specs = manifest.tensors
        self.tensors = {index: _meta(self._specs[index]) for index in only}
        self._by_storage: dict[int, int | _Clone | ComputedOrigin] = {
            storage_key(t): i for i, t in self.tensors.items()
        }
        self._alive: list[torch.Tensor] = []  # a storage's key may be used again once it is freed

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return storage_key(tensor) in self._by_storage

    def of(self, tensor: torch.Tensor) -> int | ComputedOrigin | None:
        """Where the elements come from: a checkpoint tensor (its index), a computation, or None if neither is known."""
        origin = self._by_storage.get(storage_key(tensor))
        while isinstance(origin, _Clone):
            origin = self._by_storage[origin.parent]
        return origin

    def name(self, tensor: torch.Tensor) -> str:
        """The name of a checkpoint tensor that the values depend on; empty if there is none."""
        origin = self.of(tensor)
        if isinstance(origin, ComputedOrigin):
            return self._specs[min(origin.tensors)].name if origin.tensors else ""
        return "" if origin is None else self._specs[origin].name

    def why_not_plain(self, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> str | None:
        """Why strides do not say which elements ``tensor`` (cast to ``dtype``) shows; None: they do."""
        origin = self.of(tensor)
        if not isinstance(origin, int):
            return "computed"
        have = torch_dtype(self._specs[origin].dtype)
        if tensor.dtype != have:
            return f"reads {spell(have)} as {spell(tensor.dtype)}"
        if dtype is not None and dtype != have:
            return f"casts {spell(have)} to {spell(dtype)}"
        return "takes the conjugate or negative" if tensor.is_conj() or tensor.is_neg() else None

    def clone(self, tensor: torch.Tensor, kwargs: Mapping[str, Any]) -> torch.Tensor:
        """Clones a tensor and keeps track of its elements."""
        clone: torch.Tensor = torch.ops.aten.clone.default(tensor, memory_format=kwargs.get("memory_format"))
        digits = tuple(Digit(size, weight) for size, weight in zip(clone.shape, clone.stride(), strict=True))
        self._by_storage[storage_key(clone)] = _Clone(
            storage_key(tensor), digits, tuple(tensor.stride()), int(tensor.storage_offset())
        )
        self._alive += (tensor, clone)
        return clone

    def compute(self, tensor: torch.Tensor, computed: ComputedOrigin) -> None:
        """Notes that the memory of ``tensor`` holds computed values from now on."""
        self._by_storage[storage_key(tensor)] = computed
        self._alive.append(tensor)

    def views(self, tensor: torch.Tensor, view: View) -> list[View]:
        """``view`` of the storage of ``tensor``, as views of the checkpoint tensor behind it."""
        return self._views(storage_key(tensor), view)

    def _views(self, key: int, view: View) -> list[View]:
        origin = self._by_storage[key]
        if not isinstance(origin, _Clone):
            return [view]
        parents = through(view, origin.digits, origin.strides, origin.offset)
        return [base for parent in parents for base in self._views(origin.parent, parent)]


def _meta(spec: weights_pb2.TensorSpec) -> torch.Tensor:
    try:
        return torch.empty(tuple(spec.shape), dtype=torch_dtype(spec.dtype), device="meta")
    except UnsupportedDtypeError as error:
        raise invalid(f"{spec.name}: {error.problem.message}", tensors=[spec.name]) from error
    except RuntimeError as error:
        raise invalid(f"{spec.name} of shape {list(spec.shape)}: {error}", tensors=[spec.name]) from error


class Watching(TorchDispatchMode):
    """Sees each operation of a loader while it is entered."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Whether torch must keep Dynamo from compiling this mode. Torch would import Dynamo for that, which takes more
        than a second; while nothing has imported Dynamo, there is no need."""
        return "torch._dynamo" in sys.modules


def memoryless(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of its shape, strides and dtype on the meta device."""
    if tensor.is_meta:
        return tensor
    return torch.empty_strided(tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype, device="meta")


def written_by(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors among an operation's arguments that it writes to."""
    found: list[torch.Tensor] = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            found += (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))
    return found


@cache
def is_composite(func: Any) -> bool:
    """Whether an operation is only a name for others."""
    return bool(func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd))


def spell(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
