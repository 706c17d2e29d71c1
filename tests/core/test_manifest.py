"""Merging what ranks offer: what is accepted, what is refused, and in which words."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable

import pytest
import torch

from ckpt_engine.core.boxes import Box, whole
from ckpt_engine.core.manifest import RootHasher, blob_digest, canonical, manifest_of
from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.core.publication import merge_tables
from ckpt_engine.v1.weights_pb2 import Manifest, Problem, SourceTable, TensorSpec
from tests.core.core_tables import everything, rows, table
from tests.sealing import root

WEIGHTS = {
    "a.weight": torch.zeros(8, 6, dtype=torch.bfloat16),
    "b.weight": torch.zeros(4, dtype=torch.float32),
    "c.scale": torch.zeros((), dtype=torch.float32),
    "d.empty": torch.zeros(0, 3, dtype=torch.bfloat16),
}
MATRIX = {"a.weight": WEIGHTS["a.weight"]}


def test_ranks_with_parts_make_one_sorted_manifest() -> None:
    matrices = {name: WEIGHTS[name] for name in ("b.weight", "a.weight")}
    merged = merge_tables([table(rank, matrices, rows(matrices, rank, 2)) for rank in range(2)])
    assert [spec.name for spec in merged.manifest.tensors] == ["a.weight", "b.weight"]
    assert [part.box for part in merged.parts[0]] == [Box((0, 0), (4, 6)), Box((4, 0), (8, 6))]
    assert [part.holders for part in merged.parts[0]] == [((0, 0, ()),), ((1, 0, ()),)]
    assert merged.bytes == 8 * 6 * 2 + 4 * 4
    assert merged.manifest_digest == blob_digest(merged.manifest_bytes)
    assert Manifest.FromString(merged.manifest_bytes) == merged.manifest
    assert merged.table_digests[1] == blob_digest(canonical(merged.tables[1]))


def test_replicas_scalars_and_empty_tensors() -> None:
    merged = merge_tables([table(rank, WEIGHTS, everything(WEIGHTS)) for rank in range(3)])
    for tensor, parts in enumerate(merged.parts):
        assert [len(part.holders) for part in parts] == [3], tensor
    assert merged.parts[2][0].box == whole(())


def test_tensors_that_are_split_alike_share_their_geometry() -> None:
    weights = {f"layer.{index}": torch.zeros(8, 6) for index in range(20)}
    merged = merge_tables([table(rank, weights, rows(weights, rank, 2)) for rank in range(2)])
    assert len({id(partition) for partition in merged.partitions}) == 1


def edited(edit: Callable[[SourceTable], object]) -> list[SourceTable]:
    tables = [table(rank, MATRIX, rows(MATRIX, rank, 2)) for rank in range(2)]
    edit(tables[1])
    return tables


def set_shard(**fields: object) -> Callable[[SourceTable], object]:
    def edit(changed: SourceTable) -> None:
        for name, value in fields.items():
            changed.shards[0].ClearField(name)
            if isinstance(value, list):
                getattr(changed.shards[0], name).extend(value)
            else:
                setattr(changed.shards[0], name, value)

    return edit


REFUSED = {
    "no tensors": ([SourceTable(id="rank 0", rank=0)], ["nothing to publish"], []),
    "no tables": ([], ["nothing to publish"], []),
    "missing part": (
        [table(0, MATRIX, rows(MATRIX, 0, 2))],
        ["missing part [4:8, 0:6]", "a.weight", "[8, 6]", "[0]"],
        [0],
    ),
    "missing whole": (edited(lambda table: table.shards.pop()), ["missing part [4:8, 0:6]"], [0]),
    "overlap": (
        edited(set_shard(start=[3, 0], stop=[7, 6])),
        ["[0:4, 0:6]", "[3:7, 0:6]", "equal or disjoint"],
        [0, 1],
    ),
    "dtypes": (
        edited(lambda table: setattr(table.tensors[0], "dtype", "float16")),
        ["disagree", "bfloat16", "float16", "a.weight"],
        [0, 1],
    ),
    "shapes": (edited(lambda table: table.tensors[0].shape.append(1)), ["disagree", "[8, 6, 1]"], [0, 1]),
    "unsupported dtype": (
        [SourceTable(id="rank 4", rank=4, tensors=[TensorSpec(name="q", dtype="int4", shape=[2])])],
        ["'int4'", "tensor q"],
        [4],
    ),
    "negative shape": ([SourceTable(id="x", tensors=[TensorSpec(name="q", dtype="int8", shape=[-2])])], ["[-2]"], []),
    "no name": ([SourceTable(id="x", tensors=[TensorSpec(dtype="int8", shape=[2])])], ["no name"], []),
    "notes of files": (
        [SourceTable(id="x", tensors=[TensorSpec(name="__metadata__", dtype="int8", shape=[2])])],
        ["'__metadata__'", "safetensors", "rename"],
        [],
    ),
    "more than memory": (
        [SourceTable(id="x", tensors=[TensorSpec(name="q", dtype="int8", shape=[1 << 61, 1 << 61, 0])])],
        ["tensor q", f"[{1 << 61}, {1 << 61}, 0]"],
        [],
    ),
    "more than memory behind a 0": (
        [SourceTable(id="x", tensors=[TensorSpec(name="q", dtype="int8", shape=[0, 1 << 61, 1 << 61])])],
        ["tensor q", f"[0, {1 << 61}, {1 << 61}]"],
        [],
    ),
    "dimensions": (
        [SourceTable(id="x", tensors=[TensorSpec(name="q", dtype="int8", shape=[1 << 61] * 300_000)])],
        ["tensor q", "300000 dimensions", "64"],
        [],
    ),
    "two of a name": (edited(lambda table: table.tensors.append(table.tensors[0])), ["two tensors", "a.weight"], [1]),
    "one rank twice": (edited(lambda table: setattr(table, "rank", 0)), ["rank 0", "its own rank"], [0]),
    "outside": (edited(set_shard(stop=[9, 6])), ["rank 1", "a.weight", "[9, 6]", "[8, 6]"], [1]),
    "backwards": (edited(set_shard(start=[8, 0], stop=[4, 6])), ["[8, 0] to [4, 6]"], [1]),
    "axes": (edited(set_shard(start=[4])), ["[4] to [8, 6]"], [1]),
    "strides": (edited(set_shard(stride=[6])), ["strides [6]"], [1]),
    "leaves its region": (edited(set_shard(offset=2)), ["bytes [2, 50)", "which has 48", "rank 1"], [1]),
    "strides leave its region": (edited(set_shard(stride=[6, 2])), ["which has 48"], [1]),
    "before its region": (edited(set_shard(stride=[-6, 1])), ["bytes [-36,"], [1]),
    "leaves its region as stored": (edited(set_shard(stored_dtype="float32")), ["bytes [0, 96)", "which has 48"], [1]),
    "stored in what cannot be cast": (edited(set_shard(stored_dtype="int16")), ["int16", "cannot cast"], [1]),
    "no region": (edited(set_shard(region=5)), ["region 5"], [1]),
    "no tensor": (edited(set_shard(tensor=3)), ["tensor 3", "has 1"], [1]),
    "region twice": (edited(lambda table: table.regions.append(table.regions[0])), ["two regions"], [1]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_whole_is_refused_with_names_and_values(case: str) -> None:
    tables, words, ranks = REFUSED[case]
    with pytest.raises(CkptEngineError) as caught:
        merge_tables(tables)
    problem = caught.value.problem
    assert problem.code == Problem.CODE_INVALID_ARGUMENT
    for word in words:
        assert word in problem.message
    assert list(problem.ranks) == ranks
    assert "a.weight" not in problem.message or list(problem.tensors) == ["a.weight"]


def test_negative_strides_within_the_region_are_fine() -> None:
    assert merge_tables(edited(set_shard(offset=36, stride=[-6, 1]))).places[1][0].offset == 36


def test_manifest_of_sorts_and_refuses_a_name_twice() -> None:
    specs = [TensorSpec(name=name, dtype="int8", shape=[1]) for name in ("b", "a")]
    assert [spec.name for spec in manifest_of(specs).tensors] == ["a", "b"]
    with pytest.raises(CkptEngineError, match="'b'"):
        manifest_of([*specs, specs[0]])


def manifest(*specs: tuple[str, str, tuple[int, ...]]) -> Manifest:
    return manifest_of(TensorSpec(name=name, dtype=dtype, shape=shape) for name, dtype, shape in specs)


def test_the_root_is_encoded_as_documented() -> None:
    encoded = b"ckpt-engine root 2\n" + struct.pack("<Q", 2)
    encoded += struct.pack("<Q1sQ4sQQQ", 1, b"a", 4, b"int8", 2, 2, 3)
    encoded += struct.pack("<Q2sQ7sQ", 2, "ä".encode(), 7, b"float32", 0)
    encoded += struct.pack("<QQ", 5, (1 << 64) - 1)
    scalar = manifest(("a", "int8", (2, 3)), ("ä", "float32", ()))
    assert root(scalar, [5, (1 << 64) - 1]) == hashlib.sha256(encoded).digest()


def test_the_root_tells_names_dtypes_shapes_and_digests_apart() -> None:
    two = manifest(("a", "int8", (2, 3)), ("b", "int8", (2, 3)))
    roots = {
        root(two, [1, 2]),
        root(two, [2, 1]),  # the contents of two tensors of one shape, swapped
        root(two, [1, 258]),
        root(manifest(("a", "int8", (3, 2)), ("b", "int8", (2, 3))), [1, 2]),
        root(manifest(("a", "int8", (6,)), ("b", "int8", (2, 3))), [1, 2]),
        root(manifest(("a", "uint8", (2, 3)), ("b", "int8", (2, 3))), [1, 2]),
        root(manifest(("a", "int8", (2, 3)), ("c", "int8", (2, 3))), [1, 2]),
        root(manifest(("a", "int8", (2, 3))), [1]),
    }
    assert len(roots) == 8
    assert all(len(each) == 32 for each in roots)
    assert RootHasher(two).root(bytes([1] + [0] * 7 + [2] + [0] * 7)) == root(two, [1, 2])
    with pytest.raises(CkptEngineError, match="1 digests were given for 2 tensors"):
        root(two, [1])
