"""The instruction that goes through SGLang's own weight route to our loader in each of its schedulers.

SGLang passes only named tensors to a custom weight loader, so an instruction is one tensor of bytes: a small JSON
object with the action and the update's epoch. The worker asks its agent what to install, and from where. Pure: shared
by the driver, in the agent, and the loader, in the scheduler. torch is imported only to make or read the tensor, so
that the driver can be imported without it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from ckpt_engine.core.json_text import load_json

if TYPE_CHECKING:
    from torch import Tensor

TENSOR = "ckpt_engine.order"
"""Name of the one tensor."""

LIMIT_BYTES = 1024
_EPOCHS = 1 << 63


class Action(StrEnum):
    """What a scheduler is to do."""

    PREPARE = "prepare"
    INSTALL = "install"
    DISCARD = "discard"


@dataclass(frozen=True, slots=True)
class Instruction:
    """An instruction of the driver to SGLang's workers."""

    action: Action
    epoch: int = 0  # of the update that INSTALL is for; else 0


def encode(order: Instruction) -> list[tuple[str, Tensor]]:
    """Encodes `order` as named tensors: one CPU tensor, uint8, of one dimension."""
    import torch

    text = json.dumps({"action": order.action.value, "epoch": order.epoch}, separators=(",", ":"))
    return [(TENSOR, torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8))]


def decode(named_tensors: Sequence[tuple[str, Tensor]]) -> Instruction:
    """Decodes an instruction.

    Raises ValueError if it is none, for instance because another program calls SGLang's weight route with weights.
    """
    import torch

    if len(named_tensors) != 1 or named_tensors[0][0] != TENSOR:
        names = ", ".join(name for name, _ in named_tensors[:4])
        raise ValueError(f"an order is one tensor {TENSOR}, not {len(named_tensors)} tensors ({names})")
    tensor = named_tensors[0][1]
    if tensor.dtype is not torch.uint8 or tensor.dim() != 1 or tensor.numel() > LIMIT_BYTES:
        raise ValueError(
            f"an order is at most {LIMIT_BYTES} bytes in one dimension, not {tensor.dtype} {tuple(tensor.shape)}"
        )
    text = bytes(tensor.tolist())
    try:
        content = load_json(text)
    except ValueError as error:
        raise ValueError(f"an order is a JSON object: {error}") from error
    if not isinstance(content, dict) or content.keys() != {"action", "epoch"}:
        raise ValueError(f"an order has the keys action and epoch, not {text.decode(errors='replace')}")
    action, epoch = content["action"], content["epoch"]
    if action not in list(Action):
        raise ValueError(f"unknown action {action!r}; known are {', '.join(Action)}")
    if type(epoch) is not int or not 0 <= epoch < _EPOCHS:
        raise ValueError(f"an epoch is a whole number of 0 to 2**63 - 1, not {epoch!r}")
    return Instruction(Action(action), epoch)
