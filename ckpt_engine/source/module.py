"""A source of an nn.Module: its parameters and persistent buffers, which is what a plain module's checkpoint holds.

What a `state_dict` of its own, a hook or `get_extra_state` would add or change is left out, with a warning
(`saving.py`). Each memory is offered once: of tied weights the first name is published, as Hugging Face saves them.
A model sharded by FSDP2 publishes this rank's shards: live on a GPU, copied at each seal on a CPU.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ckpt_engine.core.names import full_name
from ckpt_engine.core.problems import invalid
from ckpt_engine.source.found import Finder
from ckpt_engine.source.held import HeldBox, elements_of, held, is_sharded
from ckpt_engine.source.memory import MemorySource
from ckpt_engine.source.names import strip_wrappers
from ckpt_engine.source.saving import ignored
from ckpt_engine.source.ways import PublishWish
from ckpt_engine.v1.weights_pb2 import Host


def module_source(module: nn.Module, *, host: Host, rank: int = 0, wish: PublishWish | None = None) -> MemorySource:
    """Opens a module. Raises INVALID_ARGUMENT, naming the tensor, for what cannot be published, such as FSDP1
    (flattened) models."""
    sharded = any(is_sharded(tensor) for _, tensor in _tensors(module))
    return MemorySource(
        Finder(module, _find),
        host=host,
        rank=rank,
        wish=wish,
        kind="FSDP2 module" if sharded else "nn.Module",
        may_be_empty=sharded,
        warnings=ignored(module),
    )


def _find(module: nn.Module) -> list[HeldBox]:
    _refuse_fragments(module)
    _reshard(module)
    first: dict[tuple[object, ...], str] = {}
    twins: dict[str, list[torch.Tensor]] = defaultdict(list)
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in _tensors(module):
        if name.rpartition(".")[2].startswith("_flat_param"):
            raise invalid(
                f"{name!r} is flattened by FSDP1, which does not keep tensors apart; shard with fully_shard (FSDP2)",
                tensors=[name],
            )
        first_name = first.setdefault(_memory(tensor), name)
        if first_name == name:
            tensors[name] = tensor
        else:
            twins[first_name].append(tensor)
    names = dict(zip(strip_wrappers(list(tensors)), tensors, strict=True))
    if len(names) < len(tensors):
        duplicates = sorted(set(tensors) - set(names.values()))
        raise invalid(
            f"{duplicates[0]!r} has the name of another tensor once wrappers are stripped", tensors=duplicates
        )
    return [
        replace(box, twins=tuple(twins[names[box.name]]))
        for box in held((name, tensors[whole]) for name, whole in names.items())
    ]


def _tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    for prefix, part in module.named_modules():
        for name, buffer in part.named_buffers(recurse=False):
            if name not in part._non_persistent_buffers_set:
                yield full_name(prefix, name), buffer


def _reshard(module: nn.Module) -> None:
    """Frees gathered parameters: FSDP2 leaves those of the root whole after a forward pass."""
    fsdp = _fsdp()
    if fsdp is not None:
        for part in module.modules():
            if isinstance(part, fsdp.FSDPModule):
                part.reshard()


def _refuse_fragments(module: nn.Module) -> None:
    """Raises for a model that FSDP1 shards: its ranks hold pieces of parameters that have lost their shape."""
    fsdp = _fsdp()
    if fsdp is None:
        return
    for name, part in module.named_modules():
        if (
            isinstance(part, fsdp.FullyShardedDataParallel)
            and part.sharding_strategy != fsdp.ShardingStrategy.NO_SHARD
            and torch.distributed.get_world_size(part.process_group) > 1
        ):
            whole = next((inside for inside, _ in part.named_parameters(prefix=name)), name)
            raise invalid(
                f"{whole!r} is sharded by FSDP1, which leaves each rank pieces without a shape; shard with "
                "fully_shard (FSDP2)",
                tensors=[whole],
            )


def _fsdp() -> Any:
    """torch's FSDP package; None if it was never imported, so that no module can be sharded by it."""
    module = sys.modules.get("torch.distributed.fsdp")
    needed = ("FSDPModule", "FullyShardedDataParallel", "ShardingStrategy")
    return module if all(hasattr(module, name) for name in needed) else None


def _memory(tensor: torch.Tensor) -> tuple[object, ...]:
    """A key that is equal for two tensors if they are the same elements of the same memory."""
    strange = is_sharded(tensor) or tensor.layout != torch.strided or tensor.is_nested or is_lazy(tensor)
    if strange or tensor.device.type == "meta" or not tensor.numel():
        return (id(tensor),)
    try:
        return elements_of(tensor)
    except RuntimeError:  # a stand-in for another tensor; `held` refuses it by name
        return (id(tensor),)
