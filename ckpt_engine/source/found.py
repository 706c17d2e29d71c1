"""Tells whether a module still holds the same tensors at the same addresses: then they are not looked up again.

Comparing addresses costs half of finding names, shards and memory again, while a training loop waits. In doubt it says
"changed", and the tensors are looked up.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, cast

import torch
from torch import nn

from ckpt_engine.source.held import HeldBox, elements_of

Signature = tuple[object, ...]

_PLAIN = frozenset({torch.Tensor, nn.Parameter, nn.Buffer})


class Finder:
    """Caches what `find` finds in a module, until something may have changed. One thread."""

    def __init__(self, module: nn.Module, find: Callable[[nn.Module], list[HeldBox]]) -> None:
        self._module = module
        self._find = find
        self._found: list[HeldBox] = []  # keeps the tensors alive, so that their ids stay theirs
        self._signature: Signature | None = None

    def __call__(self) -> list[HeldBox]:
        """The boxes that the module holds now. Raises as `find`."""
        if self._signature is None or signature_of(self._module) != self._signature:
            self._signature = None
            self._found = self._find(self._module)
            self._signature = signature_of(self._module)
        return self._found


def signature_of(module: nn.Module) -> Signature | None:
    """A value that is equal for two looks at a module if names, tensors and addresses are, while the tensors of the
    first look are alive. None: it cannot be known (shards, subclasses of tensors, modules that list their own)."""
    lists = type(module)
    if lists.named_parameters is not nn.Module.named_parameters or lists.named_modules is not nn.Module.named_modules:
        return None
    found: list[object] = []
    visited_ids: set[int] = set()
    stack = [module]
    while stack:
        part = stack.pop()
        if id(part) in visited_ids:
            continue
        visited_ids.add(id(part))
        if not _is_plain(cast(Any, type(part))):
            return None
        non_persistent = part._non_persistent_buffers_set
        found += (id(part), *part._modules.keys())
        stack += [child for child in part._modules.values() if child is not None]
        for tensors in (part._parameters, part._buffers):
            for name, tensor in tensors.items():
                if tensor is None or name in non_persistent:
                    continue
                if type(tensor) not in _PLAIN:
                    return None
                try:
                    found.append((name, id(tensor), tensor.untyped_storage().nbytes(), *elements_of(tensor)))
                except (RuntimeError, NotImplementedError):  # sparse, or a stand-in for another tensor
                    return None
    return tuple(found)


@cache
def _is_plain(kind: Any) -> bool:
    """Whether modules of this class list their buffers in the usual way, and no FSDP gathers and frees parameters."""
    sharded = any(base.__module__.startswith("torch.distributed.") for base in kind.__mro__)
    return kind.named_buffers is nn.Module.named_buffers and not sharded
