"""Turns a plan and a recording into moves: what is read from where, and to which part of which tensor.

`resolve` checks piece by piece that a plan fits the recording, without any tensor or memory; `bind` adds the tensors.
Both fail without having changed anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import torch

from ckpt_engine.core.boxes import Box, contains, remainder
from ckpt_engine.core.dtypes import itemsize
from ckpt_engine.core.problems import invalid, precondition
from ckpt_engine.core.transports import is_collective
from ckpt_engine.record.recording import Copy, Recording, TensorLayout, handover_name
from ckpt_engine.torch_dtypes import halves
from ckpt_engine.transport.base import Move
from ckpt_engine.v1 import manager_pb2, weights_pb2

NOTHING_EARLY: Mapping[int, torch.Tensor] = MappingProxyType({})
"""No need lies in stage memory."""


@dataclass(frozen=True, slots=True)
class Destination:
    """A strided part of a tensor of the model."""

    offset: int  # elements, from the tensor's first one
    shape: tuple[int, ...]
    stride: tuple[int, ...]  # elements

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.as_strided(self.shape, self.stride, tensor.storage_offset() + self.offset)


@dataclass(frozen=True, slots=True)
class PieceRead:
    """The read of one piece into one destination."""

    need: int
    tensor: int  # of the manifest
    box: Box  # of that tensor
    transport: str
    region: weights_pb2.Region
    offset: int  # bytes
    stride: tuple[int, ...]  # elements
    dtype: str
    destination: Destination
    stored: str
    widened: bool


@dataclass(frozen=True, slots=True)
class DigestCheck:
    """A need in the model, to be digested."""

    need: int
    start: tuple[int, ...]  # its first global coordinate
    destination: Destination
    widened: bool


@dataclass(slots=True)
class TensorWork:
    """All that an install does to one tensor of the model."""

    reads: list[PieceRead] = field(default_factory=list)
    fills: list[tuple[tuple[slice, ...], bool | int | float]] = field(default_factory=list)
    checks: list[DigestCheck] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Resolved:
    """One plan for one recording."""

    recording: Recording
    work: dict[str, TensorWork]  # by tensor of the model
    handed: dict[str, TensorWork]  # by tensor that the engine's loader gets
    regions: dict[str, list[weights_pb2.Region]]  # to open, by transport
    collective: bool  # whether a collective brings any of it
    edges: tuple[manager_pb2.EdgeReport, ...]
    bytes: int  # of all reads


def resolve(plan: weights_pb2.WorkerPlan, recording: Recording, rank: int) -> Resolved:
    """Makes the moves of a plan for this recording. Raises FAILED_PRECONDITION if the plan was made for another
    recording, INVALID_ARGUMENT if it is inconsistent."""
    if (plan.manifest_digest, plan.needs_digest) != (recording.manifest_digest, recording.needs_digest):
        raise precondition(
            f"worker {rank} was prepared for other weights or another layout than this plan: update again"
        )
    copies: list[list[Copy]] = [[] for _ in recording.needs]
    work: dict[str, TensorWork] = {name: TensorWork() for name in recording.layouts}
    for copy in recording.copies:
        copies[copy.need].append(copy)
        box = recording.needs[copy.need].box
        destination = Destination(copy.offset, box.shape, copy.stride)
        work[copy.tensor].checks.append(DigestCheck(copy.need, box.start, destination, recording.widened(copy)))
    for fill in recording.fills:
        place = tuple(map(slice, fill.box.start, fill.box.stop))
        work[fill.tensor].fills.append((place, fill.value))
    regions = [{region.id: region for region in source.regions} for source in plan.sources]
    read = [0] * len(plan.sources)
    boxes_of: list[list[Box]] = [[] for _ in recording.needs]
    for piece in plan.pieces:
        if piece.need >= len(boxes_of) or piece.source >= len(regions) or piece.region not in regions[piece.source]:
            raise invalid(f"the plan for worker {rank} names a need, source or region that is not there")
        need = recording.needs[piece.need]
        box = Box(tuple(piece.start), tuple(piece.stop))
        if len(box.start) != need.box.rank or len(piece.stride) != need.box.rank or not contains(need.box, box):
            raise invalid(f"a piece of the plan reaches beyond what worker {rank} needs", [recording.name(piece.need)])
        boxes_of[piece.need].append(box)
        spec = recording.manifest.tensors[need.tensor]
        transport = plan.sources[piece.source].transport
        for copy in copies[piece.need]:
            offset = copy.offset + sum(
                (start - first) * step
                for start, first, step in zip(box.start, need.box.start, copy.stride, strict=True)
            )
            destination = Destination(offset, box.shape, copy.stride)
            region = regions[piece.source][piece.region]
            work[copy.tensor].reads.append(
                PieceRead(
                    piece.need,
                    need.tensor,
                    box,
                    transport,
                    region,
                    piece.offset,
                    tuple(piece.stride),
                    spec.dtype,
                    destination,
                    piece.stored_dtype,
                    recording.widened(copy),
                )
            )
            read[piece.source] += box.volume * itemsize(spec.dtype)
    _check_served(recording, boxes_of, rank)
    opened: dict[str, list[weights_pb2.Region]] = {}
    for source in plan.sources:
        if not is_collective(source.transport):  # a collective's owner sends its memory; nothing is opened
            opened.setdefault(source.transport, []).extend(source.regions)
    collective = any(is_collective(source.transport) for source in plan.sources)
    edges = tuple(
        manager_pb2.EdgeReport(
            source=source.source,
            source_rank=source.rank if source.HasField("rank") else None,
            worker_rank=rank,
            transport=source.transport,
            reason=source.reason,
            bytes=size,
        )
        for source, size in zip(plan.sources, read, strict=True)
    )
    names = (
        handover_name(recording.manifest.tensors[i].name) for handover in recording.handovers for i in handover.tensors
    )
    return Resolved(recording, work, {name: work.pop(name) for name in names}, opened, collective, edges, sum(read))


def _check_served(recording: Recording, boxes_of: list[list[Box]], rank: int) -> None:
    for number, (need, boxes) in enumerate(zip(recording.needs, boxes_of, strict=True)):
        if len(boxes) == 1 and boxes[0] == need.box:
            continue
        if sum(box.volume for box in boxes) != need.box.volume or remainder([need.box], boxes):
            raise invalid(
                f"the plan for worker {rank} does not bring every element of {recording.name(number)} exactly once",
                [recording.name(number)],
            )


@dataclass(slots=True)
class Bound:
    """Work on real tensors."""

    moves: dict[str, list[Move]] = field(default_factory=dict)  # by transport
    # What a collective brings: (tensor of the manifest, box, view).
    arrivals: list[tuple[int, Box, torch.Tensor]] = field(default_factory=list)
    # What lies in stage memory already: (destination, source).
    early: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    fills: list[tuple[torch.Tensor, bool | int | float]] = field(default_factory=list)
    # (need, view in global axis order, start, whether the model keeps it widened).
    checks: list[tuple[int, torch.Tensor, tuple[int, ...], bool]] = field(default_factory=list)


def bind(
    resolved: Resolved,
    names: Iterable[str],
    tensors: Mapping[str, torch.Tensor],
    early: Mapping[int, torch.Tensor] = NOTHING_EARLY,
) -> Bound:
    """Binds the work of `names` to `tensors`. early: needs that are copied from here, whole, and from no source.

    Raises FAILED_PRECONDITION if one is missing, has no memory or has another layout than when it was recorded.
    """
    bound = Bound()
    for name in names:
        tensor = tensors.get(name)
        expected = resolved.recording.layouts[name]
        if tensor is None or tensor.is_meta:
            raise precondition(f"the model's tensor {name} has gone since its loader was recorded", [name])
        if TensorLayout.of(tensor) != expected:
            raise precondition(
                f"the model's tensor {name} is {TensorLayout.of(tensor)}, but was {expected} when its loader was "
                "recorded; it has to be prepared again",
                [name],
            )
        tensor = tensor.detach()
        work = resolved.work.get(name) or resolved.handed[name]
        for check in work.checks:
            if check.need in early:
                view = check.destination.of(tensor)
                if check.widened:
                    lower, view = halves(view)
                    bound.fills.append((lower, 0))
                bound.early.append((view, early[check.need]))
        for read in work.reads:
            if read.need in early:
                continue
            view = read.destination.of(tensor)
            if read.widened:
                lower, view = halves(view)
                bound.fills.append((lower, 0))
            if is_collective(read.transport):
                bound.arrivals.append((read.tensor, read.box, view))
                continue
            move = Move(read.region, read.offset, read.destination.shape, read.stride, read.dtype, view, read.stored)
            bound.moves.setdefault(read.transport, []).append(move)
        bound.fills += ((tensor[place], value) for place, value in work.fills)
        bound.checks += (
            (check.need, check.destination.of(tensor), check.start, check.widened) for check in work.checks
        )
    return bound
