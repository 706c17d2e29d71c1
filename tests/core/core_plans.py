"""Plans carried out on real memory: each source's region is a tensor of bytes, each piece a strided copy."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ckpt_engine.core.boxes import Box
from ckpt_engine.core.plan import PlanRequest
from ckpt_engine.core.publication import Publication
from ckpt_engine.torch_dtypes import torch_dtype
from ckpt_engine.v1.weights_pb2 import WorkerPlan
from tests.core.core_tables import Held, part

Weights = dict[str, torch.Tensor]


def some_weights(seed: int = 0, **shapes: tuple[int, ...]) -> Weights:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}


def memory(weights: Weights, held: Held) -> torch.Tensor:
    """The one region of a source, as `table` lays it out."""
    own = [part(weights[name], box).clone(memory_format=torch.contiguous_format) for name, box in held]
    flat = [each.reshape(-1).view(torch.uint8) for each in own]
    return torch.cat(flat) if flat else torch.empty(0, dtype=torch.uint8)


def carry_out(
    plan: WorkerPlan, asked: PlanRequest, publication: Publication, memories: Mapping[str, torch.Tensor]
) -> list[torch.Tensor]:
    """What a worker has read when the plan is done: one tensor a need. No element may be written twice."""
    specs = publication.manifest.tensors
    found, written = [], []
    for need in asked.needs.needs:
        shape = Box(tuple(need.start), tuple(need.stop)).shape
        found.append(torch.zeros(shape, dtype=torch_dtype(specs[need.tensor].dtype)))
        written.append(torch.zeros(shape, dtype=torch.int32))
    for piece in plan.pieces:
        need = asked.needs.needs[piece.need]
        source = plan.sources[piece.source]
        assert piece.region in {region.id for region in source.regions}
        dtype = torch_dtype(specs[need.tensor].dtype)
        shape = Box(tuple(piece.start), tuple(piece.stop)).shape
        held = memories[source.source]
        view = held[piece.offset :][: (len(held) - piece.offset) // 2 * 2].view(dtype)
        into = Box(
            tuple(a - b for a, b in zip(piece.start, need.start, strict=True)),
            tuple(a - b for a, b in zip(piece.stop, need.start, strict=True)),
        )
        part(found[piece.need], into).copy_(view.as_strided(shape, tuple(piece.stride)))
        part(written[piece.need], into).add_(1)
    assert all(bool((each == 1).all()) for each in written)
    return found
