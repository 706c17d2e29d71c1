"""A source of named tensors that the caller holds: a state dict, or what a training framework yields."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial

import torch

from ckpt_engine.core.problems import invalid
from ckpt_engine.source.held import held, is_sharded
from ckpt_engine.source.memory import MemorySource
from ckpt_engine.source.names import strip_wrappers
from ckpt_engine.source.ways import Wish
from ckpt_engine.v1.weights_pb2 import Host


def named_source(
    tensors: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]],
    *,
    host: Host,
    rank: int = 0,
    wish: Wish | None = None,
) -> MemorySource:
    """Opens named tensors; an iterator is read once and its tensors are held until the source is closed.

    Those on a CPU are copied at each seal unless the wish is `snapshot=False`: their memory is the caller's, and moving
    it is for the caller to allow. Those on a GPU stay where they are, as in MemorySource.

    Raises INVALID_ARGUMENT for elements that are no (name, tensor) pairs, and as MemorySource does.
    """
    pairs = [checked_pair(item) for item in (tensors.items() if isinstance(tensors, Mapping) else tensors)]
    names = strip_wrappers([name for name, _ in pairs])
    kept = list(zip(names, (tensor for _, tensor in pairs), strict=True))
    return MemorySource(
        partial(held, kept),
        host=host,
        rank=rank,
        wish=wish,
        keep="is one of named tensors, whose memory is moved only with snapshot=False",
        kind="named tensors",
        may_be_empty=any(is_sharded(tensor) for _, tensor in kept),
    )


def checked_pair(item: object) -> tuple[str, torch.Tensor]:
    """`item`, if it is a (name, tensor) pair; else raises INVALID_ARGUMENT."""
    if not (isinstance(item, tuple) and len(item) == 2):
        raise invalid(f"expected (name, tensor) pairs, found an item of type {type(item).__name__}")
    name, tensor = item
    if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
        raise invalid(f"expected (name, tensor) pairs, found ({type(name).__name__}, {type(tensor).__name__})")
    return name, tensor
