"""A source of named tensors that the caller holds: a state dict, or what a training framework yields."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial

import torch

from ckpt_engine.core.problems import invalid
from ckpt_engine.source.held import HeldBox, held, is_sharded
from ckpt_engine.source.memory import MemorySource
from ckpt_engine.source.names import strip_wrappers
from ckpt_engine.source.ways import PublishWish
from ckpt_engine.v1.weights_pb2 import Host


def named_source(
    tensors: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]],
    *,
    host: Host,
    rank: int = 0,
    wish: PublishWish | None = None,
) -> MemorySource:
    """Opens named tensors. A mapping, or anything that can be iterated over again, is read before each seal: a replaced
    tensor is copied, or refused by name, as a module's is. An iterator is read once, and its tensors are held until the
    source is closed.

    Raises INVALID_ARGUMENT for elements that are no (name, tensor) pairs, and as MemorySource does.
    """
    pairs = tensors.items() if isinstance(tensors, Mapping) else tensors
    if isinstance(pairs, Iterator):
        pairs = list(pairs)
    return MemorySource(
        partial(_find, pairs),
        host=host,
        rank=rank,
        wish=wish,
        kind="named tensors",
        may_be_empty=any(is_sharded(tensor) for _, tensor in map(checked_pair, pairs)),
    )


def _find(pairs: Iterable[tuple[str, torch.Tensor]]) -> list[HeldBox]:
    tensors = [checked_pair(item) for item in pairs]
    names = strip_wrappers([name for name, _ in tensors])
    return held(zip(names, (tensor for _, tensor in tensors), strict=True))


def _remedy(value: object) -> str:
    """What to do about a value that is not a tensor."""
    if isinstance(value, Mapping):
        return "publish what it holds by itself, as a model's part of a checkpoint"
    return "wrap it with torch.from_numpy" if hasattr(value, "__array_interface__") else "leave it out"


def checked_pair(item: object) -> tuple[str, torch.Tensor]:
    """Returns `item` if it is a (name, tensor) pair; else raises INVALID_ARGUMENT."""
    if not (isinstance(item, tuple) and len(item) == 2):
        hint = ": a module, or its named_parameters(), says their names" if isinstance(item, torch.Tensor) else ""
        raise invalid(f"expected (name, tensor) pairs, found an item of type {type(item).__name__}{hint}")
    name, tensor = item
    if isinstance(name, str) and not isinstance(tensor, torch.Tensor):
        raise invalid(f"{name!r} is of type {type(tensor).__name__}, not a tensor: {_remedy(tensor)}", tensors=[name])
    if not isinstance(name, str):
        raise invalid(f"expected (name, tensor) pairs, found ({type(name).__name__}, {type(tensor).__name__})")
    return name, tensor
