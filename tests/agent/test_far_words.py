"""Far workers' words in the gate's page: never better than the truth, whatever comes late or twice."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from ckpt_engine.agent.leading import FarSlots
from ckpt_engine.gate.page import EnginePage, WorkerSlot, verdict
from ckpt_engine.machines.nodes.far import FarWorkers
from ckpt_engine.v1 import manager_pb2, weights_pb2

BOOT, OTHER = b"b" * 16, b"o" * 16


def identity(version: int) -> weights_pb2.Identity:
    return weights_pb2.Identity(lineage="run", version=version, root=bytes([version]) * 32)


def told(
    state: manager_pb2.WorkerState, epoch: int = 0, version: int | None = None, rank: int = 1, boot: bytes = BOOT
) -> manager_pb2.WorkerStatus:
    status = manager_pb2.WorkerStatus(rank=rank, boot_id=boot, pid=7, state=state, epoch=epoch)
    if version is not None:
        status.identity.CopyFrom(identity(version))
    return status


NONE, DIRTY, CLEAN = manager_pb2.WORKER_STATE_NONE, manager_pb2.WORKER_STATE_DIRTY, manager_pb2.WORKER_STATE_CLEAN


class Mirror(FarWorkers):
    """Its words stand in a page."""

    def __init__(self, page: EnginePage) -> None:
        self._slots = FarSlots(page)
        super().__init__(self._slots.show)

    def hear(self, node: int, *statuses: manager_pb2.WorkerStatus) -> str:
        return self.take(node, statuses, self._slots.boot_ids())


@pytest.fixture
def page(tmp_path: Path) -> EnginePage:
    return EnginePage(tmp_path / "page")


def near_worker(page: EnginePage) -> WorkerSlot:
    """The worker of this node: rank 0 of 2, clean with version 1."""
    slot = page.claim(0, 2)
    slot.clean(1, identity(1))
    return slot


@pytest.fixture
def near(page: EnginePage) -> WorkerSlot:
    return near_worker(page)


def test_a_far_worker_counts_like_one_of_this_node(page: EnginePage, near: WorkerSlot) -> None:
    mirror = Mirror(page)
    assert verdict(page.read()).reason == "worker 1 has not started"
    mirror.hear(1, told(NONE))
    assert verdict(page.read()).reason == "worker 1 holds no weights yet"
    mirror.hear(1, told(CLEAN, 1, 2))
    assert "holds another version" in verdict(page.read()).reason
    mirror.hear(1, told(CLEAN, 1, 1))
    assert verdict(page.read()).identity == identity(1)
    assert mirror.place(0) is None
    assert mirror.place(1) == (1, 7)


def test_an_order_closes_the_gate_before_it_leaves_and_old_words_do_not_open_it(
    page: EnginePage, near: WorkerSlot
) -> None:
    mirror = Mirror(page)
    mirror.hear(1, told(CLEAN, 1, 1))
    mirror.ordered(1, BOOT, 2)
    assert "worker 1 holds no whole version (epoch 2" in verdict(page.read()).reason
    mirror.hear(1, told(CLEAN, 1, 1))  # read before the order arrived
    assert not verdict(page.read()).open
    near.clean(2, identity(2))
    mirror.hear(1, told(CLEAN, 2, 2))
    assert verdict(page.read()).identity == identity(2)


def test_a_worker_that_refused_its_order_is_believed_once_it_has_told(page: EnginePage, near: WorkerSlot) -> None:
    mirror = Mirror(page)
    mirror.hear(1, told(CLEAN, 1, 1))
    mirror.ordered(1, BOOT, 2)
    mirror.accounted(1, BOOT, 1)  # of an earlier order
    mirror.hear(1, told(CLEAN, 1, 1))
    assert not verdict(page.read()).open
    mirror.accounted(1, BOOT, 2)
    assert not verdict(page.read()).open, "nothing was read since"
    mirror.hear(1, told(CLEAN, 1, 1))
    assert verdict(page.read()).identity == identity(1)


def test_a_worker_that_failed_stays_dirty(page: EnginePage, near: WorkerSlot) -> None:
    mirror = Mirror(page)
    mirror.hear(1, told(CLEAN, 1, 1))
    mirror.ordered(1, BOOT, 2)
    mirror.accounted(1, BOOT, 2)
    mirror.hear(1, told(DIRTY, 2))
    assert "worker 1 holds no whole version (epoch 2" in verdict(page.read()).reason


def test_a_node_that_is_not_heard_has_dead_workers_until_it_is_heard(page: EnginePage, near: WorkerSlot) -> None:
    mirror = Mirror(page)
    mirror.hear(1, told(CLEAN, 1, 1))
    mirror.lose(2)
    assert verdict(page.read()).open
    mirror.lose(1)
    assert "is dead" in verdict(page.read()).reason
    mirror.hear(1, told(CLEAN, 1, 1))
    assert verdict(page.read()).open


def test_a_node_that_is_lost_with_an_order_is_not_whole_when_it_is_heard_again(
    page: EnginePage, near: WorkerSlot
) -> None:
    mirror = Mirror(page)
    mirror.hear(1, told(CLEAN, 1, 1))
    mirror.ordered(1, BOOT, 2)
    mirror.lose(1)
    mirror.hear(1, told(CLEAN, 1, 1))
    assert not verdict(page.read()).open


def test_words_that_do_not_fit_are_refused_as_a_whole(page: EnginePage, near: WorkerSlot) -> None:
    mirror = Mirror(page)
    mirror.hear(1, told(CLEAN, 1, 1))
    for wrong, message in (
        (told(CLEAN, 1, 1, rank=0), "nodes 0 and 1 both have a worker 0"),
        (told(CLEAN, 1, 1, rank=2), "tells of worker 2, and there are 2 workers"),
        (told(CLEAN, 1, 1, rank=1 << 31), "tells of worker"),
        (told(CLEAN, 1, 1, boot=b"short"), "tells of worker 1"),
    ):
        assert message in mirror.hear(1, told(NONE), wrong)
        assert verdict(page.read()).open, "nothing of it was taken"
    odd = told(CLEAN, 1, 1)
    odd.identity.root = b"short"
    assert "what no state word can hold" in mirror.hear(1, odd)
    assert "nodes 1 and 2 both have a worker 1" in mirror.hear(2, told(CLEAN, 1, 1))
    assert not mirror.ordered(1, OTHER, 2), "no node has told of it"
    mirror.hear(1, told(CLEAN, 1, None))
    assert not verdict(page.read()).open, "clean without an identity is not clean"


def test_far_words_die_with_the_agent_that_wrote_them(page: EnginePage, near: WorkerSlot, tmp_path: Path) -> None:
    import subprocess
    import sys

    code = """
import sys
from pathlib import Path
from ckpt_engine.agent.leading import FarSlots
from ckpt_engine.machines.nodes.events import ShowWord
from ckpt_engine.gate.page import CLEAN, EnginePage
from ckpt_engine.v1 import weights_pb2
identity = weights_pb2.Identity(lineage="run", version=1, root=bytes([1]) * 32)
FarSlots(EnginePage(Path(sys.argv[1]))).show(ShowWord(1, b"b" * 16, True, CLEAN, 1, identity))
print("written", flush=True)
sys.stdin.read()
"""
    agent = subprocess.Popen(
        [sys.executable, "-c", code, str(page.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert agent.stdout is not None
        assert agent.stdout.readline() == "written\n"
        assert verdict(page.read()).open
    finally:
        agent.kill()
        agent.wait(60)
    assert "is dead" in verdict(page.read()).reason


def test_the_page_is_never_better_than_the_far_worker(tmp_path: Path) -> None:
    """A far worker, its node's reads of it, and messages that are late, lost or repeated, in any order that a
    connection can make of them. The gate's word of it may be worse than the truth, never better."""
    for seed in range(200):
        page = EnginePage(tmp_path / f"page-{seed}")
        near_worker(page)
        messages_in_any_order(page, seed)


def messages_in_any_order(page: EnginePage, seed: int) -> None:
    chance = random.Random(seed)
    mirror = Mirror(page)
    truth = told(CLEAN, 1, 1)
    queue: list[tuple[int, manager_pb2.WorkerStatus]] = []  # in order: (epoch told as installed or 0, words)
    order = 0  # handed out, not yet acted on
    epoch = 1
    mirror.hear(1, truth)

    def tell(installed: int = 0) -> None:
        copy = manager_pb2.WorkerStatus()
        copy.CopyFrom(truth)
        queue.append((installed, copy))

    for _ in range(60):
        match chance.choice(("tell", "hear", "hear", "lose", "order", "begin", "act", "refuse", "drop", "node")):
            case "tell":
                tell()
            case "hear" if queue:
                installed, words = queue.pop(0)
                if installed:
                    mirror.accounted(1, BOOT, installed)
                mirror.hear(1, words)
            case "drop" if queue:
                queue.pop(chance.randrange(len(queue)))
            case "order" if not order:
                epoch += 1
                order = epoch
                mirror.ordered(1, BOOT, epoch)
            case "begin" if order:
                truth = told(DIRTY, order)
            case "act" if order:
                truth = told(DIRTY, order) if chance.random() < 0.5 else told(CLEAN, order, order)
                tell(order)
                order = 0
            case "refuse" if order and truth.epoch != order:
                tell(order)
                order = 0
            case "node":
                mirror.lose(1)
        shown = page.read()[1]
        if shown.alive and shown.state == CLEAN:
            assert truth.state == CLEAN, f"seed {seed}: shown clean, is dirty"
            assert shown.identity == truth.identity, f"seed {seed}"
