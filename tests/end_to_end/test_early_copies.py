"""Workers with stage memory, on real processes: a version is there and verified before the engine pauses."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from ckpt_engine import CkptEngineError, Client, Trainer, UpdateReport
from ckpt_engine.trace import ENVIRONMENT
from tests.cluster import Cluster, Replica, generate, outcomes, running_cluster
from tests.conformance.weights import load
from tests.end_to_end.conftest import PADDED_VOCABULARY
from tests.end_to_end.test_ready_before_the_pause import PAUSE, RESUME, InOrder
from tests.faults.listener import Held, Listener
from tests.tiny_model import make_tiny_qwen3, reference_tokens

PROMPT = [3, 1, 4, 1, 5]


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[Listener]:
    with Listener(tmp_path / "trace") as found:
        yield found


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with running_cluster(tmp_path / "cluster") as found:
        yield found


@pytest.mark.parametrize("prefetch", ["always", "never"])
def test_the_pause_reads_from_stage_memory_only(
    tmp_path: Path, bare_model: Path, cluster: Cluster, listener: Listener, prefetch: str
) -> None:
    model = make_tiny_qwen3(tmp_path / "model", 3, vocabulary=PADDED_VOCABULARY, weights=False)
    cluster.relay("a", "--memory", "64MB").registered()
    replica = staged(cluster, bare_model, listener)
    replica.registered()
    with Trainer(cluster.address, lineage="early") as trainer:
        trainer.publish(model, move=True)
        for _ in range(3):
            seen = listener.seen = InOrder()
            report = trainer.update_weights(prefetch=prefetch)
            assert outcomes(report) == {"one": "new_serving"}, replica.tail()
            first, last = seen.points.index(PAUSE), seen.points.index(RESUME)
            begin, end = seen.points.index("worker.early.begin"), seen.points.index("worker.early.verified")
            assert begin < end < first < last
            (outcome,) = report.replicas
            (worker,) = outcome.message.workers
            assert worker.early_bytes == worker.bytes == outcome.early_nbytes == outcome.nbytes
            assert "lay in stage memory before the pause" in report.details
            assert generate(replica, PROMPT, 5) == reference_tokens(model, PROMPT, 5).tokens


def staged(cluster: Cluster, model: Path, listener: Listener, name: str = "one", pool: str = "") -> Replica:
    options = ["--stage-memory", "auto", *(["--pool", pool] if pool else [])]
    return cluster.replica(name, "reference", model, options=options, environment={ENVIRONMENT: str(listener.path)})


def early_bytes(report: UpdateReport) -> int:
    return sum(worker.early_bytes for each in report.replicas for worker in each.message.workers)


def test_what_happens_while_a_version_is_brought_early(
    tmp_path: Path, bare_model: Path, cluster: Cluster, listener: Listener
) -> None:
    """A worker is stopped for a while, somebody wants to go back, and a worker is killed: what is served is whole."""
    models = [make_tiny_qwen3(tmp_path / "model", seed, vocabulary=PADDED_VOCABULARY, weights=False) for seed in (3, 4)]
    live = make_tiny_qwen3(tmp_path / "model", 5, vocabulary=PADDED_VOCABULARY, weights=False)
    tokens = [reference_tokens(model, PROMPT, 5).tokens for model in models]
    cluster.relay("a", "--memory", "64MB").registered()
    replica = staged(cluster, bare_model, listener)
    replica.registered()

    def held() -> AbstractContextManager[Held]:
        return listener.holding("worker.early.copy", lambda pid: pid == replica.workers()[0].pid)

    client = Client(cluster.address)
    with Trainer(cluster.address, lineage="early") as trainer, ThreadPoolExecutor() as threads:
        trainer.publish(live, snapshot=True)

        def update(version: int) -> Future[UpdateReport]:
            load(live, models[version % 2])
            return threads.submit(trainer.update_weights, version, prefetch="always")

        assert update(0).result(300).ok
        with held() as point:
            call = update(1)
            assert point.wait(120)
            assert generate(replica, PROMPT, 5) == tokens[0], "it serves what it held"
            (worker,) = replica.workers()
            worker.suspend()
        time.sleep(2.0)
        assert not call.done()
        worker.resume()
        assert early_bytes(call.result(300))
        assert generate(replica, PROMPT, 5) == tokens[1]

        with held() as point:
            call = update(2)
            assert point.wait(120)
            with pytest.raises(CkptEngineError, match="an update of lineage 'early' runs"):
                client.rollback(1, lineage="early")
        assert early_bytes(call.result(300))
        report = client.rollback(1, lineage="early")
        assert report.ok, report
        assert early_bytes(report), "what is gone back to is brought early, too"
        assert generate(replica, PROMPT, 5) == tokens[1]

        with held() as point:
            call = update(4)
            assert point.wait(120)
            replica.workers()[0].kill()
        assert outcomes(call.result(300)) == {"one": "quarantined"}
        replica.serving(4, 300)
        assert generate(replica, PROMPT, 5) == tokens[0]


def test_two_pools_bring_their_versions_side_by_side(
    tmp_path: Path, bare_model: Path, cluster: Cluster, listener: Listener
) -> None:
    pools = ("policy", "judge")
    replicas = {pool: staged(cluster, bare_model, listener, pool, pool) for pool in pools}
    for replica in replicas.values():
        replica.registered()

    models = {
        pool: make_tiny_qwen3(tmp_path / pool, 10 + number, vocabulary=PADDED_VOCABULARY, weights=False)
        for number, pool in enumerate(pools)
    }
    tokens = {pool: reference_tokens(model, PROMPT, 5).tokens for pool, model in models.items()}

    def run(pool: str) -> None:
        with Trainer(cluster.address, lineage=pool, pool=pool) as trainer:
            trainer.publish(models[pool], move=True)
            for _ in range(3):
                report = trainer.update_weights()
                assert outcomes(report) == {pool: "new_serving"}, replicas[pool].tail()
                assert early_bytes(report)
            assert generate(replicas[pool], PROMPT, 5) == tokens[pool]

    with ThreadPoolExecutor() as threads:
        for future in [threads.submit(run, pool) for pool in pools]:
            future.result(300)
