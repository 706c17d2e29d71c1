"""The boxes of tensors that this process holds: whole tensors, or its shards."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ckpt_engine.core.manifest import check_name
from ckpt_engine.core.problems import invalid, precondition
from ckpt_engine.source.rehome import byte_range

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


@dataclass(frozen=True, slots=True)
class HeldBox:
    """A box of a global tensor, held by this process."""

    name: str  # of the global tensor
    tensor: torch.Tensor  # the live memory of the box, on any device, with any strides
    shape: tuple[int, ...]  # of the global tensor
    start: tuple[int, ...]  # of the box in it
    must_copy: str = ""  # why it is copied at each seal: it can neither be read in place (GPU) nor move (CPU)
    twins: tuple[torch.Tensor, ...] = ()  # other tensor objects of exactly this memory; they move with it


def is_sharded(tensor: torch.Tensor) -> TypeGuard[DTensor]:
    """Whether each rank holds only a part of it (DTensor).

    If DTensor was never imported, no tensor can be one. Importing it here would take as long as half of torch.
    """
    dtensor = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return dtensor is not None and isinstance(tensor, dtensor)


def held(pairs: Iterable[tuple[str, torch.Tensor]]) -> list[HeldBox]:
    """The box of each tensor that this process holds: the whole, or its shard of a DTensor; none for an empty shard.

    Raises INVALID_ARGUMENT for tensors with memory that cannot be offered (meta, sparse, quantised, other subclasses,
    placements other than Shard and Replicate), for names that occur twice and as `check_name`; FAILED_PRECONDITION for
    tensors with memory that was freed.
    """
    found: dict[str, HeldBox | None] = {}
    for name, tensor in pairs:
        check_name(name)
        if name in found:
            raise invalid(f"two tensors are called {name!r} once wrappers are stripped; rename one", tensors=[name])
        if is_sharded(tensor):
            found[name] = _shard(name, tensor)
        else:
            whole = _plain(name, tensor)
            found[name] = HeldBox(name, whole, tuple(whole.shape), (0,) * whole.dim(), _must_copy(whole))
    return [box for box in found.values() if box is not None]


def _plain(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if torch.nn.parameter.is_lazy(tensor):
        raise invalid(f"{name!r} has no shape yet: run the model once before publishing it", tensors=[name])
    if is_traceable_wrapper_subclass(tensor):
        raise invalid(
            f"{name!r} is a {type(tensor).__name__}, which has no plain memory of its own; publish the tensors inside",
            tensors=[name],
        )
    if tensor.device.type == "meta":
        raise invalid(f"{name!r} is on the meta device and has no values", tensors=[name])
    if tensor.layout != torch.strided or tensor.is_nested or tensor.is_quantized:
        raise invalid(f"{name!r} is nested, quantised or not strided ({tensor.layout}, {tensor.dtype})", tensors=[name])
    _check_memory(name, tensor)
    return tensor


def _check_memory(name: str, tensor: torch.Tensor) -> None:
    """Raises if a tensor has no memory of its own: stand-ins, and tensors that a wrapper offloaded or sharded."""
    try:
        storage = tensor.untyped_storage()
    except NotImplementedError as error:
        raise invalid(f"{name!r} has no memory of its own: {error}", tensors=[name]) from error
    if storage.device.type != tensor.device.type:
        raise invalid(f"{name!r} is a {type(tensor).__name__}, which has no memory of its own", tensors=[name])
    if tensor.numel() and byte_range(tensor)[1] > storage.nbytes():
        raise precondition(
            f"the memory of {name!r} is gone: {storage.nbytes()} bytes are left of {byte_range(tensor)[1]}; something "
            "offloaded or freed it, so bring it back first",
            tensors=[name],
        )


def plain_values(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy of it if its elements are conjugated or negated lazily."""
    with torch.no_grad():
        return tensor.detach().resolve_conj().resolve_neg()


def elements_of(tensor: torch.Tensor) -> tuple[object, ...]:
    """A value that is equal for two tensors if they are the same elements of the same memory, read in the same way.
    Raises RuntimeError or NotImplementedError for a tensor that is a stand-in for another."""
    return (
        tensor.data_ptr(),
        tensor.dtype,
        tuple(tensor.shape),
        tensor.stride(),
        tensor.is_conj(),
        tensor.is_neg(),
    )


def _must_copy(tensor: torch.Tensor) -> str:
    if tensor.is_inference() and tensor.device.type == "cpu":
        return "is an inference tensor"
    return "is conjugated or negated lazily" if tensor.is_conj() or tensor.is_neg() else ""


def _shard(name: str, tensor: DTensor) -> HeldBox | None:
    """This rank's box of a DTensor; None if it is empty, or if this rank is not in its mesh."""
    from torch.distributed.tensor import Replicate, Shard

    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return None
    start, extent = [0] * tensor.dim(), list(tensor.shape)
    for axis_of_mesh, placement in enumerate(tensor.placements):
        if type(placement) is Replicate:
            continue
        if type(placement) is not Shard:
            raise invalid(
                f"{name!r} is placed as {placement} on axis {axis_of_mesh} of its mesh; "
                "only Shard and Replicate can be published",
                tensors=[name],
            )
        axis, parts = placement.dim, tensor.device_mesh.size(axis_of_mesh)
        chunk = -(-extent[axis] // parts)
        first = min(chunk * coordinate[axis_of_mesh], extent[axis])
        start[axis] += first
        extent[axis] = min(chunk, extent[axis] - first)
    with torch.no_grad():
        local = _plain(name, tensor.to_local().detach())
    if list(local.shape) != extent:
        raise precondition(
            f"{name!r}: this rank should hold {extent} of {list(tensor.shape)} under {tensor.placements}, "
            f"but holds {list(local.shape)}",
            tensors=[name],
        )
    if local.numel() == 0 and tensor.numel() > 0:
        return None
    why = "is a shard that its DTensor owns" if local.device.type == "cpu" else _must_copy(local)
    return HeldBox(name, local, tuple(tensor.shape), tuple(start), why)
