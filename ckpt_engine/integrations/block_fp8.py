"""Publishes bfloat16 or float32 weights as a block-wise FP8 checkpoint: each `weight` in float8_e4m3fn beside its
`weight_scale_inv`, a float32 for each block of 128 times 128.

It decides which tensors are quantised, and to which values. When, and where the result lies, is the trainer's affair:
it walks a `BlockFp8` at each update, as any callable that is published.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ckpt_engine.core.problems import invalid

BLOCK = 128
"""Rows and columns of a block, as in DeepSeek's and Qwen's FP8 checkpoints."""

LARGEST = float(torch.finfo(torch.float8_e4m3fn).max)

EXCLUDE = r"(^|\.)(lm_head|embed\w*|wte|wpe|router)\.|norm|gate\.weight$"
"""Matrices that are not quantised: embeddings, output heads and what chooses experts, as in those checkpoints."""

Pairs = Iterable[tuple[str, Tensor]] | Mapping[str, Tensor]


class BlockFp8:
    """A callable for `Trainer.publish`, which yields the quantised checkpoint of the weights as they are at that time.

        trainer.publish(BlockFp8(model))

    What is quantised are the matrices called `….weight`, but for those whose names match `exclude`. A float32 master is
    rounded to bfloat16 first, so that the quantised values are those of the bfloat16 weights, and nothing depends on
    whether the trainer keeps masters. All other floating-point tensors are served in bfloat16.

    A matrix whose size is not a multiple of 128 has smaller blocks at its end. One walk takes float32 copies of one
    matrix at a time, on its device, besides the checkpoint that the source holds.
    """

    def __init__(self, weights: nn.Module | Pairs | Callable[[], Pairs], *, exclude: str = EXCLUDE) -> None:
        """weights: a module, (name, tensor) pairs, a mapping, or a callable that returns such pairs, by the names of
        the checkpoint; whole tensors. An iterator is read once, here. exclude: a regular expression.

        Raises INVALID_ARGUMENT for a pattern that is none.
        """
        self._weights = list(weights) if isinstance(weights, Iterator) else weights
        try:
            self._exclude = re.compile(exclude)
        except re.error as error:
            raise invalid(f"exclude={exclude!r} is not a regular expression: {error}") from error

    def __call__(self) -> Iterator[tuple[str, Tensor]]:
        """Raises INVALID_ARGUMENT, naming the tensor, for one of which this rank holds a part only, and for experts of
        a layer in one tensor."""
        for name, tensor in self._pairs():
            if not self._is_quantised(name, tensor):
                yield name, tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
                continue
            quantised, scales = quantise(tensor)
            yield name, quantised
            yield f"{name}_scale_inv", scales

    def quantization_config(self) -> dict[str, Any]:
        """What `quantization_config` in the `config.json` of the engine's model directory must say."""
        others = [name for name, tensor in self._pairs() if tensor.dim() == 2 and not self._is_quantised(name, tensor)]
        return {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
            "modules_to_not_convert": [name.removesuffix(".weight") for name in others],
        }

    def _is_quantised(self, name: str, tensor: Tensor) -> bool:
        return tensor.dim() == 2 and name.endswith(".weight") and self._exclude.search(name) is None

    def _pairs(self) -> Iterator[tuple[str, Tensor]]:
        weights = self._weights
        if isinstance(weights, nn.Module):
            found: Pairs = [*weights.named_parameters(), *_saved_buffers(weights)]
        else:
            found = weights() if callable(weights) else weights
        for name, tensor in found.items() if isinstance(found, Mapping) else found:
            if hasattr(tensor, "placements"):
                raise invalid(
                    f"{name} is sharded (DTensor), and its blocks may lie across ranks: give BlockFp8 a callable that "
                    "yields gathered tensors",
                    [name],
                )
            if tensor.dim() == 3 and "expert" in name:
                raise invalid(
                    f"{name} holds all experts of a layer: yield each expert's matrix under its own name", [name]
                )
            yield name, tensor.detach()


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """The blocks of a matrix, rounded to bfloat16 first: float8_e4m3fn of its shape, and what each block is to be
    multiplied with, float32 of (rows, columns) in blocks. A block of zeros has 1. On each device the same bits."""
    rows, columns = weight.shape
    down, across = -(-rows // BLOCK), -(-columns // BLOCK)
    padded = torch.zeros(down * BLOCK, across * BLOCK, dtype=torch.float32, device=weight.device)
    padded[:rows, :columns] = weight.to(torch.bfloat16)
    blocks = padded.view(down, BLOCK, across, BLOCK)
    largest = blocks.abs().amax(dim=(1, 3))
    # CUDA divides by a number as it multiplies with its reciprocal, and half of all scales end one bit away. Engines
    # that quantise again, to scales that are powers of two, then round values near a tie to their other neighbour.
    scales = torch.where(largest == 0, torch.ones_like(largest), largest / torch.full_like(largest, LARGEST))
    blocks /= scales[:, None, :, None]
    quantised = padded[:rows, :columns].clamp_(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return quantised.contiguous(), scales


def _saved_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for prefix, part in module.named_modules():
        for name, buffer in part.named_buffers(recurse=False):
            if name not in part._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer
