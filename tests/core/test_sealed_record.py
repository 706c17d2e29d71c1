"""The sealed record: what was sealed outlives its publisher, proves itself, and a finer cut must add up to it."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_engine.core.boxes import Box, whole
from ckpt_engine.core.manifest import canonical
from ckpt_engine.core.plan import Plans, compile_plans
from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.core.publication import join_sources, merge_tables
from ckpt_engine.core.sealed import check_replicas, packed
from ckpt_engine.core.sealed_record import ProvenRecord, RecordWriter, finer_atoms, read_record, seal_from_record
from ckpt_engine.core.topology import Choice
from ckpt_engine.digest.boxes import digest_box
from ckpt_engine.v1.weights_pb2 import Digests, Host, Problem, SealedRecord
from tests.core.core_plans import Weights, some_weights
from tests.core.core_tables import digests, everything, request, rows, table
from tests.sealing import expected_digests, record_of

SHAPES = {"a": (8, 6), "b": (4, 2), "c": (0, 3), "d": ()}


def sealed_by_two(weights: Weights) -> tuple[SealedRecord, bytes]:
    """Two ranks that split what they can, and a worker that needs three rows of `a`."""
    split = {name: weights[name] for name in ("a", "b")}
    held = [[*rows(split, rank, 2), ("c", whole((0, 3))), ("d", whole(()))] for rank in range(2)]
    publication = merge_tables([table(rank, weights, boxes) for rank, boxes in enumerate(held)])
    asked = [request("w", publication.manifest_digest, [(0, Box((1, 0), (4, 6)))])]
    plans = compile_plans(publication, publication.table_digests, asked)
    sealed = check_replicas(plans, {source: digests(plans, source, weights) for source in range(2)})
    return record_of(sealed), sealed.root()


def late(weights: Weights, recorded: ProvenRecord, needs: list[tuple[int, Box]]) -> Plans:
    """A joiner's plans, from one holder of everything that nobody had heard of when the record was made."""
    joined = join_sources(recorded.record.manifest, [table(5, weights, everything(weights))])
    asked = [request("late", joined.manifest_digest, needs)]
    return compile_plans(joined, joined.table_digests, asked, along=recorded.boxes)


def answers(plans: Plans, recorded: ProvenRecord, weights: Weights) -> dict[int, Digests]:
    asked = finer_atoms(plans, recorded)
    every = {source: digests(plans, source, weights).values for source in asked}
    found = {}
    for source, atoms in asked.items():
        places = [list(plans.atoms[source].atoms).index(atom) for atom in atoms.atoms]
        found[source] = Digests(values=[every[source][place] for place in places])
    return found


def test_needs_that_are_unions_of_recorded_cells_cost_nobody_a_digest() -> None:
    weights = some_weights(**SHAPES)
    recorded = read_record(*sealed_by_two(weights))
    plans = late(weights, recorded, [(0, whole((8, 6))), (0, Box((1, 0), (4, 6))), (1, whole((4, 2))), (3, whole(()))])
    assert finer_atoms(plans, recorded) == {}
    sealed = seal_from_record(plans, recorded, {})
    assert sealed.root() == recorded.root
    assert list(expected_digests(plans, "late", sealed).values) == [
        digest_box(weights["a"], (0, 0)),
        digest_box(weights["a"][1:4], (1, 0)),
        digest_box(weights["b"], (0, 0)),
        digest_box(weights["d"], ()),
    ]


@settings(max_examples=40)
@given(st.data())
def test_finer_needs_are_digested_by_a_holder_and_add_up(data: st.DataObject) -> None:
    weights = some_weights(**SHAPES)
    recorded = read_record(*sealed_by_two(weights))
    spans = [sorted(data.draw(st.tuples(st.integers(0, size), st.integers(0, size)))) for size in (8, 6)]
    need = Box(tuple(span[0] for span in spans), tuple(span[1] for span in spans))
    plans = late(weights, recorded, [(0, need)])
    sealed = seal_from_record(plans, recorded, answers(plans, recorded, weights))
    part = weights["a"][need.start[0] : need.stop[0], need.start[1] : need.stop[1]]
    assert list(expected_digests(plans, "late", sealed).values) == [digest_box(part, need.start)]
    assert record_of(sealed).manifest == recorded.record.manifest
    assert read_record(record_of(sealed), recorded.root).root == recorded.root, "a finer record is one of the same"


def test_a_holder_of_other_bytes_is_noticed_though_nobody_else_holds_them() -> None:
    weights = some_weights(**SHAPES)
    recorded = read_record(*sealed_by_two(weights))
    other = {name: tensor.clone() for name, tensor in weights.items()}
    other["a"][2, 3] += 1
    plans = late(other, recorded, [(0, Box((1, 0), (3, 6)))])
    with pytest.raises(CkptEngineError, match="tensor a does not add up") as caught:
        seal_from_record(plans, recorded, answers(plans, recorded, other))
    assert (caught.value.problem.code, list(caught.value.problem.tensors)) == (Problem.CODE_DATA_LOSS, ["a"])


def test_a_record_is_written_as_protobuf_writes_it() -> None:
    weights = some_weights(**SHAPES)
    record, root = sealed_by_two(weights)
    plans = late(weights, read_record(record, root), [(0, whole((8, 6)))])
    writer = RecordWriter(plans.cells)
    for seed in range(3):
        other = some_weights(seed, **SHAPES)
        sealed = check_replicas(plans, {0: digests(plans, 0, other)})
        data, digest = writer.write(sealed)
        assert (canonical(SealedRecord.FromString(data)), hashlib.sha256(data).digest()) == (data, digest)
        assert read_record(SealedRecord.FromString(data), sealed.root()).root == sealed.root()
    for values in ([], [0], [5] * 15, [1 << 63] * 16, [7] * 5000):
        assert packed(1, np.array(values, dtype=np.uint64)) == canonical(Digests(values=values))


def test_a_record_that_is_cut_like_a_known_one_proves_itself_all_the_same() -> None:
    recorded = read_record(*sealed_by_two(some_weights(**SHAPES)))
    record, root = sealed_by_two(some_weights(5, **SHAPES))
    alike = read_record(record, root, [recorded])
    assert alike.cut is recorded.cut
    assert (alike.root, alike.values.tolist()) == (root, list(record.digests))
    record.digests[0] ^= 1
    with pytest.raises(CkptEngineError, match="it is of other weights"):
        read_record(record, root, [recorded])
    record.digests[0] ^= 1
    record.cells[0].stop[0] -= 1
    with pytest.raises(CkptEngineError, match="is not in tensor a"):
        read_record(record, root, [recorded])
    del record.digests[-1]
    with pytest.raises(CkptEngineError, match="cells and"):
        read_record(record, root, [recorded])


def test_cells_are_grouped_by_the_hosts_that_hold_and_read_them_and_others_are_another_cutting() -> None:
    weights = some_weights(a=(8, 6), b=(8, 6), c=(8, 6), d=(8, 6))
    held = [[("a", whole((8, 6))), ("b", whole((8, 6))), ("c", whole((8, 6)))], [("d", whole((8, 6)))]]
    hosts = [Host(boot_id="one"), Host(boot_id="two")]
    publication = merge_tables([table(rank, weights, held[rank], host=hosts[rank]) for rank in range(2)])

    def sealed_for(*readers: tuple[str, int]) -> SealedRecord:
        """readers: host of a worker, and the tensor that it needs."""
        asked = [
            request(at, publication.manifest_digest, [(tensor, whole((8, 6)))], Host(boot_id=host))
            for at, (host, tensor) in enumerate(readers)
        ]
        plans = compile_plans(publication, publication.table_digests, asked, lambda *_: Choice("shared_memory", "near"))
        return record_of(check_replicas(plans, {source: digests(plans, source, weights) for source in range(2)}))

    assert list(sealed_for().groups) == [0, 0, 0, 1], "by their holders alone"
    both = sealed_for(("x", 0), ("x", 1), ("y", 0), ("y", 1))
    assert list(both.groups) == [0, 0, 1, 2], (
        "the workers of a host read for it, and two hosts that need the same are one"
    )
    assert list(sealed_for(("x", 0), ("y", 1)).groups) == [0, 1, 2, 3]
    root = publication.root_hasher.root(np.array(both.digests, dtype="<u8").tobytes())
    recorded = read_record(SealedRecord.FromString(canonical(both)), root)
    assert read_record(both, root, [recorded]).cut is recorded.cut
    del both.groups[:]
    alone = read_record(both, root, [recorded])
    assert alone.cut is not recorded.cut, "a record of before has no groups"
    assert alone.cutting != recorded.cutting


def test_a_piece_of_a_cell_that_nobody_holds_whole_proves_nothing() -> None:
    """Its digest would come from its holder alone."""
    weights = some_weights(**SHAPES)
    recorded = read_record(*sealed_by_two(weights))
    held = [("a", Box((1, 0), (3, 6)))]  # the cell has rows 1 to 4
    joined = join_sources(recorded.record.manifest, [table(5, weights, held)])
    asked = [request("late", joined.manifest_digest, [(0, Box((1, 0), (3, 6)))])]
    plans = compile_plans(joined, joined.table_digests, asked, along=recorded.boxes)
    sealed = seal_from_record(plans, recorded, answers(plans, recorded, weights))
    with pytest.raises(CkptEngineError, match="no source has digested all of a"):
        expected_digests(plans, "late", sealed)


def test_a_need_whose_finer_pieces_nobody_digested_is_refused() -> None:
    weights = some_weights(**SHAPES)
    recorded = read_record(*sealed_by_two(weights))
    plans = late(weights, recorded, [(0, Box((1, 0), (3, 6)))])
    sealed = seal_from_record(plans, recorded, {})
    with pytest.raises(CkptEngineError, match="no source has digested all of a"):
        expected_digests(plans, "late", sealed)
    with pytest.raises(CkptEngineError, match="1 digests for 2 finer atoms"):
        seal_from_record(plans, recorded, {0: Digests(values=[1])})


def one_more(record: SealedRecord, cell: SealedRecord.Cell) -> None:
    record.cells.append(cell)
    record.digests.append(0)
    record.groups.append(0)


BROKEN = {
    "a digest": (lambda record: record.digests.__setitem__(0, 5), "hashes to"),
    "a name": (lambda record: setattr(record.manifest.tensors[0], "name", "aa"), "hashes to"),
    "a cell too few": (lambda record: (record.cells.pop(), record.digests.pop(), record.groups.pop()), "tensor d"),
    "a group too few": (lambda record: record.groups.pop(), "6 cells and 5 groups"),
    "a digest too few": (lambda record: record.digests.pop(), "digests"),
    "out of order": (lambda record: one_more(record, record.cells[0]), "out of order"),
    "of no tensor": (lambda record: one_more(record, SealedRecord.Cell(tensor=9)), "of no tensor"),
    "beyond its tensor": (lambda record: record.cells[0].stop.__setitem__(0, 99), "not in tensor a"),
    "overlapping": (lambda record: record.cells[0].stop.__setitem__(0, 2), "overlap"),
    "unsorted": (lambda record: record.manifest.tensors.append(record.manifest.tensors.pop(0)), "sorted"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_record_must_prove_itself(case: str) -> None:
    record, root = sealed_by_two(some_weights(**SHAPES))
    change, said = BROKEN[case]
    change(record)
    with pytest.raises(CkptEngineError, match=said):
        read_record(record, root)


def test_a_record_of_other_weights_is_not_taken_for_these() -> None:
    record, _ = sealed_by_two(some_weights(1, **SHAPES))
    _, root = sealed_by_two(some_weights(2, **SHAPES))
    with pytest.raises(CkptEngineError, match="of other weights"):
        read_record(record, root)
