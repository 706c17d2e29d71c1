"""What a recording of an engine's loader says: which boxes a worker needs and where their elements belong.

Plain data about one manifest and one layout of a model. It holds no tensor, so it may outlive the model's memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ckpt_engine.core.boxes import Box
from ckpt_engine.torch_dtypes import torch_dtype
from ckpt_engine.v1 import weights_pb2


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """How a tensor of the model lies in memory, as far as replaying depends on it. Strides in elements."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorLayout:
        return cls(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)

    def __str__(self) -> str:
        return f"{list(self.shape)} {str(self.dtype).removeprefix('torch.')} with strides {list(self.stride)}"


@dataclass(frozen=True, slots=True)
class Copy:
    """The elements of a need, in global coordinates, and where they belong in a tensor of the model.

    need: index into Recording.needs; several copies may have one need, each gets all of its elements.
    tensor: the model's name of the tensor, or `handover_name`.
    offset: of the box's first element, in elements from the tensor's first.
    stride: elements, one entry for each axis of the *checkpoint* tensor (so transposing needs nothing else).
    """

    need: int
    tensor: str
    offset: int
    stride: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Fill:
    """A box of a tensor of the model that the loader fills with one value; no copy writes there."""

    tensor: str
    box: Box
    value: bool | int | float


@dataclass(frozen=True, slots=True)
class NeedBox:
    """One box of a checkpoint tensor. tensor: index into the manifest."""

    tensor: int
    box: Box


@dataclass(frozen=True, slots=True)
class Handover:
    """Checkpoint tensors that the engine's own loader is given, whole, at every install, since it computes on values.

    tensors: indices into the manifest, in the order in which they are handed over. owners: the tensors of the model
    that the loader then writes, each with the boxes that it must write. why: for each of them, for people. everything:
    the loader could not be split up, so this is all that it loads.
    """

    tensors: tuple[int, ...]
    owners: dict[str, tuple[Box, ...]]
    why: dict[str, str]
    everything: bool


def handover_name(name: str) -> str:
    """What stands for a checkpoint tensor that is handed over where else a tensor of the model is named: memory of its
    whole shape that exists until the loader has taken it."""
    return f"handed over: {name}"


@dataclass(frozen=True, slots=True)
class Recording:
    """One worker's loader, run once against one manifest.

    needs_bytes: the serialised WorkerNeeds that the plan is made for; needs_digest names it in plans.
    layouts: of every tensor that copies, fills or handovers write to; a tensor that is handed over stands there under
        its `handover_name`.
    """

    manifest: weights_pb2.Manifest
    manifest_digest: bytes
    needs: tuple[NeedBox, ...]
    copies: tuple[Copy, ...]
    fills: tuple[Fill, ...]
    handovers: tuple[Handover, ...]
    layouts: dict[str, TensorLayout]
    needs_bytes: bytes
    needs_digest: bytes

    def name(self, need: int) -> str:
        """The checkpoint name of the tensor that a need is a box of."""
        return self.manifest.tensors[self.needs[need].tensor].name

    def widened(self, copy: Copy) -> bool:
        """Whether the model keeps a wider dtype than is served of what a copy brings (`core.dtypes.widens`)."""
        served = self.manifest.tensors[self.needs[copy.need].tensor].dtype
        return self.layouts[copy.tensor].dtype != torch_dtype(served)
