"""Checkpoint names: removes what wrappers around the model add to tensors' names."""

from __future__ import annotations

from collections.abc import Sequence

_ANYWHERE = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""Parts that only wrappers add: torch.compile, FSDP, activation checkpointing."""

_FRONT = "module"
"""What DDP and DataParallel add. A model may have a part of that name too, so it is only taken from the front, and only
if every name has it there."""


def strip_wrappers(names: Sequence[str]) -> list[str]:
    """The names without wrappers, in the same order. Names may have become equal: that is not checked."""
    parts = [[part for part in name.split(".") if part not in _ANYWHERE] for name in names]
    while parts and all(len(name) > 1 and name[0] == _FRONT for name in parts):
        parts = [name[1:] for name in parts]
    return [".".join(name) for name in parts]
