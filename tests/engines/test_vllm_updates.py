"""Many updates of one vLLM server under load. What any engine must do is asked in tests/conformance."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from ckpt_engine import Trainer
from ckpt_engine_adapters.vllm.gate import VllmGate
from tests.cluster import Cluster, Stream, running_cluster
from tests.conformance.weights import load, of_either_version
from tests.engines.serving import check_routes, model_of
from tests.engines.vllm_server import assert_serves, complete, needs_vllm, start_vllm, tokens
from tests.tiny_model import make_tiny_qwen3, reference_tokens

pytestmark = needs_vllm

PROMPT = [3, 5, 7]
ROOT = "/api"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    path = tmp_path_factory.mktemp("vllm")
    torch.set_num_threads(1)
    make_tiny_qwen3(path / "bare", weights=False)
    with running_cluster(path) as running:
        start_vllm(running, "vllm", path / "bare", "--root-path", ROOT).registered(400)
        yield running


def test_a_root_path_leads_nobody_around_the_gate(cluster: Cluster) -> None:
    """vLLM takes it away before it looks for a route."""
    (replica,) = cluster.replicas
    check_routes(replica, VllmGate, ROOT)
    for path in ("/sleep?level=2", "/pause%0A", "/pause/", "//pause", "/collective_rpc", "/v1/..%2Fpause"):
        assert httpx.post(f"{replica.url}{ROOT}{path}", timeout=30).status_code == 403, path
    assert httpx.get(f"{replica.url}{ROOT}/health", timeout=30).status_code == 200
    assert httpx.get(f"{replica.url}{ROOT}/ckpt_engine/info", timeout=30).status_code == 200


@pytest.mark.parametrize(
    ("mode", "updates"),
    [("keep", 50), *(pytest.param(mode, 50, marks=pytest.mark.slow) for mode in ("abort", "wait", "in_place"))],
)
def test_many_updates_while_twenty_streams_generate(cluster: Cluster, tmp_path: Path, mode: str, updates: int) -> None:
    """Every answer consists of tokens of whole versions; afterwards a new request gets the last version's tokens."""
    (replica,) = cluster.replicas
    models = [model_of(tmp_path, seed) for seed in (80, 81)]
    live = model_of(tmp_path, 98)
    statuses: list[int] = []

    def ask() -> list[int]:
        response = complete(replica, PROMPT, 60)
        statuses.append(response.status_code)
        return tokens(response) if response.status_code == 200 else []

    with Trainer(cluster.address, lineage=f"streams-{mode}") as trainer:
        trainer.publish(live)
        load(live, models[0])
        assert trainer.update_weights(version=0).ok
        streams = [Stream(ask) for _ in range(20)]
        try:
            for version in range(1, updates + 1):
                load(live, models[version % 2])
                report = trainer.update_weights(version=version, pause_mode=mode)
                assert report.ok, f"{report}\n{replica.tail()}"
        finally:
            answers: list[Any] = [answer for stream in streams for answer in stream.end()]
        assert set(statuses) == {200}, "no request fails because weights change"
        whole = [answer for answer in answers if answer]
        assert len(whole) >= 20
        if mode != "abort":
            assert {len(answer) for answer in whole} == {60}, "a request that was let in ends as it should"
        if mode != "in_place":  # there new tokens are made over caches of old weights
            for answer in set(map(tuple, whole)):
                assert of_either_version(models, PROMPT, answer), answer
        strange = reference_tokens(model_of(tmp_path, 82), PROMPT, 60).tokens
        assert not of_either_version(models, PROMPT, strange), "the judge would let other weights pass"
        assert_serves(replica, models[updates % 2], updates)
