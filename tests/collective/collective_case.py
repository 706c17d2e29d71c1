"""Weights, plans and a schedule that every member of a collective makes for itself, and one member's part of it.

Case "one": a trainer rank, and three workers that want everything; "pair": the same with one worker
and 64 MiB. Case "split": two
trainer ranks that hold half of the rows each; a tensor-parallel pair that wants halves, by rows and by columns, and a
worker that wants everything.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ckpt_engine.core.boxes import Box, whole
from ckpt_engine.core.collective import CollectiveMember, Schedule, arrange
from ckpt_engine.core.collective_buckets import wants_of
from ckpt_engine.core.collective_plan import KEY_BYTES, collective_plan, read_collective_plan
from ckpt_engine.core.plan import PlanRequest, compile_plans
from ckpt_engine.core.publication import merge_tables
from ckpt_engine.core.sealed import check_replicas
from ckpt_engine.digest.prepared import prepare_digests
from ckpt_engine.transport.collective.part import Places, held_boxes
from tests.core.core_plans import Weights, some_weights
from tests.core.core_tables import digests, everything, part, request, rows, table
from tests.sealing import expected_digests

SHAPES: dict[str, tuple[int, ...]] = {"a": (256, 512), "b": (512, 128), "norm": (512,), "odd": (2, 77, 3), "z": (0, 4)}
TRANSPORT = "file"
LIMIT = 60.0
"""Seconds until a member gives up."""
KEY = bytes(range(KEY_BYTES))
BUCKET = 32 << 10
LARGE = {"a": (8192, 4096), **{name: shape for name, shape in SHAPES.items() if name != "a"}}
"""More than NCCL takes from a sender whose receiver has stopped."""


class Case(NamedTuple):
    """requests: of the workers, by the number of their member."""

    members: tuple[CollectiveMember, ...]
    schedule: Schedule
    held: list[list[tuple[str, Box]]]
    requests: dict[int, PlanRequest]
    shapes: dict[str, tuple[int, ...]]


def weights_of(version: int, shapes: dict[str, tuple[int, ...]]) -> Weights:
    return some_weights(version, **shapes)


def make_case(name: str) -> Case:
    shapes = LARGE if name == "pair" else SHAPES
    weights = weights_of(0, shapes)
    full = [(index, whole(shape)) for index, (_, shape) in enumerate(sorted(shapes.items()))]
    if name in ("one", "pair"):
        held, needs = [list(everything(weights))], [full] * (3 if name == "one" else 1)
    else:
        held = [list(rows(weights, rank, 2)) for rank in range(2)]
        halves = []
        for rank in range(2):
            mine = []
            for tensor, box in full:
                axis = 1 if tensor == 1 else 0
                if box.rank == 1:
                    mine.append((tensor, box))
                    continue
                half = box.stop[axis] // 2
                start, stop = list(box.start), list(box.stop)
                start[axis], stop[axis] = rank * half, (rank + 1) * half
                mine.append((tensor, Box(tuple(start), tuple(stop))))
            halves.append(mine)
        needs = [*halves, full]
    members = arrange(
        [
            *(CollectiveMember(f"rank {rank}", "h", True) for rank in range(len(held))),
            *(CollectiveMember(f"worker {worker}", "h", False) for worker in range(len(needs))),
        ]
    )
    publication = merge_tables([table(rank, weights, boxes, transport=TRANSPORT) for rank, boxes in enumerate(held)])
    asked = {
        len(held) + worker: request(worker, publication.manifest_digest, each) for worker, each in enumerate(needs)
    }
    plans = compile_plans(publication, publication.table_digests, list(asked.values()))
    sources = {f"rank {rank}": rank for rank in range(len(held))}
    wants = [
        want
        for number, each in asked.items()
        for want in wants_of(plans.workers[each.key], each.needs, number, sources, TRANSPORT)
    ]
    schedule, _ = read_collective_plan(collective_plan(members, wants, ["bfloat16"] * len(SHAPES), BUCKET))
    return Case(members, schedule, held, asked, shapes)


def expected_of(case: Case, member: int, version: int) -> list[int]:
    """The digests of a worker's needs, as a manager works them out from what sources seal."""
    weights = weights_of(version, case.shapes)
    publication = merge_tables(
        [table(rank, weights, boxes, transport=TRANSPORT) for rank, boxes in enumerate(case.held)]
    )
    plans = compile_plans(publication, publication.table_digests, list(case.requests.values()))
    sealed = check_replicas(plans, {source: digests(plans, source, weights) for source in range(len(case.held))})
    return list(expected_digests(plans, case.requests[member].key, sealed).values)


class Memory:
    """What a member holds: a source its part of the weights, in float32, so that packing casts; a worker its needs."""

    def __init__(self, case: Case, member: int, device: str = "cpu") -> None:
        self._case, self._member = case, member
        names = sorted(SHAPES)
        self._own: list[tuple[int, Box, torch.Tensor]] = []
        if case.members[member].is_source:
            for name, box in case.held[member]:
                self._own.append((names.index(name), box, torch.zeros(box.shape, dtype=torch.float32, device=device)))
        else:
            for need in case.requests[member].needs.needs:
                box = Box(tuple(need.start), tuple(need.stop))
                self._own.append((need.tensor, box, torch.zeros(box.shape, dtype=torch.bfloat16, device=device)))

    @property
    def places(self) -> Places:
        return held_boxes(self._own)

    def renew(self, version: int) -> None:
        """Of a source: the weights of a version."""
        weights = weights_of(version, self._case.shapes)
        for tensor, box, memory in self._own:
            memory.copy_(part(weights[sorted(SHAPES)[tensor]], box))

    def wrong(self, version: int) -> list[int]:
        """Of a worker: needs whose digest is not what was sealed."""
        found = prepare_digests([(memory, box.start) for _, box, memory in self._own]).run()
        expected = expected_of(self._case, self._member, version)
        weights = weights_of(version, self._case.shapes)
        for tensor, box, memory in self._own:
            if not torch.equal(memory.cpu(), part(weights[sorted(SHAPES)[tensor]], box)):
                return [-1]
        return [number for number, (a, b) in enumerate(zip(found, expected, strict=True)) if a != b]


DTYPES: Sequence[torch.dtype] = [torch.bfloat16] * len(SHAPES)
