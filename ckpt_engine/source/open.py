"""Opens a trainer's weights, of whatever type, as a source."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from ckpt_engine.core.dtypes import CASTABLE as CASTABLE_NAMES
from ckpt_engine.core.dtypes import UnsupportedDtypeError
from ckpt_engine.core.kept import Kept
from ckpt_engine.core.parts import DRAFT
from ckpt_engine.core.problems import invalid
from ckpt_engine.core.transports import GPU_MEMORY, HOST_MEMORY, TransportKind, lending, worker_kinds
from ckpt_engine.host.facts import this_host
from ckpt_engine.source.base import Source
from ckpt_engine.source.directory import directory_source
from ckpt_engine.source.module import module_source
from ckpt_engine.source.named import named_source
from ckpt_engine.source.parts import PartsSource, first_region_behind, kept_in
from ckpt_engine.source.renewed import Pairs, RenewedSource
from ckpt_engine.source.ways import CASTABLE, PublishWish
from ckpt_engine.torch_dtypes import dtype_name, torch_dtype
from ckpt_engine.v1.weights_pb2 import Host

Publishable = (
    nn.Module
    | Mapping[str, torch.Tensor]
    | Iterable[tuple[str, torch.Tensor]]
    | Callable[[], Pairs]
    | str
    | os.PathLike[str]
)
"""The types that `open_source` takes."""


def open_source(
    obj: Publishable,
    rank: int = 0,
    world_size: int = 1,
    dtype: str | torch.dtype | None = None,
    snapshot: bool | None = None,
    advertise: str = "",
    transport: str | None = None,
    move: bool = False,
    kept_dtypes: Kept | None = None,
    draft: Publishable | None = None,
) -> Source:
    """Opens `obj` as what trainer rank `rank` of `world_size` offers. In the process that owns the weights.

    | obj                                      | by default                                | `snapshot=True`      |
    |------------------------------------------|-------------------------------------------|----------------------|
    | nn.Module on the CPU                     | copied at each seal (*)                   | the same             |
    | nn.Module on a GPU                       | live where it lies, no copies             | copied on the GPU    |
    | nn.Module sharded by FSDP2, on a GPU     | this rank's shards, live where they lie   | copied on the GPU    |
    | nn.Module sharded by FSDP2, on the CPU   | this rank's shards, copied at each seal   | the same             |
    | (name, tensor) pairs, or a mapping, GPU  | live where they lie, no copies            | copied on the GPU    |
    | (name, tensor) pairs, or a mapping, CPU  | copied at each seal (*)                   | the same             |
    | callable that returns pairs              | walked at each seal, copied one by one    | the same             |
    | safetensors directory or file            | files read in place, no copies            | copied at each seal  |

    (*) With `move=True` re-homed: moved into shared memory once, and not copied. Tensor by tensor, if nothing but the
    published tensors is seen to use their memory (source/rehome.py): what torch shares between processes
    (`share_memory`), has in memory that it did not allocate (numpy, a mapped file), or what something else uses (a flat
    buffer, a kept `.data`, a DLPack view) is copied at each seal, where it is, and the report says which and why. The
    memory that was moved out of stays taken as long as what moved lives, and each seal reads it: raises
    FAILED_PRECONDITION, naming tensors, if something wrote there. What was moved once is read where it lies ever after,
    also when it is published again without `move=True`. A child that is forked afterwards cannot change re-homed
    weights for its parent; until it writes them it sees them change as the parent steps. What is copied a child has as
    it was.

    Copies are compared with what they were made of once they are digested: weights that change meanwhile raise
    FAILED_PRECONDITION in the update, naming them.

    A GPU's memory is live if other processes can map it (CUDA IPC), which is tried out. Tensors in memory that cannot
    be mapped are copied at each seal: on the GPU if half of its free memory has room for that, else to shared memory.
    `transport` forces one way for all: "cuda_ipc" refuses what cannot be lent on its GPU, "shared_memory" copies what
    does not lie there already, and so does any other that lends memory of the host (core/transports.py); then a
    checkpoint directory is copied too. "nccl" is for collectives: memory stays where it lies, on one device, and its
    owner sends it; no reader opens it.

    A callable is for tensors that do not exist between updates: gathered, merged or renamed ones. Each is copied before
    the next one is asked for, into memory of the source, which holds one copy of what this rank yields; see
    source/renewed.py.

    Every rank publishes all that it holds: equal tensors of several ranks are replicas of each other. `dtype` is the
    served dtype of floating-point tensors; if it is None, `kept_dtypes` has narrower ones that models keep
    (core/kept.py). Those of another dtype are cast: by the readers if they are live on a GPU, else when they are copied
    at each seal. `snapshot=False` refuses what cannot do without a copy. `advertise` is the address at which other
    hosts reach this one. `draft` is the model that guesses tokens for this one, in any of the same types; it is opened
    with the same wishes, and is a part of the same version (core/parts.py).

    Raises CkptEngineError INVALID_ARGUMENT for anything else and for what cannot be published, naming the tensor;
    FAILED_PRECONDITION for tensors with memory that was freed or offloaded.
    """
    if not 0 <= rank < world_size:
        raise invalid(f"rank {rank} is not in a world of {world_size}")
    names = sorted({kind.name for memory in (GPU_MEMORY, HOST_MEMORY) for kind in _lenders(memory)})
    if transport is not None and transport not in names:
        raise invalid(f"transport {transport!r} is none that tensors can be published over ({', '.join(names)})")
    narrow = kept_dtypes or {}
    host, wish = this_host(advertise), PublishWish(snapshot, move, _dtype(dtype), transport, kept_in("", narrow))
    target = _open_part(obj, host, rank, world_size, wish)
    if draft is None:
        return target
    try:
        drafts_wish = replace(wish, kept_dtypes=kept_in(DRAFT, narrow), first_region=first_region_behind(target))
        drafts = _open_part(draft, host, rank, 1, drafts_wish)  # one rank of several may have all of it
    except BaseException:
        target.close()
        raise
    return PartsSource({"": target, DRAFT: drafts})


def _open_part(obj: Publishable, host: Host, rank: int, world_size: int, wish: PublishWish) -> Source:
    """Opens the weights of one model."""
    snapshot, move, transport = wish.snapshot, wish.move, wish.transport
    if move and snapshot is True:
        raise invalid(
            "snapshot=True copies the weights at each update and moves none, move=True moves them so that none need be "
            "copied: pass one of them"
        )
    if move and (isinstance(obj, str | os.PathLike) or not isinstance(obj, nn.Module | Iterable)):
        raise invalid(
            "move=True is for a module or named tensors on a CPU: files are read where they lie, and what a callable "
            "yields is copied"
        )
    if isinstance(obj, nn.Module):
        return module_source(obj, host=host, rank=rank, wish=wish)
    if isinstance(obj, str | os.PathLike):
        if world_size != 1:
            raise invalid(f"a checkpoint directory is published by one process, not by {world_size} ranks")
        if transport is not None and not lending(HOST_MEMORY, transport):
            raise invalid(f"transport={transport!r} is for GPU tensors, not for a checkpoint directory")
        return directory_source(Path(obj), host=host, rank=rank, wish=wish)
    if isinstance(obj, Iterable) and not isinstance(obj, torch.Tensor | bytes):
        return named_source(obj, host=host, rank=rank, wish=wish)
    is_class = isinstance(obj, type) and issubclass(obj, nn.Module)
    if callable(obj) and not is_class:
        return RenewedSource(obj, host=host, rank=rank, wish=wish)
    what = f"the class {obj}" if is_class else f"a {type(obj).__name__}"
    raise invalid(
        f"cannot publish {what}: give an nn.Module, (name, tensor) pairs, a mapping of names to "
        "tensors, a callable that returns pairs, or the path of a safetensors directory"
    )


def _lenders(memory: str) -> list[TransportKind]:
    return [kind for kind in worker_kinds().values() if kind.lender is not None and memory in kind.lends]


def _dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    if dtype is None:
        return None
    try:
        served = torch_dtype(dtype) if isinstance(dtype, str) else dtype
        dtype_name(served)
    except UnsupportedDtypeError as error:
        raise invalid(f"cannot serve weights as {dtype}: {error.problem.message}") from error
    if served not in CASTABLE:
        why = ", since 8-bit floats mean nothing without scales" if served.is_floating_point else ""
        raise invalid(f"cannot serve weights as {dtype}{why}: give {', '.join(sorted(CASTABLE_NAMES))}")
    return served
