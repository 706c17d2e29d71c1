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
from tests.conformance.weights import load
from tests.engines.serving import UPDATES_UNDER_LOAD, check_routes, check_under_load, label_of, model_of, publish
from tests.engines.vllm_server import assert_serves, complete, needs_vllm, start_vllm, tokens
from tests.tiny_model import ROUNDING, make_tiny_qwen3, regrets

pytestmark = needs_vllm

PROMPT = [3, 5, 7]
ROOT = "/api"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    path = tmp_path_factory.mktemp("vllm")
    torch.set_num_threads(1)
    make_tiny_qwen3(path / "bare", weights=False)
    with running_cluster(path) as running:
        start_vllm(running, "vllm", path / "bare", "--root-path", ROOT, "--enable-scale-out").registered(600)
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
    "mode", ["keep", *(pytest.param(mode, marks=pytest.mark.slow) for mode in ("abort", "wait", "in_place"))]
)
def test_many_updates_while_twenty_streams_generate(cluster: Cluster, tmp_path: Path, mode: str) -> None:
    """Each request is answered; afterwards a new one gets the last version's tokens. The conformance suite asks every
    mode of three streams, and judges each token: all but one of twenty streams are slow tests."""
    model = check_under_load(complete, tokens, cluster, tmp_path, mode)
    assert_serves(cluster.replicas[0], model, UPDATES_UNDER_LOAD)


def number_of(span: dict[str, Any]) -> int:
    """The version in a span's label, VERSION:ROOT:LINEAGE."""
    return int(span["version"].split(":")[0])


def test_an_answer_tells_which_version_made_which_token(cluster: Cluster, tmp_path: Path) -> None:
    """Under the route whose answers say it, while updates are made; the gate's header says what was there before."""
    (replica,) = cluster.replicas
    models = [model_of(tmp_path, seed) for seed in (83, 84)]
    live = model_of(tmp_path, 98)
    body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 60, "temperature": 0, "ignore_eos": True}}

    def ask() -> tuple[int, dict[str, Any]] | None:
        response = httpx.post(f"{replica.url}/inference/v1/generate", json=body, timeout=120)
        if response.status_code == 503:
            return None
        assert response.status_code == 200, response.text
        return int(response.headers["x-ckpt-engine-admitted-version"]), response.json()["choices"][0]

    with Trainer(cluster.address, lineage="told") as trainer:
        trainer.publish(live, move=True)
        load(live, models[0])
        assert trainer.update_weights(version=0).ok
        streams = [Stream(ask) for _ in range(4)]
        try:
            for version in range(1, 41):  # eight, and on a busy machine until a request has lived through one
                load(live, models[version % 2])
                assert trainer.update_weights(version=version, pause_mode="keep").ok
                found = [answer for stream in streams for answer in list(stream.results) if answer is not None]
                if version >= 8 and any(was != number_of(said["weight_versions"][-1]) for was, said in found):
                    break
        finally:
            answers: list[Any] = [answer for stream in streams for answer in stream.end() if answer is not None]
    crossed = 0
    for admitted, choice in answers:
        output, spans = choice["token_ids"], choice["weight_versions"]
        assert [span["start"] for span in spans] == [0, *(span["end"] for span in spans[:-1])]
        assert spans[-1]["end"] == len(output) == 60
        assert admitted <= number_of(spans[0])
        for span in spans:
            made = output[span["start"] : span["end"]]
            model = models[number_of(span) % 2]
            assert max(regrets(model, PROMPT + output[: span["start"]], made)) < ROUNDING, (admitted, spans)
        crossed += admitted != number_of(spans[-1])
    assert crossed, "no request lived through an update"


def test_tokens_are_called_by_lineage_version_and_root(cluster: Cluster, tmp_path: Path) -> None:
    """vLLM itself says so where it tells of weights at all: /inference/v1/generate, with --enable-scale-out."""
    (replica,) = cluster.replicas
    model = model_of(tmp_path, 83)
    for lineage in ("first-run", "second-run"):
        with Trainer(cluster.address, lineage=lineage) as trainer:
            publish(trainer, model)
            assert trainer.update_weights(version=7).ok
        body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 4, "temperature": 0, "ignore_eos": True}}
        answer = httpx.post(f"{replica.url}/inference/v1/generate", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        (choice,) = answer.json()["choices"]
        label = label_of(replica)
        assert label.startswith("7:")
        assert label.endswith(f":{lineage}")
        assert choice["weight_versions"] == [{"version": label, "start": 0, "end": 4}]
