"""What is SGLang's own, on one server with two tensor parallel workers: an order for each rank, sessions, versions of
tokens, caches, routes. What every engine must do is in tests/conformance."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from ckpt_engine import CkptEngineError, Trainer
from ckpt_engine_adapters.sglang.gate import MEMORY, RELEASE_ROUTE, RESUME_ROUTE, STATE_ROUTE, SglangGate
from tests.cluster import Cluster, Replica, corrupt_after_sealing, outcomes, running_cluster
from tests.conformance.weights import load
from tests.engines.serving import UPDATES_UNDER_LOAD, check_routes, check_under_load, model_of, publish, token_of
from tests.engines.sglang_server import (
    assert_closed,
    assert_serves,
    complete,
    needs_sglang,
    start_sglang,
    streamed,
    tokens,
)
from tests.tiny_model import ROUNDING, make_tiny_qwen3, named_weights, regrets

pytestmark = needs_sglang

PROMPT = [3, 5, 7, 11, 13, 17]
LONG = 160
ROOT = "/root"
O_PROJ = "model.layers.1.self_attn.o_proj.weight"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    path = tmp_path_factory.mktemp("sglang")
    torch.set_num_threads(1)
    make_tiny_qwen3(path / "bare", weights=False)
    with running_cluster(path) as running:
        start_sglang(
            running,
            "sglang",
            path / "bare",
            "--fastapi-root-path",
            ROOT,
            tensor_parallel=2,
            options=("--mode", "hybrid"),
        ).registered(600)
        yield running


@pytest.fixture
def replica(cluster: Cluster) -> Replica:
    return cluster.replicas[0]


class Control:
    """The server's own API with the agent's token."""

    def __init__(self, replica: Replica) -> None:
        self._url, self._headers = replica.url, token_of(replica)

    def __call__(self, method: str, route: str, **body: Any) -> httpx.Response:
        return httpx.request(method, self._url + route, headers=self._headers, json=body, timeout=60)


@pytest.fixture
def control(replica: Replica) -> Control:
    return Control(replica)


class LongRequest(threading.Thread):
    """One streamed request of `count` tokens; `begun` is set when it has some."""

    def __init__(self, replica: Replica, count: int = LONG) -> None:
        super().__init__(daemon=True)
        self.begun, self.replica, self.count = threading.Event(), replica, count
        self.last: dict[str, Any] = {}
        self.start()

    def run(self) -> None:
        for event in streamed(self.replica, PROMPT, self.count):
            self.last = event
            if len(event["output_ids"]) >= 4:
                self.begun.set()

    def end(self) -> dict[str, Any]:
        self.join(120)
        assert not self.is_alive()
        return self.last


def test_nothing_is_served_before_the_first_update_and_no_root_path_leads_around_the_gate(
    replica: Replica, control: Control
) -> None:
    """SGLang's server puts the root path before every path, and its framework takes it away again."""
    assert_closed(replica)
    state = control("GET", STATE_ROUTE).json()
    assert state["paused"] is False
    assert state["released"] == []
    check_routes(replica, SglangGate, ROOT)
    for path in ("/pause_generation%0A", "/pause_generation/", "//pause_generation", "/v1/..%2Fpause_generation"):
        assert httpx.post(replica.url + path, timeout=30).status_code == 403, path


def test_each_rank_gets_its_own_order_and_installs_its_half(cluster: Cluster, replica: Replica, tmp_path: Path) -> None:
    model = model_of(tmp_path, 10)
    with Trainer(cluster.address, lineage="halves") as trainer:
        publish(trainer, model)
        for version in range(3):
            report = trainer.update_weights(version=version)
            assert report.ok, f"{report}\n{replica.tail()}"
            assert report.verified
            assert len(report.replicas[0].message.workers) == 2
        assert_serves(replica, model, 2)


def test_a_slice_that_is_corrupt_on_one_rank_closes_the_gate(
    cluster: Cluster, replica: Replica, tmp_path: Path
) -> None:
    """The flipped bit lies in the first column, so in the half of the first rank."""
    model = model_of(tmp_path, 11)
    with Trainer(cluster.address, lineage="corrupt half") as trainer:
        trainer.publish(model, move=True)
        restore = corrupt_after_sealing(trainer, dict(model.named_parameters())[O_PROJ], 1)
        report = trainer.update_weights(version=1)
        restore()
        assert outcomes(report) == {"sglang": "quarantined"}
        assert O_PROJ in report.replicas[0].problem
        assert_closed(replica)
        assert trainer.update_weights(version=2).ok
        assert_serves(replica, model, 2)


@pytest.mark.parametrize(
    "mode", ["keep", *(pytest.param(mode, marks=pytest.mark.slow) for mode in ("abort", "in_place"))]
)
def test_many_updates_while_twenty_streams_generate(
    cluster: Cluster, replica: Replica, tmp_path: Path, mode: str
) -> None:
    """Each request is answered; afterwards a new one gets the last version's tokens. The conformance suite asks every
    mode of three streams, and judges each token: all but one of twenty streams are slow tests."""
    model = check_under_load(complete, tokens, cluster, tmp_path, mode, count=20)
    assert_serves(replica, model, UPDATES_UNDER_LOAD)


def test_a_retracted_request_tells_which_version_made_which_token(
    cluster: Cluster, replica: Replica, tmp_path: Path
) -> None:
    models = [model_of(tmp_path, seed) for seed in (20, 21)]
    live = model_of(tmp_path, 99)
    with Trainer(cluster.address, lineage="spans") as trainer:
        trainer.publish(live, move=True)
        load(live, models[0])
        assert trainer.update_weights(version=1).ok
        request = LongRequest(replica)
        assert request.begun.wait(60)
        load(live, models[1])
        assert trainer.update_weights(version=2, pause_mode="keep").ok
        told = request.end()
        output = told["output_ids"]
        assert len(output) == LONG
        if "weight_versions" not in told["meta_info"]:
            pytest.skip("this SGLang (0.5.16) tells one version for all tokens of a request")
        spans = told["meta_info"]["weight_versions"]
        number, lineage = zip(*(span["version"].split(":", 2)[::2] for span in spans), strict=True)
        assert (number, lineage) == (("1", "2"), ("spans", "spans"))
        cut = spans[0]["end"]
        assert 4 <= cut < LONG
        assert (spans[0]["start"], spans[1]["start"], spans[1]["end"]) == (0, cut, LONG)
        first, second = (regrets(model, PROMPT, output) for model in models)
        assert max(first[:cut]) < ROUNDING, "tokens that are called version 1's are"
        assert max(second[cut:]) < ROUNDING, "and so are version 2's, over a cache that was made anew"
        assert max(first[cut:]) > 4 * ROUNDING, "the judge knows the versions apart"


def test_an_aborted_request_ends_with_what_it_has(cluster: Cluster, replica: Replica, tmp_path: Path) -> None:
    model = model_of(tmp_path, 22)
    with Trainer(cluster.address, lineage="aborted") as trainer:
        publish(trainer, model)
        assert trainer.update_weights(version=1).ok
        request = LongRequest(replica)
        assert request.begun.wait(60)
        assert trainer.update_weights(version=2, pause_mode="abort").ok
        told = request.end()
        assert told["meta_info"]["finish_reason"]["type"] == "abort"
        assert 4 <= len(told["output_ids"]) < LONG
        assert max(regrets(model, PROMPT, told["output_ids"])) < ROUNDING
        assert_serves(replica, model, 2)


def test_no_order_waits_for_a_request(cluster: Cluster, replica: Replica, tmp_path: Path) -> None:
    """A manifest is prepared, and refused, and weights are installed, while one request runs. SGLang, asked without a
    pause, would first wait for its end."""
    model = model_of(tmp_path, 23)
    weights = dict(named_weights(model))
    with Trainer(cluster.address, lineage="unhurried") as trainer:
        trainer.publish(weights)
        assert trainer.update_weights(version=1).ok
        request = LongRequest(replica, 400)
        assert request.begun.wait(60)
        trainer.publish({**weights, "extra.weight": torch.zeros(4, dtype=torch.bfloat16)})
        with pytest.raises(CkptEngineError, match=r"extra\.weight"):
            trainer.update_weights(version=2)
        assert request.is_alive(), "it was refused before the request ended"
        trainer.publish(weights)
        assert trainer.update_weights(version=2, pause_mode="in_place").ok
        assert request.is_alive(), "the update was there before the request ended"
        told = request.end()
        assert len(told["output_ids"]) == 400
        assert max(regrets(model, PROMPT, told["output_ids"])) < ROUNDING, "the same weights go on"


@pytest.mark.parametrize("mode", ["keep", "abort", "in_place"])
def test_caches_of_old_weights(cluster: Cluster, replica: Replica, tmp_path: Path, mode: str) -> None:
    """A prompt whose beginning is cached is asked for again after an update: no mode answers from what was cached."""
    models = [model_of(tmp_path, seed) for seed in (30, 31)]
    live = model_of(tmp_path, 98)
    prompt = list(range(100, 148))

    def cached(version: int) -> int:
        response = complete(replica, prompt)
        told: int = response.json()["meta_info"]["cached_tokens"]
        answer = tokens(response)
        assert max(regrets(models[version % 2], prompt, answer)) < ROUNDING
        assert max(regrets(models[(version + 1) % 2], prompt, answer)) > 4 * ROUNDING
        return told

    with Trainer(cluster.address, lineage=f"caches-{mode}") as trainer:
        trainer.publish(live, move=True)
        for version in (1, 2):
            load(live, models[version % 2])
            assert trainer.update_weights(version=version, pause_mode="keep" if version == 1 else mode).ok
            assert cached(version) == 0
            assert cached(version) > 0
        assert trainer.update_weights(version=3, pause_mode="keep").ok
        assert cached(2) == 0


def test_a_session_that_a_dead_agent_left_open_is_closed(
    cluster: Cluster, replica: Replica, control: Control, tmp_path: Path
) -> None:
    if "/begin_weight_update" not in control("GET", STATE_ROUTE).json()["routes"]:
        pytest.skip("this SGLang (0.5.16) has no sessions")
    model = model_of(tmp_path, 40)
    with Trainer(cluster.address, lineage="left open") as trainer:
        publish(trainer, model)
        assert trainer.update_weights(version=1).ok
        assert control("POST", "/begin_weight_update").status_code == 200
        assert control("POST", "/begin_weight_update").status_code == 400, "SGLang knows one session at a time"
        assert trainer.update_weights(version=2).ok
        assert control("POST", "/begin_weight_update").status_code == 200, "the update closed its own"
        assert control("POST", "/end_weight_update").status_code == 200
        assert_serves(replica, model, 2)


def test_memory_is_given_up_once_and_taken_back_once(
    cluster: Cluster, replica: Replica, control: Control, tmp_path: Path
) -> None:
    """SGLang's schedulers die of a second release or resume of the same memory."""
    model = model_of(tmp_path, 41)
    with Trainer(cluster.address, lineage="memory") as trainer:
        publish(trainer, model)
        assert trainer.update_weights(version=1).ok
        assert control("POST", "/pause_generation", mode="retract").status_code == 200
        for route, tags, left in [
            (RESUME_ROUTE, ["weights"], []),
            (RELEASE_ROUTE, ["kv_cache"], ["kv_cache"]),
            (RELEASE_ROUTE, ["kv_cache", "cuda_graph"], ["cuda_graph", "kv_cache"]),
            (RESUME_ROUTE, ["weights", "cuda_graph"], ["kv_cache"]),
            (RELEASE_ROUTE, [], sorted(MEMORY)),
            (RELEASE_ROUTE, ["weights"], sorted(MEMORY)),
            (RESUME_ROUTE, [], []),
            (RESUME_ROUTE, [], []),
        ]:
            assert control("POST", route, **({"tags": tags} if tags else {})).status_code == 200
            assert control("GET", STATE_ROUTE).json()["released"] == left
        assert control("POST", RELEASE_ROUTE, tags=3).status_code == 400
        assert control("POST", "/continue_generation").status_code == 200
        assert trainer.update_weights(version=2).ok
        assert_serves(replica, model, 2)
