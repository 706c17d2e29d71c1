"""How trainers and engines split a model's tensors: which rank holds, or which worker needs, which boxes. Pure.

A split gives each tensor a key: tensors of one dtype, shape and key are split alike, so that one of them stands for
all. So a plan for a terabyte on 256 ranks takes seconds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ckpt_engine.core.boxes import Box, whole
from ckpt_engine.planning.model import Model, Tensor
from ckpt_engine.planning.roles import Role, role_of

VOCABULARY_MULTIPLE = 64
"""Engines pad the rows of embedding and head to a multiple of this, or of this times their workers."""


class Split(ABC):
    """Which boxes of each tensor each of several processes has."""

    @property
    @abstractmethod
    def count(self) -> int:
        """The number of ranks, or of workers."""

    @abstractmethod
    def key(self, tensor: Tensor) -> Hashable:
        """Tensors of one dtype, shape and key have the same boxes."""

    @abstractmethod
    def boxes(self, tensor: Tensor, rank: int) -> Sequence[Box]:
        """The boxes of a tensor that this rank holds or needs."""

    @abstractmethod
    def impossible(self, model: Model) -> Iterator[str]:
        """Yields the reasons why a model cannot be split so, each a sentence."""


@dataclass(frozen=True)
class Fsdp(Split):
    """FSDP2: the rows of each tensor in as even parts as whole rows allow."""

    shards: int  # parts of each tensor
    copies: int = 1  # of each part

    @property
    def count(self) -> int:
        return self.shards * self.copies

    def key(self, tensor: Tensor) -> Hashable:
        return None

    def boxes(self, tensor: Tensor, rank: int) -> Sequence[Box]:
        everything = whole(tensor.shape)
        if not tensor.shape:
            return [everything]
        rows = tensor.shape[0]
        size = -(-rows // self.shards)
        start = min(rows, size * (rank % self.shards))
        stop = min(rows, start + size)
        return [Box((start, *everything.start[1:]), (stop, *everything.stop[1:]))] if start < stop else []

    def impossible(self, model: Model) -> Iterator[str]:
        yield from ()


@dataclass(frozen=True)
class Parallel(Split):
    """Tensor, pipeline and expert parallelism."""

    label: str  # for messages
    tensor: int
    pipeline: int = 1
    experts: int = 1
    copies: int = 1  # of the whole model
    padded: int = VOCABULARY_MULTIPLE  # rows of the vocabulary are padded to a multiple of this before they are split
    repeats: bool = True  # key-value heads are repeated if there are fewer than workers
    pairs: int = 0  # key-value heads of the model
    routed: int = 0  # experts of the model
    layers: int = 0  # of the model
    tied: bool = False  # the model has no output head besides the embedding
    everywhere: bool = False  # each stage has the tensors before and after all layers

    @property
    def count(self) -> int:
        return self.tensor * self.pipeline * self.copies

    def key(self, tensor: Tensor) -> Hashable:
        role = role_of(tensor.name, len(tensor.shape))
        group = self._group(role.expert) if role.expert is not None else None
        return role.axis, role.vocabulary, role.pairs, role.fused, role.halves, group, self._stages(role)

    def boxes(self, tensor: Tensor, rank: int) -> Sequence[Box]:
        rank %= self.tensor * self.pipeline
        stage, place = divmod(rank, self.tensor)
        role = role_of(tensor.name, len(tensor.shape))
        if stage not in self._stages(role):
            return []
        within = self.tensor // self.experts
        if role.expert is not None:
            if self._group(role.expert) != place // within:
                return []
            return self._cut(tensor, whole(tensor.shape), role, place % within, within)
        if role.fused:
            everything = whole(tensor.shape)
            size = tensor.shape[0] // self.experts
            first = size * (place // within)
            own = Box((first, *everything.start[1:]), (first + size, *everything.stop[1:]))
            return self._cut(tensor, own, role, place % within, within)
        return self._cut(tensor, whole(tensor.shape), role, place, self.tensor)

    def impossible(self, model: Model) -> Iterator[str]:
        if self.experts > 1 and not self.routed:
            yield f"{self.label}: ep={self.experts}, and the model has no experts"
        elif self.routed % self.experts:
            yield f"{self.label}: the model's {self.routed} experts do not divide by ep={self.experts}"
        if self.tensor % self.experts:
            workers = f"tp={self.tensor}, whose workers experts are dealt to"
            yield f"{self.label}: ep={self.experts} does not divide {workers}"
            return
        if self.pipeline > 1 and self.layers < self.pipeline:
            yield f"{self.label}: the model's {self.layers} layers are fewer than pp={self.pipeline} stages"
        if self.tensor == 1:
            return
        if model.heads is not None:
            yield from self._heads(model.heads.attention)
        yield from self._uneven(model)

    def _heads(self, heads: int) -> Iterator[str]:
        if heads % self.tensor:
            yield f"{self.label}: the model's {heads} attention heads do not divide by tp={self.tensor}"
        elif self.pairs % self.tensor and not (self.repeats and self.tensor % self.pairs == 0):
            yield f"{self.label}: the model's {self.pairs} key-value heads do not divide by tp={self.tensor}"

    def _uneven(self, model: Model) -> Iterator[str]:
        """Yields tensors that do not divide evenly, one for each name without layer and expert."""
        kinds: set[str] = set()
        for tensor in model.tensors:
            role = role_of(tensor.name, len(tensor.shape))
            if role.axis is None or role.pairs:
                continue
            parts = self.tensor // self.experts if role.expert is not None or role.fused else self.tensor
            size = tensor.shape[role.axis] // (2 if role.halves else 1)
            if role.vocabulary:
                size = -(-size // self.padded) * self.padded
            kind = ".".join(part for part in tensor.name.split(".") if not part.isdecimal())
            if size % parts and kind not in kinds:
                kinds.add(kind)
                padding = f" (padded to {size})" if role.vocabulary else ""
                what = f"{tensor.name}, of shape {list(tensor.shape)}{padding}"
                yield f"{self.label}: {what}, does not divide by {parts} along axis {role.axis}"

    def _group(self, expert: int) -> int:
        """The group of workers that has an expert; groups take experts in order."""
        return expert * self.experts // self.routed if self.routed else 0

    def _stages(self, role: Role) -> tuple[int, ...]:
        last = self.pipeline - 1
        if role.layer is not None:
            return (self._stage_of_layer(role.layer),)
        if self.everywhere:
            return tuple(range(self.pipeline))
        if role.first:
            return (0, last) if self.tied and last else (0,)
        return (last,)

    def _stage_of_layer(self, layer: int) -> int:
        """The stage of a layer. If layers do not divide evenly, the last stages before the final one get one more each,
        as in vLLM."""
        each, remainder = divmod(self.layers, self.pipeline)
        sizes = [each + (self.pipeline - 1 - remainder <= stage < self.pipeline - 1) for stage in range(self.pipeline)]
        edges = list(pairwise([0, *(sum(sizes[: stage + 1]) for stage in range(self.pipeline))]))
        return next((stage for stage, (first, stop) in enumerate(edges) if first <= layer < stop), self.pipeline - 1)

    def _cut(self, tensor: Tensor, box: Box, role: Role, place: int, parts: int) -> Sequence[Box]:
        if role.axis is None or parts == 1:
            return [box]
        axis, total = role.axis, tensor.shape[role.axis]
        if role.halves:
            half = total // 2
            return [
                _along(box, axis, start + half * place // parts, start + half * (place + 1) // parts)
                for start in (0, half)
            ]
        if role.pairs and self.pairs and self.pairs < parts:
            place, parts = place * self.pairs // parts, self.pairs
        size = -(-total // self.padded) * self.padded // parts if role.vocabulary else -(-total // parts)
        start, stop = min(total, size * place), min(total, size * (place + 1))
        return [_along(box, axis, start, stop)] if start < stop else []


def _along(box: Box, axis: int, start: int, stop: int) -> Box:
    return Box((*box.start[:axis], start, *box.start[axis + 1 :]), (*box.stop[:axis], stop, *box.stop[axis + 1 :]))


def parallel(
    label: str, model: Model, tensor: int, pipeline: int, experts: int, copies: int, padded: int, repeats: bool
) -> Parallel:
    """Makes a parallel split of a model. Layers and experts are counted by the tensors' names."""
    roles = [role_of(each.name, len(each.shape)) for each in model.tensors]
    layers = 1 + max((role.layer for role in roles if role.layer is not None), default=-1)
    routed = 1 + max((role.expert for role in roles if role.expert is not None), default=-1)
    fused = max((each.shape[0] for each, role in zip(model.tensors, roles, strict=True) if role.fused), default=0)
    pairs = model.heads.pairs if model.heads is not None else 0
    return Parallel(
        label, tensor, pipeline, experts, copies, padded, repeats, pairs, routed or fused, layers, model.tied
    )
