"""Whether a module still holds the very tensors that were found in it, where they were: then nothing is looked up anew.

A look at each tensor's address costs half of finding names, shards and memory again, while a training loop waits. It
only ever says "perhaps not": whatever it does not know is looked up.
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
    """Finds what `find` finds in a module, by `find` if anything may be different from the last time. One thread."""

    def __init__(self, module: nn.Module, find: Callable[[nn.Module], list[HeldBox]]) -> None:
        self._module = module
        self._find = find
        self._found: list[
            HeldBox
        ] = []  # keeps the tensors alive, so that no other one gets the identity of one of them
        self._signature: Signature | None = None

    def __call__(self) -> list[HeldBox]:
        """What the module holds now. Raises as `find`."""
        if self._signature is None or signature_of(self._module) != self._signature:
            self._signature = None
            self._found = self._find(self._module)
            self._signature = signature_of(self._module)
        return self._found


def signature_of(module: nn.Module) -> Signature | None:
    """Equal for two looks at a module if names, tensors and where these lie are the same, and the tensors of the first
    look still live. None: that cannot be told so (shards, subclasses of tensors, modules that list their own)."""
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
                except (RuntimeError, NotImplementedError):  # sparse, or it only stands for another tensor
                    return None
    return tuple(found)


@cache
def _is_plain(kind: Any) -> bool:
    """Whether modules of this class list their own buffers as any module does, and no FSDP gathers and frees their
    parameters."""
    sharded = any(base.__module__.startswith("torch.distributed.") for base in kind.__mro__)
    return kind.named_buffers is nn.Module.named_buffers and not sharded
