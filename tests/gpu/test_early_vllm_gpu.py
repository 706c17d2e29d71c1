"""vLLM with stage memory on a GPU, by way of a relay of its host: right tokens after each update, graphs on, requests
running; sleep gives the memory back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckpt_engine import Trainer
from ckpt_engine.host.relay_directory import DIRECTORY
from tests.cluster import Cluster, Replica, Stream, running_cluster
from tests.conformance.weights import load
from tests.engines.serving import model_of
from tests.gpu.exact import PROMPTS, bare_models, free_bytes, live_model, sleep
from tests.gpu.gpu_server import needs_gpu_vllm, start_gpu_vllm
from tests.gpu.test_vllm_gpu import VLLM

pytestmark = [*needs_gpu_vllm, pytest.mark.timeout(400)]

STAGE = 1 << 30


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Cluster, Replica]]:
    path = tmp_path_factory.mktemp("early")
    bare_models(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(DIRECTORY, str(path / "relays"))
        with running_cluster(path / "cluster") as cluster:
            cluster.relay("a", "--memory", "256MB")
            options = ("--stage-memory", f"{STAGE}B", "--mode", "hybrid")
            replica = start_gpu_vllm(cluster, "early", path / "bare", "--enable-sleep-mode", options=options)
            cluster.relays[0].registered()
            yield cluster, replica.registered(240)


def update(trainer: Trainer, replica: Replica, **options: Any) -> tuple[int, int]:
    """An update by way of the relay; returns bytes that lay in stage memory before the pause, and the version."""
    report = trainer.update_weights(prefetch="always", **options)
    assert report.ok, f"{report}\n{replica.tail()}"
    assert report.verified
    assert {use.transport for use in report.replicas[0].transports} == {"relay_memory"}
    (worker,) = report.replicas[0].message.workers
    assert worker.early_bytes in (0, worker.bytes)
    return int(worker.early_bytes), report.version


def test_every_update_is_right_while_requests_run(served: tuple[Cluster, Replica], tmp_path: Path) -> None:
    _, replica = served
    live = live_model(tmp_path)
    with Trainer(served[0].address, lineage="early") as trainer:
        trainer.publish(live, move=True)
        streams: list[Stream] = []
        for version in range(6):
            model = model_of(tmp_path, version)
            load(live, model)
            early, _ = update(trainer, replica, pause_mode="in_place")
            assert early
            if not streams:
                streams = [Stream(lambda: VLLM.complete(replica, [3, 5, 7], 60).status_code) for _ in range(4)]
            VLLM.assert_right(replica, model, PROMPTS[version % 3], version)
        assert {status for stream in streams for status in stream.end()} <= {200}


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_gives_stage_memory_back(served: tuple[Cluster, Replica], tmp_path: Path, level: int) -> None:
    cluster, replica = served
    live = live_model(tmp_path)
    with Trainer(cluster.address, lineage=f"early-asleep-{level}") as trainer:
        trainer.publish(live, move=True)
        for seed in (30, 31):
            model = model_of(tmp_path, seed)
            load(live, model)
            update(trainer, replica)
            assert update(trainer, replica)[0], "awake, it is taken again"
            awake = free_bytes()
            sleep(cluster, level)
            assert free_bytes() - awake > 0.9 * (VLLM.cache_bytes + STAGE)
            early, version = update(trainer, replica)
            assert not early, "a replica that sleeps loses no token by reading"
            VLLM.assert_right(replica, model, PROMPTS[0], version)
