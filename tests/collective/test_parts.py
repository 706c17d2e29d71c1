"""Workers' installs and trainer ranks' parts in a collective over Gloo: all members begin or none does, and what a
worker then holds is what was sealed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ckpt_engine.core.manifest import canonical
from ckpt_engine.core.problems import aborted
from ckpt_engine.engine.target import ModuleTarget
from ckpt_engine.machines.events import RunPart
from ckpt_engine.transport.collective.seat import Held
from ckpt_engine.v1 import manager_pb2, worker_pb2
from ckpt_engine.v1.weights_pb2 import Problem
from tests.collective.part_world import LIMIT, PartWorld, at_once, content, part_world
from tests.install.install_models import TensorParallel
from tests.install.install_world import Checkpoint
from tests.install.test_staging import Repacking, RepackingTarget, assert_holds, weights


def filled(size: int = 1, tied: bool = False, seed: int = 1) -> list[TensorParallel]:
    """Every rank of a model, as a file's loader would fill it."""
    weights = TensorParallel(tied=tied).checkpoint(seed)
    models = [TensorParallel(rank, size, tied=tied) for rank in range(size)]
    for model in models:
        model.load_weights(weights.items())
    return models


def same(target: ModuleTarget, model: TensorParallel) -> bool:
    expected, found = content(ModuleTarget(model)), content(target)
    return all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.fixture
def halves(tmp_path: Path) -> Iterator[PartWorld]:
    """Two ranks with weights of another dtype than is served, cut at random places, and two halves of a model."""
    targets = [ModuleTarget(TensorParallel(rank, 2)) for rank in range(2)]
    with part_world(Checkpoint(TensorParallel().checkpoint(1), 3, True), targets, tmp_path) as made:
        yield made


def test_each_worker_gets_its_part_cast_and_the_next_update_goes_over_the_same_communicator(halves: PartWorld) -> None:
    members = []
    for seed in (1, 2):
        if seed == 2:
            halves.renew(TensorParallel().checkpoint(2))
        halves.update()
        assert [taken.problem for taken in halves.taken.values()] == [None, None]
        for number, model in enumerate(filled(2, seed=seed)):
            installed = halves.installed[number]
            assert not installed.report.HasField("problem"), installed.report.problem.message
            assert installed.report.bytes == halves.plans[number].bytes
            assert {edge.transport for edge in installed.edges} == {"nccl"}
            assert "MiB of buffers" in installed.edges[0].reason
            assert ("computed nothing" in installed.edges[0].reason) == (seed == 1)
            assert b"first" in halves.ready[number].plans
            assert same(halves.workers[number].target, model)
            assert halves.workers[number].slot.state == manager_pb2.WORKER_STATE_CLEAN
        members.append([worker.installer._part._seat._member for worker in halves.workers])
    assert members[0] == members[1]


def test_tied_parameters_and_whole_workers(tmp_path: Path) -> None:
    targets = [ModuleTarget(TensorParallel(tied=True)) for _ in range(2)]
    with part_world(Checkpoint(TensorParallel(tied=True).checkpoint(1)), targets, tmp_path) as world:
        world.update()
        for target in targets:
            assert same(target, filled(tied=True)[0])


def test_what_one_worker_keeps_in_float32_and_another_in_bfloat16(tmp_path: Path) -> None:
    """The collective moves it in the served dtype, from a rank that holds float32."""
    models = [TensorParallel(dtype=kept) for kept in (torch.bfloat16, torch.float32)]
    targets = [ModuleTarget(model) for model in models]
    with part_world(Checkpoint(models[0].checkpoint(1), 3, True), targets, tmp_path) as world:
        world.update()
        size = sum(need.box.volume for need in world.workers[0].recording(world.checkpoint).needs)
        for number, target in enumerate(targets):
            installed = world.installed[number]
            assert not installed.report.HasField("problem"), installed.report.problem.message
            assert installed.report.bytes == 2 * size
            (model,) = filled()
            assert same(target, model.float() if number else model)


@pytest.mark.parametrize("published", [torch.float32, torch.bfloat16])
def test_what_has_no_memory_before_an_install_lands_beside_the_model(tmp_path: Path, published: torch.dtype) -> None:
    model = Repacking()
    target = RepackingTarget(model)
    with part_world(Checkpoint(weights(0, published), 1), [target], tmp_path) as world:
        for seed in (0, 100):
            if seed:
                world.renew(weights(seed, published))
            world.update()
            report = world.installed[0].report
            assert not report.HasField("problem"), report.problem.message
            assert report.bytes == world.plans[0].bytes
            assert (report.verified_as_loaded, report.verified) == (6, 1)
            assert_holds(model, weights(seed, published))


def test_memory_that_sleeps_is_bound_when_it_is_there_again_and_the_communicator_stays(halves: PartWorld) -> None:
    halves.update()
    kept = halves.workers[0].installer._part._seat._member
    assert kept is not None
    halves.workers[0].installer.discarding()
    assert kept.bytes == 0
    halves.renew(TensorParallel().checkpoint(2))
    assert b"first" in halves.get_ready(0, asleep=True).plans
    assert kept.bytes == 0

    def wakes() -> None:
        halves.install(0)

    at_once([lambda: halves.rank(0), lambda: halves.rank(1), wakes, lambda: halves.worker(1)])
    assert halves.workers[0].installer._part._seat._member is kept
    for number, model in enumerate(filled(2, seed=2)):
        assert same(halves.workers[number].target, model)


def test_a_no_leaves_the_old_version_whole_and_the_next_update_brings_the_new_one(halves: PartWorld) -> None:
    halves.update()
    before = [content(worker.target) for worker in halves.workers]
    halves.renew(TensorParallel().checkpoint(2))

    def refuses() -> None:
        order = halves.order(1, b"first")
        collective = manager_pb2.Collective(members=order.members, meeting=order.meeting, communicator=b"first")
        task = RunPart(halves.epoch, 0, collective, 1, LIMIT)
        halves.taken[1] = halves.ranks[1].refuse(task, aborted("its training loop went on"), None)

    at_once([lambda: halves.rank(0), refuses, lambda: halves.worker(0), lambda: halves.worker(1)])
    assert halves.taken[0].problem is not None
    assert halves.taken[0].blamed == ("rank 1",)
    for number, worker in enumerate(halves.workers):
        problem = halves.installed[number].report.problem
        assert problem.code == Problem.CODE_ABORTED
        assert "rank 1 failed: its training loop went on" in problem.message
        assert (worker.slot.state, worker.slot.epoch) == (manager_pb2.WORKER_STATE_CLEAN, 1)
        assert all(torch.equal(tensor, before[number][name]) for name, tensor in content(worker.target).items())
    halves.renew(TensorParallel().checkpoint(3))
    halves.update(b"second")
    for number, model in enumerate(filled(2, seed=3)):
        assert same(halves.workers[number].target, model)


def test_a_lead_that_cannot_be_reached_fails_getting_ready_and_is_named(halves: PartWorld) -> None:
    halves.door.close()
    ready = halves.get_ready(0)
    assert ready.problem.code == Problem.CODE_UNAVAILABLE
    assert "rank 0, which keeps the collective's meeting, cannot be reached" in ready.problem.message
    assert b"first" not in ready.plans
    assert halves.workers[0].slot.state == manager_pb2.WORKER_STATE_NONE


def test_who_fails_getting_ready_lets_nobody_wait(halves: PartWorld) -> None:
    halves.plans[1].needs_digest = b"other" * 6
    halves.update()
    assert "was prepared for other weights" in halves.ready[1].problem.message
    for taken in halves.taken.values():
        assert taken.problem is not None
        assert "b, worker 0" in taken.problem.message
    assert halves.taken[0].blamed == ("b, worker 0",)
    said = halves.installed[0].report.problem if 0 in halves.installed else halves.ready[0].problem
    assert "b, worker 0" in said.message
    assert halves.workers[0].slot.state == manager_pb2.WORKER_STATE_NONE


def test_a_plan_of_a_collective_is_refused_without_one(halves: PartWorld) -> None:
    worker = halves.workers[0]
    order = worker.order(halves.checkpoint)
    order.plan = halves.plans[0].SerializeToString()
    problem = worker.installer.install(order).report.problem
    assert problem.code == Problem.CODE_FAILED_PRECONDITION
    assert "the order has no collective" in problem.message
    assert worker.slot.state == manager_pb2.WORKER_STATE_NONE


def test_an_interrupt_in_a_ranks_part_lets_the_others_go_back_at_once(halves: PartWorld) -> None:
    def interrupted() -> Held:
        raise KeyboardInterrupt

    def rank() -> None:
        with pytest.raises(KeyboardInterrupt):
            halves.rank(0, held=interrupted)

    at_once([rank, lambda: halves.rank(1), lambda: halves.worker(0), lambda: halves.worker(1)])
    for number in range(2):
        said = halves.installed[number].report.problem if number in halves.installed else halves.ready[number].problem
        assert "rank 0 failed: its process was interrupted" in said.message
        assert halves.workers[number].slot.state == manager_pb2.WORKER_STATE_NONE
    assert halves.ranks[0]._seat.memory == 0
    halves.renew(TensorParallel().checkpoint(2))
    halves.update(b"second")
    assert same(halves.workers[0].target, filled(2, seed=2)[0])


def test_an_order_without_a_collective_gives_it_up_and_another_one_is_made_with_the_next(halves: PartWorld) -> None:
    halves.update()
    assert [rank.broken() for rank in halves.ranks] == [b"", b""]
    worker = halves.workers[0]
    plan = halves.checkpoint.plan(worker.recording(halves.checkpoint))
    order = worker_pb2.ReadyOrder(fence=worker.fence(), plan=canonical(plan), deadline_seconds=LIMIT)
    assert b"first" not in worker.installer.ready(order).plans
    assert [rank.broken() for rank in halves.ranks] == [b"first", b"first"]
