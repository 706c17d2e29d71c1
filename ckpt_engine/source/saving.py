"""Warns of what the `state_dict` of a module does beyond listing its tensors: a source does not call it.

Decides nothing about tensors.
"""

from __future__ import annotations

from collections import defaultdict
from functools import partial

from torch import nn

from ckpt_engine.core.names import some

_LIBRARY = ("torch.distributed.", "torch.nn.")
"""Hooks defined in these packages gather shards, rename wrappers and number formats: a source needs none of them."""

_HOOKS = ("_state_dict_hooks", "_state_dict_pre_hooks")
_METHODS = ("state_dict", "_save_to_state_dict", "get_extra_state")


def ignored(module: nn.Module) -> list[str]:
    """A sentence for each way in which the module's checkpoint may differ from what is published; none for plain
    modules."""
    found: dict[str, list[str]] = defaultdict(list)
    for name, part in module.named_modules():
        title = f"{name or 'the module itself'} ({type(part).__name__})"
        for method in _METHODS:
            if method in vars(part) or getattr(type(part), method) is not getattr(nn.Module, method):
                found[f"{method} of their own"].append(title)
        hooks = [hook for attribute in _HOOKS for hook in getattr(part, attribute, {}).values()]
        if any(not _home(hook).startswith(_LIBRARY) for hook in hooks):
            found["hooks on state_dict"].append(title)
    return [
        f"{len(names)} modules have {what}, which publishing does not call: {some(names)}; parameters and persistent "
        "buffers are served as they lie, so if replicas need what it adds or changes, publish a callable that yields it"
        for what, names in found.items()
    ]


def _home(hook: object) -> str:
    """The module that defines a hook."""
    while isinstance(hook, partial):
        hook = hook.func
    return str(getattr(hook, "__module__", ""))
