"""Weights that one process's GPU memory holds are read by another where they lie; both are real processes.

Tests share one worker and, where nothing else is said, one trainer: starting a process with a GPU takes seconds.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.gpu.cuda_peer import SHAPES, Peer, PeerError, many_shapes
from tests.ports import free_port
from tests.waiting import eventually

WAIT_SECONDS = 60.0
SLACK_BYTES = 64 << 20
"""What the drivers and torch may keep for themselves."""

EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
POOLED = {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}


@pytest.fixture(scope="module")
def processes() -> Iterator[dict[str, Peer]]:
    kept: dict[str, Peer] = {}
    yield kept
    for peer in kept.values():
        peer.kill()


@pytest.fixture
def worker(processes: dict[str, Peer]) -> Peer:
    return usable(processes, "worker")


@pytest.fixture
def trainer(processes: dict[str, Peer]) -> Peer:
    return usable(processes, "trainer")


def usable(processes: dict[str, Peer], name: str) -> Peer:
    """The process that tests share, or a new one if a test left it without having heard its answer."""
    if name in processes and processes[name].waiting:
        processes.pop(name).kill()
    if name not in processes:
        processes[name] = Peer()
    return processes[name]


def assert_same_after_updates(trainer: Peer, worker: Peer, table: str, served: str = "", updates: int = 3) -> None:
    worker.ask("worker.open", table=table)
    for seed in range(1, 1 + updates):
        trainer.ask("trainer.fill", seed=seed)
        digests = trainer.ask("trainer.seal")
        worker.ask("worker.read")
        assert worker.ask("worker.hashes") == trainer.ask("trainer.hashes", served=served)
        assert worker.ask("worker.digests") == digests


@pytest.mark.parametrize(
    ("wishes", "served", "description", "copies"),
    [
        ({}, "", "live on the GPU", 0),
        ({"dtype": "bfloat16"}, "bfloat16", "live on the GPU", 0),
        ({"snapshot": True}, "", "copied on the GPU at each seal", 1),
        ({"snapshot": True, "dtype": "float16"}, "float16", "copied on the GPU at each seal", 1),
        ({"transport": "shared_memory"}, "", "copied at each seal", 1),
    ],
    ids=["live", "live, cast by the reader", "snapshot", "snapshot, cast", "shared memory"],
)
def test_every_bit_arrives(
    trainer: Peer, worker: Peer, wishes: dict[str, object], served: str, description: str, copies: int
) -> None:
    trainer.ask("trainer.make", shapes=SHAPES)
    published = trainer.ask("trainer.publish", **wishes)
    assert published["description"] == f"named tensors, {description}"
    assert (published["copies"], published["stays_sealed"]) == (copies, bool(copies))
    assert_same_after_updates(trainer, worker, published["table"], served)


def test_a_snapshot_stays_as_it_was_sealed(trainer: Peer, worker: Peer) -> None:
    trainer.ask("trainer.make", shapes=SHAPES)
    published = trainer.ask("trainer.publish", snapshot=True)
    worker.ask("worker.open", table=published["table"])
    trainer.ask("trainer.seal")
    sealed = trainer.ask("trainer.hashes")
    trainer.ask("trainer.fill", seed=99)
    worker.ask("worker.read")
    assert worker.ask("worker.hashes") == sealed != trainer.ask("trainer.hashes")


@pytest.mark.parametrize(
    ("settings", "description"),
    [(EXPANDABLE, "live on the GPU"), (POOLED, "copied on the GPU at each seal")],
    ids=["expandable segments", "a pool that cannot be shared"],
)
def test_memory_of_torchs_other_allocators(worker: Peer, settings: dict[str, str], description: str) -> None:
    shapes = SHAPES | many_shapes(2)
    with Peer(**settings) as trainer:
        trainer.ask("trainer.make", shapes=shapes)
        published = trainer.ask("trainer.publish")
        assert published["description"] == f"named tensors, {description}"
        assert set(published["regions"]) == {"cuda_ipc"}
        assert_same_after_updates(trainer, worker, published["table"])
        worker.ask("worker.forget")
        if not published["copies"]:
            trainer.ask("trainer.withdraw")
            assert_memory_is_given_back(trainer, sum(torch.Size(shape).numel() for shape, _ in shapes.values()))


def test_a_full_gpu_has_no_room_to_try_it_out_and_is_used_all_the_same(worker: Peer) -> None:
    """An engine may hold all memory while a trainer on its GPU publishes."""
    with Peer() as trainer:
        trainer.ask("trainer.make", shapes=SHAPES)
        trainer.ask("trainer.hog", leave=150 << 20)
        try:
            published = trainer.ask("trainer.publish")
        finally:
            trainer.ask("trainer.hog", leave=0)
        assert published["description"] == "named tensors, live on the GPU"
        assert_same_after_updates(trainer, worker, published["table"], updates=1)
        worker.ask("worker.forget")


def test_an_allocation_is_mapped_once_however_many_tensors_and_plans_use_it(trainer: Peer, worker: Peer) -> None:
    trainer.ask("trainer.withdraw")
    trainer.ask("trainer.delete")
    shapes = many_shapes()
    assert len(shapes) == 399
    trainer.ask("trainer.make", shapes=shapes)
    published = trainer.ask("trainer.publish")
    regions = len(published["regions"])
    assert regions <= trainer.ask("trainer.segments") < len(shapes)
    for _ in range(3):
        assert_same_after_updates(trainer, worker, published["table"], updates=1)
        assert worker.ask("worker.mappings") == worker.ask("worker.regions") == regions
    print(f"{len(shapes)} tensors in {regions} allocations")


def test_memory_that_moved_is_refused_until_it_is_published_again(trainer: Peer, worker: Peer) -> None:
    trainer.ask("trainer.make", shapes=SHAPES)
    published = trainer.ask("trainer.publish")
    worker.ask("worker.open", table=published["table"])
    trainer.ask("trainer.replace", name="transposed")
    with pytest.raises(PeerError, match=r"transposed.*publish again") as refused:
        trainer.ask("trainer.seal")
    assert refused.value.code == "FAILED_PRECONDITION"
    assert_same_after_updates(trainer, worker, trainer.ask("trainer.publish")["table"])


def test_withdrawing_really_frees_the_memory(trainer: Peer, worker: Peer) -> None:
    worker.ask("worker.forget")
    trainer.ask("trainer.withdraw")
    trainer.ask("trainer.delete")
    size = 4 << 30
    trainer.ask("trainer.make", shapes={"large": ([size // 8192, 4096], "bfloat16")})
    published = trainer.ask("trainer.publish")
    worker.ask("worker.open", table=published["table"])
    trainer.ask("trainer.seal")
    worker.ask("worker.read")
    trainer.ask("trainer.withdraw")
    assert worker.ask("worker.mappings") == 0
    with pytest.raises(PeerError, match="died or withdrawn") as refused:
        worker.ask("worker.read")
    assert refused.value.code == "UNAVAILABLE"
    with pytest.raises(PeerError, match=r"let go of|died or withdrawn"):
        worker.ask("worker.read", check=False)
    assert_memory_is_given_back(trainer, size)
    assert worker.ask("computes") == 2000
    with pytest.raises(PeerError, match="publish again"):
        worker.ask("worker.open", table=published["table"])


def assert_memory_is_given_back(trainer: Peer, size: int) -> None:
    before = trainer.ask("state")["free"]
    trainer.ask("trainer.delete")
    after = trainer.ask("state")["free"]
    print(f"free before {before}, after {after}: {after - before} of {size} bytes came back")
    assert after - before >= size - SLACK_BYTES


def test_a_trainer_that_is_killed_hurts_no_worker(worker: Peer) -> None:
    worker.ask("worker.forget")
    with Peer() as trainer:
        trainer.ask("trainer.make", shapes={"large": ([1 << 18, 4096], "bfloat16")} | SHAPES)
        published = trainer.ask("trainer.publish")
        worker.ask("worker.open", table=published["table"])
        trainer.ask("trainer.seal")
        worker.ask("worker.read")
        mapped = worker.ask("state")["free"]
        trainer.kill()
    with pytest.raises(PeerError) as refused:
        worker.ask("worker.read")
    assert refused.value.code == "UNAVAILABLE"
    eventually("the worker has let go", WAIT_SECONDS, lambda: worker.ask("worker.mappings") == 0)
    # The kernel takes the dead process's context down in its own time.
    free = mapped + (2 << 30) - SLACK_BYTES
    eventually("the worker has let go", WAIT_SECONDS, lambda: worker.ask("state")["free"] >= free)
    assert worker.ask("computes") == 2000


def test_two_hundred_updates_leave_nothing_behind(trainer: Peer, worker: Peer) -> None:
    trainer.ask("trainer.make", shapes=SHAPES | many_shapes(1))
    published = trainer.ask("trainer.publish")["table"]

    def cycles(first: int, count: int) -> None:
        nonlocal published
        for number in range(first, first + count):
            if number % 10 == 0:
                published = trainer.ask("trainer.publish")["table"]
            if number % 5 == 0:
                worker.ask("worker.open", table=published)
            trainer.ask("trainer.fill", seed=number)
            digests = trainer.ask("trainer.seal")
            worker.ask("worker.read")
            assert worker.ask("worker.digests") == digests

    cycles(0, 20)
    before = trainer.ask("state"), worker.ask("state")
    cycles(20, 200)
    after = trainer.ask("state"), worker.ask("state")
    print(before, after)
    for then, now in zip(before, after, strict=True):
        assert now["free"] >= then["free"] - (8 << 20)
        assert now["descriptors"] <= then["descriptors"] + 2
        assert now["threads"] <= then["threads"] + 1


@pytest.mark.usefixtures("two_gpus")
def test_shards_of_fsdp_are_read_where_they_lie(worker: Peer) -> None:
    port = free_port()
    with Peer() as first, Peer() as second:
        ranks = (first, second)
        for rank, peer in enumerate(ranks):
            peer.send(what="trainer.shard", rank=rank, world=2, port=port)
        for peer in ranks:
            peer.receive()
        tables = []
        for rank, peer in enumerate(ranks):
            published = peer.ask("trainer.publish", rank=rank, world_size=2, dtype="bfloat16")
            assert published["description"] == "FSDP2 module, live on the GPU"
            tables.append(published["table"])
        worker.ask("worker.open", table=tables)
        for step in range(3):
            for peer in ranks:
                peer.ask("trainer.step", by=0.25 * step)
                peer.ask("trainer.seal")
            worker.ask("worker.read")
            assert worker.ask("worker.hashes") == first.ask("trainer.whole_hashes", served="bfloat16")
        worker.ask("worker.forget")


@pytest.mark.parametrize("settings", [{}, EXPANDABLE], ids=["default", "expandable segments"])
@pytest.mark.usefixtures("two_gpus")
def test_gpus_that_do_not_see_each_other(settings: dict[str, str]) -> None:
    with (
        Peer(CUDA_VISIBLE_DEVICES="0", **settings) as trainer,
        Peer(CUDA_VISIBLE_DEVICES="1") as worker,
    ):
        trainer.ask("trainer.make", shapes=SHAPES | many_shapes(2))
        published = trainer.ask("trainer.publish")
        assert "cuda_ipc" in published["regions"]
        assert_same_after_updates(trainer, worker, published["table"])
        trainer.ask("trainer.withdraw")
        assert worker.ask("worker.mappings") == 0


@pytest.mark.usefixtures("two_gpus")
def test_a_worker_reads_another_gpu_that_it_sees_by_another_number() -> None:
    with Peer() as trainer, Peer(CUDA_VISIBLE_DEVICES="1,0") as worker:
        for device in (0, 1):
            trainer.ask("trainer.make", shapes=SHAPES, device=device)
            assert_same_after_updates(trainer, worker, trainer.ask("trainer.publish")["table"])
