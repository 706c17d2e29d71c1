"""Moves the memory of CPU tensors into shared memory, so that readers see every later change without a copy.

The tensor objects stay: parameters in an optimizer, tied weights and hooks notice nothing. A storage moves as a whole,
with every tensor that uses it, so what shared bytes still shares them, and strides stay. It moves only if nothing else
is known to use it: what keeps a flat buffer, a `.data`, a numpy view or another process's mapping of the old memory
would go on writing there, and readers would never see it.

Counts prove too little: code that keeps a bare address (`data_ptr()`) from one step to the next shows in none. So
nothing moves unless its owner asks for it, and what was moved out of is kept and compared (`host_memory.FormerMemory`).
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence

import torch

from ckpt_engine.core.strides import span
from ckpt_engine.torch_storages import storage_key
from ckpt_engine.transport.shared_memory.memory import lies_in_arena

SHARED = "is in memory that torch shares between processes (share_memory)"
FOREIGN = "is in memory that torch did not allocate itself (numpy, a mapped file, torch.load)"
ALIASED = (
    "shares its memory with something that is not published (a flat buffer, a kept .data or state_dict, a numpy view, "
    "a graph that waits for its backward pass)"
)

HELD = (
    "is held by something besides the Python object that is published (a DLPack view, a graph, "
    "DistributedDataParallel), which may keep its address"
)


def why_not(boxes: Sequence[Sequence[torch.Tensor]]) -> list[str]:
    """Why the memory of each box cannot move; empty if it can. boxes: all tensor objects of each that can be moved.

    Collects garbage if something else seems to use their memory: objects that wait to be freed do not count.
    """
    reasons = _why_not(boxes)
    if ALIASED in reasons or HELD in reasons:
        gc.collect()
        reasons = _why_not(boxes)
    return reasons


def by_storage(tensors: Sequence[torch.Tensor], of: Sequence[torch.Tensor] | None = None) -> list[list[torch.Tensor]]:
    """The tensors of `of` (None: of these) that lie in the storages of these tensors, one list a storage, each object
    once. Empty ones are left out."""
    found: dict[int, dict[int, torch.Tensor]] = {storage_key(tensor): {} for tensor in tensors if tensor.numel()}
    for tensor in tensors if of is None else of:
        if tensor.numel() and tensor.device.type == "cpu" and (key := storage_key(tensor)) in found:
            found[key][id(tensor)] = tensor
    return [list(group.values()) for group in found.values()]


def storage_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The whole storage of a tensor, as bytes."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,))


def move(tensors: Sequence[torch.Tensor], home: torch.Tensor) -> None:
    """Makes tensors of one storage use the storage of `home` instead, which holds the same bytes."""
    storage = home.untyped_storage()
    for tensor in tensors:
        view = torch.empty(0, dtype=tensor.dtype)
        tensor.data = view.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


def byte_range(tensor: torch.Tensor) -> tuple[int, int]:
    """The bytes of its storage from a tensor's first element to behind its last."""
    start = int(tensor.storage_offset())
    stop = start + span(tensor.shape, tensor.stride())
    return start * tensor.element_size(), stop * tensor.element_size()


def _why_not(boxes: Sequence[Sequence[torch.Tensor]]) -> list[str]:
    storages = by_storage([tensor for box in boxes for tensor in box])
    found = {storage_key(group[0]): _hindrance(group) for group in storages}
    return [next((found[storage_key(each)] for each in box if each.numel()), "") for box in boxes]


def _hindrance(group: Sequence[torch.Tensor]) -> str:
    """Why a storage, of which these tensors are known, cannot move."""
    tensor = group[0]
    if tensor.is_shared():
        return SHARED
    if not tensor.untyped_storage().resizable() and not lies_in_arena(tensor.data_ptr()):
        return FOREIGN
    if any(_holders(each) > 1 for each in group):
        return HELD
    own_users, own_holders = _uses(torch.empty(1))
    users, holders = _uses(tensor)
    return "" if users - own_users == len(group) - 1 and holders == own_holders else ALIASED


def _holders(tensor: torch.Tensor) -> int:
    """Reference count of the tensor behind a Python object: 1, unless native code holds it, too. 1 if this torch does
    not report it."""
    count = getattr(tensor, "_use_count", None)
    return 1 if count is None else int(count())


def _uses(tensor: torch.Tensor) -> tuple[int, int]:
    """How often a tensor's storage is used, and how often the Python object for it. Both counts include this call:
    compare them with those of a fresh tensor."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata), sys.getrefcount(storage)
