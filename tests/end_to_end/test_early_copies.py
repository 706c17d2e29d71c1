"""Workers with stage memory, on real processes: a version is there and verified before the engine pauses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpt_engine import Trainer
from ckpt_engine.host.relay_directory import DIRECTORY
from ckpt_engine.trace import ENVIRONMENT
from tests.cluster import Cluster, generate, outcomes, running_cluster
from tests.end_to_end.conftest import PADDED_VOCABULARY
from tests.end_to_end.test_ready_before_the_pause import PAUSE, RESUME, InOrder
from tests.faults.listener import Listener
from tests.tiny_model import make_tiny_qwen3, reference_tokens

PROMPT = [3, 1, 4, 1, 5]


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[Listener]:
    with Listener(tmp_path / "trace") as found:
        yield found


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    monkeypatch.setenv(DIRECTORY, str(tmp_path / "relays"))
    with running_cluster(tmp_path / "cluster") as found:
        yield found


@pytest.mark.parametrize("prefetch", ["always", "never"])
def test_the_pause_reads_from_stage_memory_only(
    tmp_path: Path, bare_model: Path, cluster: Cluster, listener: Listener, prefetch: str
) -> None:
    model = make_tiny_qwen3(tmp_path / "model", 3, vocabulary=PADDED_VOCABULARY, weights=False)
    cluster.relay("a", "--memory", "64MB").registered()
    options = ("--stage-memory", "auto")
    environment = {ENVIRONMENT: str(listener.path)}
    replica = cluster.replica("one", "reference", bare_model, options=options, environment=environment)
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
            assert worker.early_bytes == worker.bytes == outcome.nbytes
            assert generate(replica, PROMPT, 5) == reference_tokens(model, PROMPT, 5).tokens
