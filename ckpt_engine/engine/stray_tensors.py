"""Tensors that modules keep as plain attributes beside their parameters and buffers, outside the accounting.

A loader that ends with `self.fused = torch.cat([...])` makes such a tensor of weights. During a recording there are no
values, so the tensor has no memory and must not stay in a live model; it would also be stale after an update.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from ckpt_engine.core.names import full_name, some
from ckpt_engine.core.problems import invalid


@contextmanager
def stray_tensors_kept(model: nn.Module) -> Iterator[None]:
    """Entered around a recording. Restores attributes that a loader replaced by tensors without memory or of weights.

    Raises INVALID_ARGUMENT with their names, unless the recording failed anyway.
    """
    modules = dict(model.named_modules())
    before = {prefix: _tensors(module) for prefix, module in modules.items()}
    changed: list[str] = []
    try:
        yield
    finally:
        for prefix, module in modules.items():
            for name, tensor in _tensors(module).items():
                old = before[prefix].get(name)
                if tensor is not old and (tensor.is_meta or (tensor.is_floating_point() and tensor.numel() > 1)):
                    changed.append(full_name(prefix, name))
                    if old is None:
                        delattr(module, name)
                    else:
                        setattr(module, name, old)
    if changed:
        raise invalid(
            f"the loader makes {some(changed)} of weights, beside the model's parameters and buffers; an "
            "update could not follow it",
            changed,
        )


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return {name: value for name, value in vars(module).items() if isinstance(value, Tensor)}
