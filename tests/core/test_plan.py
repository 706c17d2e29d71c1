"""Plans read exactly what is needed, from whom they should; digests say whether it arrived.

Plans are carried out here on real memory: each source's region is a tensor of bytes, each piece a strided copy.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_engine.core.boxes import Box, whole
from ckpt_engine.core.plan import Plans, compile_plans
from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.core.publication import merge_tables
from ckpt_engine.core.sealed import check_replicas
from ckpt_engine.digest.boxes import digest_box
from ckpt_engine.v1.weights_pb2 import Digests, Gpu, GpuReach, Host, Problem
from tests.core.core_plans import Weights, carry_out, memory, some_weights
from tests.core.core_tables import HERE, THERE, Held, digests, everything, part, request, rows, table
from tests.sealing import expected_digests, root


def check_everything(weights: Weights, held: Sequence[Held], needs: Sequence[Sequence[tuple[int, Box]]]) -> Plans:
    """Merges, plans, carries out and digests, and compares each step with the weights themselves."""
    publication = merge_tables([table(rank, weights, boxes) for rank, boxes in enumerate(held)])
    requests = [request(("r", rank), publication.manifest_digest, each) for rank, each in enumerate(needs)]
    plans = compile_plans(publication, publication.table_digests, requests)
    memories = {f"rank {rank}": memory(weights, boxes) for rank, boxes in enumerate(held)}
    sealed = check_replicas(plans, {source: digests(plans, source, weights) for source in range(len(held))})
    names = [spec.name for spec in publication.manifest.tensors]
    by_tensor = [digest_box(weights[name], (0,) * weights[name].dim()) for name in names]
    assert sealed.root() == root(publication.manifest, by_tensor)
    for asked in requests:
        plan = plans.workers[asked.key]
        read = carry_out(plan, asked, publication, memories)
        expected = expected_digests(plans, asked.key, sealed).values
        for need, tensor, digest in zip(asked.needs.needs, read, expected, strict=True):
            assert torch.equal(
                tensor.view(torch.int16),
                part(weights[names[need.tensor]], Box(tuple(need.start), tuple(need.stop))).view(torch.int16),
            )
            assert digest_box(tensor, tuple(need.start)) == digest
        assert plan.bytes == sum(tensor.nbytes for tensor in read)
        places = [(piece.source, piece.region, piece.offset) for piece in plan.pieces]
        assert places == sorted(places)
    return plans


@st.composite
def cases(draw: st.DrawFn) -> tuple[Weights, list[Held], list[list[tuple[int, Box]]]]:
    """Tensors split over ranks by cuts on any axes, parts held by one or two ranks; workers that need any boxes."""
    shapes = draw(st.lists(st.lists(st.integers(0, 6), max_size=3).map(tuple), min_size=1, max_size=3))
    weights = some_weights(**{f"t{index}": shape for index, shape in enumerate(shapes)})
    ranks = draw(st.integers(1, 3))
    held: list[list[tuple[str, Box]]] = [[] for _ in range(ranks)]
    for name, tensor in weights.items():
        boxes = [whole(tensor.shape)]
        for axis, length in enumerate(tensor.shape):
            cut = draw(st.integers(0, length))
            boxes = [
                Box(
                    (*box.start[:axis], first, *box.start[axis + 1 :]),
                    (*box.stop[:axis], last, *box.stop[axis + 1 :]),
                )
                for box in boxes
                for first, last in ((0, cut), (cut, length))
                if first < last
            ]
        for box in boxes:
            for rank in draw(st.sets(st.integers(0, ranks - 1), min_size=1, max_size=2)):
                held[rank].append((name, box))

    def needs() -> list[tuple[int, Box]]:
        found = []
        for _ in range(draw(st.integers(0, 4))):
            tensor = draw(st.integers(0, len(shapes) - 1))
            spans = [sorted((draw(st.integers(0, size)), draw(st.integers(0, size)))) for size in shapes[tensor]]
            found.append((tensor, Box(tuple(span[0] for span in spans), tuple(span[1] for span in spans))))
        return found

    return weights, held, [needs() for _ in range(draw(st.integers(1, 3)))]


@settings(deadline=None, max_examples=80)
@given(cases())
def test_any_needs_are_read_exactly_and_digested_as_expected(
    case: tuple[Weights, list[Held], list[list[tuple[int, Box]]]],
) -> None:
    weights, held, needs = case
    if any(weights[name].numel() for name in weights) and all(
        any(name == own for boxes in held for own, _ in boxes) for name in weights
    ):
        check_everything(weights, held, needs)


def test_many_ranks_are_searched_and_read_right() -> None:
    weights = some_weights(a=(96, 4), b=(4, 96))
    held: list[Held] = [
        [("a", Box((4 * rank, 0), (4 * rank + 4, 4))), ("b", Box((0, 4 * rank), (4, 4 * rank + 4)))]
        for rank in range(24)
    ]
    check_everything(weights, held, [[(0, Box((7, 1), (50, 3))), (1, Box((0, 0), (4, 5))), (1, Box((1, 90), (2, 96)))]])


def test_atoms_are_few_and_shards_that_nobody_reads_are_digested_too() -> None:
    weights = some_weights(a=(8, 6), b=(5,))
    plans = check_everything(weights, [everything(weights)] * 2, [[(0, Box((0, 0), (4, 6)))], []])
    for source in range(2):
        boxes = [(atom.shard, list(atom.start), list(atom.stop)) for atom in plans.atoms[source].atoms]
        assert boxes == [(0, [0, 0], [4, 6]), (0, [4, 0], [8, 6]), (1, [0], [5])]
        assert plans.atoms[source].table_digest == plans.publication.table_digests[source]


def compiled(weights: Weights, ranks: int, requests: Sequence[tuple[str, Sequence[tuple[int, Box]]]]) -> Plans:
    publication = merge_tables([table(rank, weights, everything(weights)) for rank in range(ranks)])
    return compile_plans(
        publication,
        publication.table_digests,
        [request(key, publication.manifest_digest, needs) for key, needs in requests],
    )


def test_workers_spread_over_replicas_and_equal_ones_share_a_plan() -> None:
    weights = some_weights(a=(8, 6))
    halves = [Box((0, 0), (4, 6)), Box((4, 0), (8, 6))]
    plans = compiled(weights, 2, [("x", [(0, halves[0])]), ("y", [(0, halves[1])]), ("z", [(0, halves[0])])])
    assert [plans.workers[key].sources[0].rank for key in "xyz"] == [0, 1, 0]
    assert plans.workers["x"] is plans.workers["z"]
    assert plans.maps["x"] is plans.maps["z"]
    assert "share host h1" in plans.workers["x"].sources[0].reason


def test_what_cannot_be_reached_is_taken_from_elsewhere_or_refused() -> None:
    weights = some_weights(a=(8, 6))
    near, far = (table(rank, weights, everything(weights), host=host) for rank, host in enumerate((HERE, THERE)))
    both = merge_tables([near, far])
    asked = request("w", both.manifest_digest, [(0, whole((8, 6)))], THERE)
    assert compile_plans(both, both.table_digests, [asked]).workers["w"].sources[0].rank == 1
    alone = merge_tables([near])
    with pytest.raises(CkptEngineError) as caught:
        compile_plans(alone, alone.table_digests, [asked])
    assert caught.value.problem.code == Problem.CODE_FAILED_PRECONDITION
    for word in ("worker w", "tensor a", "[0:8, 0:6]", "h1", "h2"):
        assert word in caught.value.problem.message


def on_gpu(number: int) -> Host:
    host = Host(network_namespace="net:[1]", gpus=[Gpu(uuid=bytes([number]) * 16)])
    host.gpus[0].reach.add(uuid=bytes([1 - number]) * 16, link=GpuReach.LINK_NVLINK)
    host.MergeFrom(HERE)
    return host


def test_of_equal_holders_the_nearest_is_read_whatever_it_offers() -> None:
    """Two trainer ranks that hold the same on two GPUs, and a directory of files beside them."""
    weights = some_weights(a=(8, 6))
    ranks = [table(rank, weights, everything(weights), host=on_gpu(rank), transport="cuda_ipc") for rank in range(2)]
    files = table(2, weights, everything(weights), transport="file")
    publication = merge_tables([files, *ranks])
    every = ("file", "cuda_ipc", "shared_memory")
    asked = [
        request("on 0", publication.manifest_digest, [(0, whole((8, 6)))], on_gpu(0), *every),
        request("on 1", publication.manifest_digest, [(0, whole((8, 6)))], on_gpu(1), *every),
        request("on a CPU", publication.manifest_digest, [(0, whole((8, 6)))], HERE, *every),
        request("only files", publication.manifest_digest, [(0, whole((8, 6)))], on_gpu(0), "file"),
    ]
    plans = compile_plans(publication, publication.table_digests, asked)
    read = {key: (plan.sources[0].rank, plan.sources[0].transport) for key, plan in plans.workers.items()}
    assert read == {
        "on 0": (0, "cuda_ipc"),
        "on 1": (1, "cuda_ipc"),
        "on a CPU": (2, "file"),
        "only files": (2, "file"),
    }


@pytest.mark.parametrize(
    ("need", "words"),
    [
        ((1, whole((8, 6))), ("need 0", "tensor 1", "has 1")),
        ((0, whole((9, 6))), ("tensor a", "[9, 6]", "[8, 6]")),
        ((0, whole((8,))), ("tensor a", "[8]")),
        ((0, Box((5, 0), (4, 6))), ("[5, 0] to [4, 6]",)),
        ((0, Box((-1, 0), (4, 6))), ("[-1, 0]",)),
    ],
)
def test_a_need_that_does_not_fit_is_named(need: tuple[int, Box], words: tuple[str, ...]) -> None:
    with pytest.raises(CkptEngineError) as caught:
        compiled(some_weights(a=(8, 6)), 1, [("w", [need])])
    assert caught.value.problem.code == Problem.CODE_INVALID_ARGUMENT
    for word in ("worker w", *words):
        assert word in caught.value.problem.message


def test_needs_of_another_manifest_are_refused() -> None:
    publication = merge_tables([table(0, some_weights(a=(2,)), [("a", whole((2,)))])])
    with pytest.raises(CkptEngineError, match="prepare again"):
        compile_plans(publication, publication.table_digests, [request("w", b"other", [])])


def test_replicas_that_differ_are_named() -> None:
    weights = some_weights(a=(8, 6), b=(4,))
    plans = compiled(weights, 3, [("w", [(0, Box((2, 0), (3, 6)))])])
    other = {name: tensor.clone() for name, tensor in weights.items()}
    other["b"][3] += 1
    sealed = {source: digests(plans, source, weights) for source in range(3)}
    sealed[2] = digests(plans, 2, other)
    with pytest.raises(CkptEngineError) as caught:
        check_replicas(plans, sealed)
    problem = caught.value.problem
    assert (problem.code, list(problem.tensors), list(problem.ranks)) == (
        Problem.CODE_FAILED_PRECONDITION,
        ["b"],
        [0, 2],
    )
    assert "[0:4] of tensor b" in problem.message


def test_too_few_digests_and_missing_sources_are_refused() -> None:
    weights = some_weights(a=(8, 6), b=(4, 2))
    publication = merge_tables([table(rank, weights, rows(weights, rank, 2)) for rank in range(2)])
    asked = [request("all", publication.manifest_digest, [(0, whole((8, 6)))])]
    plans = compile_plans(publication, publication.table_digests, [*asked])
    with pytest.raises(CkptEngineError, match="rank 1 answered with 1 digests for 2 atoms"):
        check_replicas(plans, {0: digests(plans, 0, weights), 1: Digests(values=[1])})
    half = check_replicas(plans, {0: digests(plans, 0, weights)})
    for call in (half.root, lambda: expected_digests(plans, "all", half)):
        with pytest.raises(CkptEngineError, match="no source has digested all of a"):
            call()


def test_geometry_is_worked_out_once_for_tensors_that_are_split_alike() -> None:
    """Counts work and not time: 2,000 tensors of one shape cost as much geometry as one."""
    weights = {f"layer.{index:04}": torch.zeros(8, 6) for index in range(2000)}
    publication = merge_tables([table(rank, weights, rows(weights, rank, 2)) for rank in range(2)])
    needs = [(tensor, Box((0, 0), (8, 3))) for tensor in range(2000)]
    plans = compile_plans(publication, publication.table_digests, [request("w", publication.manifest_digest, needs)])
    assert len(set(map(id, publication.partitions))) == 1
    assert len(set(map(id, plans.cells.tilings))) == 1
    assert len(plans.workers["w"].pieces) == 2 * 2000
    assert sum(len(atoms.atoms) for atoms in plans.atoms.values()) == 4 * 2000


def test_a_region_is_read_by_the_nearest_way_into_it_and_digested_once() -> None:
    """The same memory, lent over CUDA IPC and as a file: whichever is near, there is one set of atoms."""
    weights = some_weights(a=(8, 6))
    both = table(0, weights, everything(weights), host=on_gpu(0), transport="file")
    both.regions[0].offers.add(transport="cuda_ipc", locator=b"handle")
    publication = merge_tables([both])
    asked = [
        request(name, publication.manifest_digest, [(0, whole((8, 6)))], host, "file", "cuda_ipc")
        for name, host in (("gpu", on_gpu(1)), ("cpu", HERE))
    ]
    plans = compile_plans(publication, publication.table_digests, asked)
    read = {key: plan.sources[0] for key, plan in plans.workers.items()}
    assert {key: source.transport for key, source in read.items()} == {"gpu": "cuda_ipc", "cpu": "file"}
    assert [(region.transport, region.locator) for region in read["gpu"].regions] == [("cuda_ipc", b"handle")]
    assert len(plans.atoms[0].atoms) == 1


def test_why_no_way_into_a_region_reaches_is_said_for_each() -> None:
    weights = some_weights(a=(8, 6))
    both = table(0, weights, everything(weights), transport="file")
    both.regions[0].offers.add(transport="cuda_ipc")
    publication = merge_tables([both])
    asked = request("w", publication.manifest_digest, [(0, whole((8, 6)))], HERE, "shared_memory")
    with pytest.raises(CkptEngineError) as caught:
        compile_plans(publication, publication.table_digests, [asked])
    for word in ("worker w", "tensor a", "rank 0", "over file", "over cuda_ipc"):
        assert word in caught.value.problem.message


def test_one_worker_is_not_planned_for_twice() -> None:
    weights = some_weights(a=(2,))
    publication = merge_tables([table(0, weights, everything(weights))])
    asked = request("w", publication.manifest_digest, [(0, whole((2,)))])
    with pytest.raises(CkptEngineError, match="worker w is in the request twice"):
        compile_plans(publication, publication.table_digests, [asked, asked])
