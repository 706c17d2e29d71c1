"""A recording of an engine's loader: which boxes a worker needs and where their elements belong.

Plain data about one manifest and one layout of a model. It holds no tensor, so it may outlive the model's memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from ckpt_engine.core.boxes import Box
from ckpt_engine.torch_dtypes import torch_dtype
from ckpt_engine.v1 import manager_pb2, weights_pb2


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
    """The elements of a need, in global coordinates, and where they belong in a tensor of the model."""

    need: int  # index into Recording.needs; several copies may have one need, each gets all of its elements
    tensor: str  # the model's name of the tensor, or a `handover_name`
    offset: int  # of the box's first element, in elements from the tensor's first
    stride: tuple[int, ...]  # elements, one entry for each axis of the *checkpoint* tensor: it may be transposed


@dataclass(frozen=True, slots=True)
class Fill:
    """A box of a tensor of the model that the loader fills with one value; no copy writes there."""

    tensor: str
    box: Box
    value: bool | int | float


@dataclass(frozen=True, slots=True)
class NeedBox:
    """One box of a checkpoint tensor."""

    tensor: int  # index into the manifest
    box: Box


@dataclass(frozen=True, slots=True)
class Handover:
    """Checkpoint tensors that the engine's own loader takes whole at every install, since it computes on values."""

    tensors: tuple[int, ...]  # indices into the manifest, in the order in which they are handed over
    owners: dict[str, tuple[Box, ...]]  # the model's tensors that the loader writes, and the boxes that it must write
    why: dict[str, str]  # by model's tensor, for people
    everything: bool  # the loader could not be split up: this is all that it loads


def handover_name(name: str) -> str:
    """The name, among those of the model's tensors, of a checkpoint tensor that is handed over: memory of its whole
    shape, which exists until the loader has taken it."""
    return f"handed over: {name}"


@dataclass(frozen=True, slots=True)
class Recording:
    """One worker's loader, run once against one manifest."""

    manifest: weights_pb2.Manifest
    manifest_digest: bytes
    needs: tuple[NeedBox, ...]
    copies: tuple[Copy, ...]
    fills: tuple[Fill, ...]
    handovers: tuple[Handover, ...]
    absent: tuple[manager_pb2.AbsentTensors, ...]  # what the model was made without
    layouts: dict[str, TensorLayout]  # of the model's tensors that are written to, and those of each `handover_name`
    needs_bytes: bytes  # the serialised WorkerNeeds that the plan is made for
    needs_digest: bytes  # names it in plans
    absent_parts: frozenset[str] = frozenset()  # parts of the version that the worker has no model for
    unfilled_parts: frozenset[str] = frozenset()  # of the worker, without weights in the version: they stay as they are
    twins: tuple[tuple[int, int], ...] = ()  # needs of two parts that are loaded to the same elements
    shared: Mapping[str, tuple[str, ...]] = field(
        default_factory=dict
    )  # by part, its tensors that are the target's too

    def name(self, need: int) -> str:
        """The checkpoint name of the tensor that a need is a box of."""
        return self.manifest.tensors[self.needs[need].tensor].name

    def widened(self, copy: Copy) -> bool:
        """Whether the model keeps the copy's tensor in a wider dtype than is served (`core.dtypes.widens`)."""
        served = self.manifest.tensors[self.needs[copy.need].tensor].dtype
        return self.layouts[copy.tensor].dtype != torch_dtype(served)
