"""What a schedule promises, for any wants: both ends of every pair agree, each byte comes once to those who want it and
to nobody else, nobody waits in a circle, and memory stays in its bound."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_engine.core.boxes import Box, whole
from ckpt_engine.core.collective import CollectiveMember, Schedule, arrange, make_schedule
from ckpt_engine.core.collective_buckets import LEAST_BUCKET_BYTES, BoxWant, wants_of
from ckpt_engine.core.collective_plan import collective_plan, read_collective_plan
from ckpt_engine.core.plan import compile_plans
from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.core.publication import merge_tables
from ckpt_engine.v1.weights_pb2 import PlanSource, WorkerPlan
from tests.core.collective_run import Run, StuckError, slices
from tests.core.core_plans import some_weights
from tests.core.core_tables import request, rows, table

Case = tuple[tuple[CollectiveMember, ...], list[BoxWant], list[int], list[tuple[int, ...]]]


def members_of(sources: int, workers: int, hosts: int = 1) -> tuple[CollectiveMember, ...]:
    return arrange(
        [
            *(CollectiveMember(f"rank {number}", f"host {number % hosts}", True) for number in range(sources)),
            *(CollectiveMember(f"worker {number}", f"host {number % hosts}", False) for number in range(workers)),
        ]
    )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Tensors whose rows are dealt out to sources, each row to one; workers that want any boxes, also none."""
    members = members_of(draw(st.integers(1, 3)), draw(st.integers(1, 5)), draw(st.integers(1, 3)))
    sources = [number for number, member in enumerate(members) if member.is_source]
    workers = [number for number, member in enumerate(members) if not member.is_source]
    shapes, widths, wants = [], [], []
    for tensor in range(draw(st.integers(1, 4))):
        shape = tuple(draw(st.lists(st.integers(0, 40), max_size=3)))
        shapes.append(shape)
        widths.append(draw(st.sampled_from([1, 2, 4, 8])))
        kinds = [
            tuple(sorted((draw(st.integers(0, extent)), draw(st.integers(0, extent)))) for extent in shape)
            for _ in range(draw(st.integers(1, 3)))
        ]
        for worker in workers:
            kind = draw(st.sampled_from([None, whole(shape), *kinds]))
            if kind is None:
                continue
            box = kind if isinstance(kind, Box) else Box(*zip(*kind, strict=True)) if shape else whole(shape)
            wants += [BoxWant(worker, source, tensor, part) for source, part in dealt(box, shape, sources)]
    return members, wants, widths, shapes


def dealt(box: Box, shape: tuple[int, ...], sources: Sequence[int]) -> list[tuple[int, Box]]:
    """The parts of a box by the source that holds them: the first axis is dealt out evenly."""
    if not shape:
        return [(sources[0], box)]
    found = []
    for number, source in enumerate(sources):
        first, last = shape[0] * number // len(sources), shape[0] * (number + 1) // len(sources)
        start, stop = max(first, box.start[0]), min(last, box.stop[0])
        if start < stop:
            found.append((source, Box((start, *box.start[1:]), (stop, *box.stop[1:]))))
    return found


def check(
    schedule: Schedule, wants: Sequence[BoxWant], widths: Sequence[int], shapes: Sequence[tuple[int, ...]]
) -> None:
    """Carries the schedule out and compares what came with what was wanted."""
    run = Run(schedule, shapes)
    run.run(random.Random(len(wants)).sample(range(len(schedule.members)), len(schedule.members)))
    expected = {key: np.zeros_like(arrived) for key, arrived in run.arrived.items()}
    of_source: dict[tuple[int, int], np.ndarray] = {}
    for want in wants:
        expected[want.worker, want.tensor][slices(want.box)] = 1
        held = of_source.setdefault((want.source, want.tensor), np.zeros(shapes[want.tensor], bool))
        held[slices(want.box)] = True
    for key, arrived in run.arrived.items():
        assert np.array_equal(arrived, expected[key]), key
    for member, each in enumerate(schedule.members):
        if each.is_source:
            once = sum(int(held.sum()) * widths[t] for (source, t), held in of_source.items() if source == member)
            pieces = sum(len(b.pieces) for b in schedule.buckets if b.chain[0] == member)
            assert once <= schedule.sent(member) <= once + 64 * pieces, "each byte leaves its source once"
        steps = schedule.steps[member]
        assert [step.round for step in steps] == sorted({step.round for step in steps})


@settings(max_examples=60, deadline=None)
@given(cases(), st.integers(LEAST_BUCKET_BYTES, 4 * LEAST_BUCKET_BYTES), st.integers(2, 4))
def test_any_wants_are_fulfilled_once_and_nobody_waits_in_a_circle(case: Case, most: int, slots: int) -> None:
    members, wants, widths, shapes = case
    schedule = make_schedule(members, wants, widths, most, slots)
    check(schedule, wants, widths, shapes)
    assert schedule.slot_bytes <= most
    assert all(used <= slots for used in schedule.slots)
    mixed = random.Random(1).sample(wants, len(wants))
    assert make_schedule(members, mixed, widths, most, slots) == schedule, "it is a function of the wants alone"


@settings(max_examples=10, deadline=None)
@given(cases())
def test_pieces_lie_in_their_bucket_beside_each_other(case: Case) -> None:
    members, wants, widths, _ = case
    for bucket in make_schedule(members, wants, widths, LEAST_BUCKET_BYTES).buckets:
        end = 0
        for piece in bucket.pieces:
            assert piece.offset >= end
            assert piece.offset % widths[piece.tensor] == 0
            end = piece.offset + piece.box.volume * widths[piece.tensor]
        assert end == bucket.bytes


def test_a_chain_is_pipelined_through_all_who_want_the_same() -> None:
    """Eight workers have everything but seven rounds after one worker alone would have."""
    shapes, widths = [(1024, 64)], [2]
    rounds = []
    for workers in (1, 8):
        members = members_of(1, workers)
        wants = [BoxWant(1 + number, 0, 0, whole(shapes[0])) for number in range(workers)]
        schedule = make_schedule(members, wants, widths, 1 << 12)
        check(schedule, wants, widths, shapes)
        rounds.append(1 + max(steps[-1].round for steps in schedule.steps))
        assert schedule.slots == (2,) * len(members)
        assert schedule.memory(0) == 2 << 12
    assert rounds == [32, 32 + 7]


def test_two_who_want_different_halves_are_sent_their_halves_only() -> None:
    members = members_of(1, 2)
    wants = [BoxWant(1, 0, 0, Box((0, 0), (32, 64))), BoxWant(2, 0, 0, Box((32, 0), (64, 64)))]
    schedule = make_schedule(members, wants, [2], 1 << 10)
    check(schedule, wants, [2], [(64, 64)])
    assert schedule.received(1) == schedule.received(2) == 32 * 64 * 2
    assert schedule.sent(1) == schedule.sent(2) == 0
    assert schedule.sent(0) == 64 * 64 * 2


def test_the_simulation_notices_a_schedule_in_which_two_wait_for_each_other() -> None:
    members = members_of(1, 2)
    schedule = make_schedule(members, [BoxWant(number, 0, 0, Box((0,), (2048,))) for number in (1, 2)], [1], 1 << 10)
    last = schedule.steps[2]
    swapped = (last[1]._replace(round=last[0].round), last[0]._replace(round=last[1].round))
    broken = Schedule(members, schedule.buckets, (*schedule.steps[:2], swapped), schedule.slots, schedule.slot_bytes)
    with pytest.raises((StuckError, AssertionError)):
        Run(broken, [(2048,)]).run(range(3))


def test_wants_come_from_the_edges_of_plans() -> None:
    weights = some_weights(a=(8, 4), b=(6,))
    held = [[*rows({"a": weights["a"]}, 0, 2), ("b", whole((6,)))], rows({"a": weights["a"]}, 1, 2)]
    publication = merge_tables([table(rank, weights, boxes, transport="file") for rank, boxes in enumerate(held)])
    needs = [[(0, whole((8, 4))), (1, whole((6,)))], [(0, Box((2, 0), (6, 4)))]]
    asked = [request(("r", rank), publication.manifest_digest, each) for rank, each in enumerate(needs)]
    plans = compile_plans(publication, publication.table_digests, asked)
    members = members_of(2, 2)
    sources = {"rank 0": 0, "rank 1": 1}
    wants = [
        want
        for number, each in enumerate(asked)
        for want in wants_of(plans.workers[each.key], each.needs, 2 + number, sources, "file")
    ]
    schedule = make_schedule(members, wants, [2, 2])
    check(schedule, wants, [2, 2], [(8, 4), (6,)])
    both, one = 16, 64 + 12  # one: a, what aligns b, and b
    assert [schedule.sent(number) for number in (0, 1)] == [both + one, 32]
    assert not wants_of(plans.workers[asked[0].key], asked[0].needs, 2, sources, "shared_memory")
    with pytest.raises(CkptEngineError, match="rank 1 is read over file, but is not a member"):
        wants_of(plans.workers[asked[0].key], asked[0].needs, 2, {"rank 0": 0}, "file")


@settings(max_examples=15, deadline=None)
@given(cases(), st.randoms(use_true_random=False))
def test_a_plan_makes_the_same_schedule_wherever_it_is_read(case: Case, order: random.Random) -> None:
    members, wants, widths, _ = case
    dtypes = [{1: "int8", 2: "bfloat16", 4: "float32", 8: "int64"}[width] for width in widths]
    sent = collective_plan(members, wants, dtypes, 1 << 12, 3)
    assert sent == collective_plan(members, order.sample(wants, len(wants)), dtypes, 1 << 12, 3)
    schedule, read = read_collective_plan(sent)
    assert (schedule, list(read)) == (make_schedule(members, wants, widths, 1 << 12, 3), dtypes)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_a_damaged_plan_is_refused_or_is_another_plan(data: st.DataObject) -> None:
    wants = [BoxWant(number, 0, 0, Box((0, 0), (8, 64))) for number in (1, 2)]
    sent = bytearray(collective_plan(members_of(1, 2), wants, ["int64"], 1 << 10))
    for _ in range(data.draw(st.integers(1, 3))):
        sent[data.draw(st.integers(0, len(sent) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(CkptEngineError):
        read_collective_plan(bytes(sent))


def test_what_cannot_be_is_refused() -> None:
    members = members_of(1, 1)
    with pytest.raises(CkptEngineError, match="rank 0 and worker 0 are on one GPU"):
        arrange([CollectiveMember("rank 0", "h", True, b"g"), CollectiveMember("worker 0", "h", False, b"g")])
    with pytest.raises(CkptEngineError, match="rank 0 is in the collective twice"):
        arrange([CollectiveMember("rank 0", "h", True), CollectiveMember("rank 0", "g", True)])
    with pytest.raises(CkptEngineError, match="rank 0 wants something of worker 0"):
        make_schedule(members, [BoxWant(0, 1, 0, Box((0,), (1,)))], [2])
    with pytest.raises(CkptEngineError, match="member 9 wants something of member 0, but there are 2"):
        make_schedule(members, [BoxWant(9, 0, 0, Box((0,), (1,)))], [2])
    with pytest.raises(CkptEngineError, match="tensor 1, but there are 1"):
        make_schedule(members, [BoxWant(1, 0, 1, Box((0,), (1,)))], [2])
    with pytest.raises(CkptEngineError, match="buckets of 8 bytes are too small"):
        make_schedule(members, [], [2], 8)
    with pytest.raises(CkptEngineError, match="1 slots are too few"):
        make_schedule(members, [], [2], slots=1)
    for broken, said in (
        (b"\xff", "cannot be read"),
        (collective_plan(members, [], ["int8"], 1 << 40), "is too large"),
        (collective_plan(members[::-1], [], ["int8"]), "not in the order of their ranks"),
        (collective_plan(members, [BoxWant(1, 0, 0, Box((0,), (1 << 50,)))], ["int8"]), "has more than 1048576"),
        (collective_plan(members, [BoxWant(1, 0, 0, Box((4,), (1,)))], ["int8"]), r"wants \[4\] to \[1\] of tensor 0"),
        (collective_plan(members, [], ["float6"]), "dtype 'float6' is not supported"),
    ):
        with pytest.raises(CkptEngineError, match=said):
            read_collective_plan(broken)
    plan = WorkerPlan(sources=[PlanSource(source="rank 0", transport="nccl")])
    plan.pieces.add(source=3)
    with pytest.raises(CkptEngineError, match="of source 3 and need 0, and one of them is missing"):
        wants_of(plan, request("w", b"", [(0, Box((0,), (1,)))]).needs, 1, {"rank 0": 0}, "nccl")
