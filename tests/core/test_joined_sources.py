"""Sources of one identity that are no ranks of one publication: any boxes, and what nobody holds is named."""

from __future__ import annotations

import pytest
import torch

from ckpt_engine.core.boxes import Box, whole
from ckpt_engine.core.plan import compile_plans
from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.core.publication import join_sources, merge_tables
from ckpt_engine.core.sealed import check_replicas
from ckpt_engine.digest.boxes import digest_box
from ckpt_engine.v1.weights_pb2 import SourceTable
from tests.core.core_plans import Weights, carry_out, memory, some_weights
from tests.core.core_tables import Held, digests, everything, part, request, table
from tests.sealing import expected_digests, root


def holding(name: str, weights: Weights, held: Held) -> SourceTable:
    """A source that is no trainer rank."""
    found = table(0, weights, held)
    found.ClearField("rank")
    found.id = name
    return found


def test_sources_of_one_identity_may_hold_any_boxes_of_it() -> None:
    weights = some_weights(a=(8, 6), b=(5,))
    manifest = merge_tables([table(0, weights, everything(weights))]).manifest
    held: list[Held] = [
        [("a", Box((0, 0), (5, 6))), ("b", whole((5,)))],
        [("a", Box((3, 0), (8, 4)))],
        [("a", Box((4, 2), (8, 6)))],
    ]
    tables = [holding(name, weights, boxes) for name, boxes in zip(("x", "y", "z"), held, strict=True)]
    joined = join_sources(manifest, tables)
    assert not joined.incomplete
    needs = [(0, whole((8, 6))), (0, Box((2, 1), (7, 5))), (1, Box((1,), (3,)))]
    asked = request("w", joined.manifest_digest, needs)
    plans = compile_plans(joined, joined.table_digests, [asked])
    sealed = check_replicas(plans, {source: digests(plans, source, weights) for source in range(3)})
    assert sealed.root() == root(manifest, [digest_box(weights[n], (0,) * weights[n].dim()) for n in ("a", "b")])
    memories = {
        source.source: memory(weights, held["xyz".index(source.source)]) for source in plans.workers["w"].sources
    }
    read = carry_out(plans.workers["w"], asked, joined, memories)
    for need, tensor, digest in zip(asked.needs.needs, read, expected_digests(plans, "w", sealed).values, strict=True):
        box = Box(tuple(need.start), tuple(need.stop))
        assert torch.equal(tensor, part(weights[manifest.tensors[need.tensor].name], box))
        assert digest_box(tensor, box.start) == digest
    other = {name: tensor.clone() for name, tensor in weights.items()}
    other["a"][4, 3] += 1  # of a part that all three hold
    with pytest.raises(CkptEngineError, match=r"source x and source z both hold .* of tensor a"):
        check_replicas(
            plans, {source: digests(plans, source, (weights, weights, other)[source]) for source in range(3)}
        )


def test_a_need_that_nobody_holds_whole_is_refused_naming_what_is_missing() -> None:
    weights = some_weights(a=(8, 6), b=(5,))
    manifest = merge_tables([table(0, weights, everything(weights))]).manifest
    joined = join_sources(manifest, [holding("relay h1", weights, [("a", Box((0, 0), (5, 6)))])])
    assert joined.incomplete == {0, 1}
    inside = request("w", joined.manifest_digest, [(0, Box((1, 0), (4, 6)))])
    plans = compile_plans(joined, joined.table_digests, [inside])
    sealed = check_replicas(plans, {0: digests(plans, 0, weights)})
    assert expected_digests(plans, "w", sealed).values == [digest_box(weights["a"][1:4], (1, 0))]
    with pytest.raises(CkptEngineError, match="do not hold all of a, b"):
        sealed.root()
    for need, said in ((0, r"\[5:8, 0:6\]"), (1, r"\[0:5\]")):
        beyond = request("w", joined.manifest_digest, [(need, whole(((8, 6), (5,))[need]))])
        with pytest.raises(CkptEngineError, match=f"no source holds {said} of it any more .*source relay h1"):
            compile_plans(joined, joined.table_digests, [beyond])


def test_sources_that_hold_other_weights_than_were_sealed_are_refused() -> None:
    weights = some_weights(a=(8, 6))
    manifest = merge_tables([table(0, weights, everything(weights))]).manifest
    for other in (some_weights(a=(8, 7)), some_weights(c=(8, 6))):
        with pytest.raises(CkptEngineError, match=r"source y offers .* it holds other weights than it says"):
            join_sources(manifest, [holding("y", other, everything(other))])
    twice = [holding("y", weights, everything(weights))] * 2
    with pytest.raises(CkptEngineError, match="two sources call themselves source y"):
        join_sources(manifest, twice)
    nameless = holding("", weights, everything(weights))
    with pytest.raises(CkptEngineError, match="has no id"):
        merge_tables([nameless])


def test_a_shard_that_is_unchanged_since_another_version_is_refused_by_name() -> None:
    weights = some_weights(a=(4, 2))
    offered = table(0, weights, everything(weights))
    offered.shards[0].unchanged_since.lineage = "run"
    offered.shards[0].unchanged_since.version = 3
    with pytest.raises(CkptEngineError, match=r"tensor a .* unchanged since version 3 of lineage 'run'"):
        merge_tables([offered])
    offered.shards[0].ClearField("unchanged_since")
    assert merge_tables([offered]).parts
