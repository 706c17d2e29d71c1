"""A gateway before a real vLLM and before a real SGLang: interrupted requests go on, each token under its version."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from ckpt_engine import Trainer
from tests.cluster import Cluster, Replica, running_cluster
from tests.engines.sglang_server import needs_sglang, start_sglang
from tests.engines.vllm_server import PYTHON as VLLM_PYTHON
from tests.engines.vllm_server import needs_vllm, start_vllm
from tests.gateway.chaos import take
from tests.gateway.gateways import GatewayProcess, running_gateway
from tests.tiny_model import ROUNDING, make_tiny_qwen3, regrets

PROMPT = [3, 5, 7]
COUNTS = (150, 120, 90, 60)
"""Tokens of each stream's requests. Streams of one length would end all at once, and no update would meet one."""
UPDATES, MOST_UPDATES = 4, 150
"""So many at least; then until one has met a request in the middle."""

COMPLETION = {"model": "tiny", "prompt": PROMPT, "temperature": 0, "return_token_ids": True}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {**COMPLETION, "ignore_eos": True},
    "/inference/v1/generate": {
        "token_ids": PROMPT,
        "sampling_params": {"temperature": 0, "ignore_eos": True},
    },
    "/generate": {
        "input_ids": PROMPT,
        "sampling_params": {"temperature": 0, "ignore_eos": True},
        "return_logprob": True,
    },
}


def _cluster(path: Path, start: Callable[..., Replica], *arguments: str) -> Iterator[tuple[Cluster, GatewayProcess]]:
    torch.set_num_threads(1)
    make_tiny_qwen3(path / "bare", weights=False)
    with running_cluster(path) as cluster:
        start(cluster, "one", path / "bare", *arguments).registered(600)
        with running_gateway(path / "gateway.log", "--manager", cluster.address) as gateway:
            yield cluster, gateway.ready()


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Cluster, GatewayProcess]]:
    yield from _cluster(tmp_path_factory.mktemp("vllm"), start_vllm, "--enable-scale-out")


@pytest.fixture(scope="module")
def sglang(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Cluster, GatewayProcess]]:
    yield from _cluster(tmp_path_factory.mktemp("sglang"), start_sglang)


def body_of(route: str, count: int) -> dict[str, Any]:
    """For so many tokens."""
    if route == "/v1/completions":
        return {**BODIES[route], "max_tokens": count}
    name = "max_tokens" if route == "/inference/v1/generate" else "max_new_tokens"
    return {**BODIES[route], "sampling_params": {**BODIES[route]["sampling_params"], name: count}}


class Asking(threading.Thread):
    """Asks for so many tokens again and again until `end`. found: the answers."""

    def __init__(self, gateway: GatewayProcess, route: str, count: int, body: dict[str, Any] | None = None) -> None:
        super().__init__(daemon=True)
        self._gateway, self._route, self._ended = gateway, route, threading.Event()
        self._body = body or body_of(route, count)
        self.found: list[httpx.Response] = []
        self.start()

    def run(self) -> None:
        while not self._ended.is_set():
            self.found.append(self._gateway.post(self._route, self._body))

    def end(self) -> list[httpx.Response]:
        self._ended.set()
        self.join(180)
        assert not self.is_alive()
        return self.found


def resumes_of(answer: httpx.Response) -> int:
    """Of its one sample."""
    content = answer.json() if answer.status_code == 200 else {}
    said = content["meta_info"] if "meta_info" in content else content.get("choices", [{}])[0]
    return int(said.get("ckpt_engine", {}).get("resumes", 0))


def played(cluster: Cluster, gateway: GatewayProcess, path: Path, route: str) -> tuple[list[Any], Sequence[Any]]:
    """Answers to requests that ran while weights changed, half of the times with every request aborted; and the weights
    of version v at v modulo their number."""
    models = [make_tiny_qwen3(path / f"weights-{number}", number) for number in range(3)]
    model = make_tiny_qwen3(path / "model", 0)
    with Trainer(cluster.address, lineage=f"run {route}") as trainer:
        trainer.publish(model, move=True)
        assert trainer.update_weights(version=0).ok
        asking = [Asking(gateway, route, count) for count in COUNTS]
        try:
            for version in range(1, MOST_UPDATES + 1):
                seen = sum(len(each.found) for each in asking)
                while sum(len(each.found) for each in asking) == seen:
                    asking[0].join(0.05)
                take(model, models[version % 3])
                assert trainer.update_weights(version=version, pause_mode="abort" if version % 2 else "keep").ok
                if version >= UPDATES and any(resumes_of(found) for each in asking for found in each.found):
                    break
        finally:
            answers = [answer for each in asking for answer in each.end()]
    for answer in answers:
        assert answer.status_code == 200, f"{answer.text}\n{gateway.tail()}"
    return [answer.json() for answer in answers], models


def check(tokens: list[int], said: dict[str, Any], models: Sequence[Any]) -> bool:
    """Whether it crossed versions; each token is the greedy one of the version that it is said to be of."""
    assert len(tokens) in COUNTS
    assert sum(span["count"] for span in said["spans"]) == len(tokens)
    for span in said["spans"]:
        assert span["exact"], said
        found = regrets(models[span["version"] % 3], PROMPT, tokens)[span["first"] : span["first"] + span["count"]]
        assert max(found) < ROUNDING, said
    return bool(said["min_version"] != said["max_version"])


@pytest.mark.parametrize("mark", [pytest.param(None, marks=needs_vllm)])
def test_vllm_says_on_its_last_chunk_which_version_made_each_token(
    vllm: tuple[Cluster, GatewayProcess], tmp_path: Path, mark: None
) -> None:
    answers, models = played(*vllm, tmp_path, "/inference/v1/generate")
    choices = [answer["choices"][0] for answer in answers]
    crossed = [check(choice["token_ids"], choice["ckpt_engine"], models) for choice in choices]
    assert any(crossed)
    assert any(choice["ckpt_engine"]["resumes"] for choice in choices)


@pytest.mark.parametrize("mark", [pytest.param(None, marks=needs_vllm)])
def test_vllms_completions_are_resumed_and_say_ranges(
    vllm: tuple[Cluster, GatewayProcess], tmp_path: Path, mark: None
) -> None:
    answers, _ = played(*vllm, tmp_path, "/v1/completions")
    for answer in answers:
        (choice,) = answer["choices"]
        assert len(choice["token_ids"]) in COUNTS
        assert not choice["ckpt_engine"]["exact"]
        assert 0 <= choice["ckpt_engine"]["min_version"] <= choice["ckpt_engine"]["max_version"] <= MOST_UPDATES
    assert any(answer["choices"][0]["ckpt_engine"]["resumes"] for answer in answers)


ECHO = {**COMPLETION, "echo": True, "logprobs": 1, "return_tokens_as_token_ids": True}


@pytest.mark.parametrize("mark", [pytest.param(None, marks=needs_vllm)])
@pytest.mark.parametrize("most", [0, 5])
def test_vllms_echo_comes_through_with_the_version_that_made_it(
    vllm: tuple[Cluster, GatewayProcess], tmp_path: Path, most: int, mark: None
) -> None:
    cluster, gateway = vllm
    with Trainer(cluster.address, lineage=f"echo of {most}") as trainer:
        trainer.publish(make_tiny_qwen3(tmp_path / "model", 0))
        assert trainer.update_weights(version=7).ok
    (replica,) = cluster.replicas
    body = {**ECHO, "max_tokens": most}
    (expected,) = httpx.post(f"{replica.url}/v1/completions", json=body, timeout=120).json()["choices"]
    answer = gateway.post("/v1/completions", body, x_ckpt_engine_version="7")
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    assert choice["logprobs"]["tokens"] == expected["logprobs"]["tokens"]
    assert len(choice["logprobs"]["tokens"]) == len(PROMPT) + most
    for ours, vllms in zip(choice["logprobs"]["token_logprobs"], expected["logprobs"]["token_logprobs"], strict=True):
        assert ours == (None if vllms is None else pytest.approx(vllms, abs=0.05))
    assert choice["token_ids"] == (expected["token_ids"] if most else [])
    assert (choice["prompt_token_ids"], choice["finish_reason"]) == (PROMPT, "length")
    said = choice["ckpt_engine"]
    assert (said["prompt"]["first"], said["prompt"]["count"], said["prompt"]["version"]) == (0, len(PROMPT), 7)
    assert [leg["ended"] for leg in said["legs"]] == ["whole"]


@pytest.mark.parametrize("mark", [pytest.param(None, marks=needs_vllm)])
def test_what_is_passed_on_to_vllm_is_never_cut_off(
    vllm: tuple[Cluster, GatewayProcess], tmp_path: Path, mark: None
) -> None:
    """With log-probabilities of the prompt, which vLLM does not stream; its answer to an update is a part of it."""
    cluster, gateway = vllm
    body = {**COMPLETION, "ignore_eos": True, "max_tokens": 60, "prompt_logprobs": 0, "detokenize": False}
    with Trainer(cluster.address, lineage="passed on") as trainer:
        trainer.publish(make_tiny_qwen3(tmp_path / "model", 0))
        assert trainer.update_weights(version=0).ok
        asking = Asking(gateway, "/v1/completions", 60, body)
        try:
            for version in range(1, MOST_UPDATES + 1):
                seen = len(asking.found)
                while len(asking.found) == seen and not inside(gateway):
                    asking.join(0.01)
                assert trainer.update_weights(version=version, pause_mode="abort").ok
                if 'ended="aborted"' in httpx.get(f"{gateway.url}/metrics", timeout=60).text:
                    break
        finally:
            answers = asking.end()
        assert version < MOST_UPDATES
    for answer in answers:
        assert answer.status_code == 200, f"{answer.text}\n{gateway.tail()}"
        (choice,) = answer.json()["choices"]
        assert (choice["finish_reason"], len(choice["token_ids"])) == ("length", 60)
        assert choice["ckpt_engine"]["spans"][0]["count"] == 60
        assert 0 <= choice["ckpt_engine"]["min_version"] <= version
        assert int(answer.headers["x-ckpt-engine-admitted-version"]) >= choice["ckpt_engine"]["min_version"]


def inside(gateway: GatewayProcess) -> bool:
    """Whether a request runs or waits in the gateway."""
    lines = httpx.get(f"{gateway.url}/metrics", timeout=60).text.splitlines()
    return any(line.startswith("ckpt_engine_gateway_requests_inside ") and line[-3:] != "0.0" for line in lines)


@pytest.mark.parametrize("mark", [pytest.param(None, marks=needs_sglang)])
def test_sglang_says_on_its_last_event_which_version_made_each_token(
    sglang: tuple[Cluster, GatewayProcess], tmp_path: Path, mark: None
) -> None:
    answers, models = played(*sglang, tmp_path, "/generate")
    metas = [answer["meta_info"] for answer in answers]
    crossed = [check(answer["output_ids"], answer["meta_info"]["ckpt_engine"], models) for answer in answers]
    assert any(crossed)
    assert any(meta["ckpt_engine"]["resumes"] for meta in metas)
    assert all(len(meta["output_token_logprobs"]) in COUNTS for meta in metas)


def asked_with_openais_client(kind: str, url: str, version: int) -> dict[str, dict[str, Any]]:
    """What it found at each of its calls; vLLM's environment has it."""
    command = [VLLM_PYTHON, str(Path(__file__).parent / "openai_asking.py"), kind, url, str(version)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return {line.pop("call"): line for line in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize("mark", [pytest.param(None, marks=needs_vllm)])
def test_openais_client_asks_vllm_and_gateway_for_versions(
    vllm: tuple[Cluster, GatewayProcess], tmp_path: Path, mark: None
) -> None:
    cluster, gateway = vllm
    with Trainer(cluster.address, lineage="asked") as trainer:
        trainer.publish(make_tiny_qwen3(tmp_path / "model", 0))
        assert trainer.update_weights(version=7).ok
    (replica,) = cluster.replicas
    at_gate, at_gateway = (
        asked_with_openais_client(*each, 7) for each in (("gate", replica.url), ("gateway", gateway.url))
    )
    for found in (at_gate, at_gateway):
        for name in ("exact", "least"):
            assert (found[name]["tokens"], found[name]["start"], found[name]["end"]) == (4, 7, 7), found
        assert (found["stream"]["start"], found["stream"]["end"]) == (7, 7), found
        assert found["gone"] == {"error": "ConflictError", "status": 409, "code": "version_gone"}
    assert at_gate["exact"]["header"] == "7"
    assert at_gate["not yet"] == {"error": "ConflictError", "status": 409, "code": "version_not_yet"}
    assert (at_gateway["not yet"]["status"], at_gateway["not yet"]["code"]) == (503, "version_not_yet")
    assert at_gateway["model"] == {"model": "tiny"}


class AskingExactly(threading.Thread):
    """Asks a replica itself, again and again until `end`, for tokens of exactly the version that a test names. found:
    each such version and the answer."""

    def __init__(self, url: str, route: str, count: int, version: int) -> None:
        super().__init__(daemon=True)
        self._url, self._route, self._body, self._ended = url, route, body_of(route, count), threading.Event()
        self.version = version
        self.found: list[tuple[int, httpx.Response]] = []
        self.start()

    def run(self) -> None:
        while not self._ended.is_set():
            version = self.version
            body = {**self._body, "weight_version": {"exact_version": version}}
            self.found.append((version, httpx.post(f"{self._url}{self._route}", json=body, timeout=180)))

    def end(self) -> list[tuple[int, httpx.Response]]:
        self._ended.set()
        self.join(180)
        assert not self.is_alive()
        return self.found

    def has(self, reason: str) -> bool:
        return any(answer.status_code != 200 and answer.json()["reason"] == reason for _, answer in self.found)


def check_exact(cluster: Cluster, path: Path, route: str) -> None:
    """No answer has a token of another version than the one that was asked for, by the engine's own labels, which the
    gate does not look at; and one was given up, as an update came in the middle of it."""
    (replica,) = cluster.replicas
    with Trainer(cluster.address, lineage=f"exact {route}") as trainer:
        trainer.publish(make_tiny_qwen3(path / "model", 0), move=True)
        assert trainer.update_weights(version=0).ok
        asking = AskingExactly(replica.url, route, 100, 0)
        try:
            for version in range(1, MOST_UPDATES + 1):
                seen = len(asking.found)
                while len(asking.found) < seen + version % 2:
                    asking.join(0.02)
                assert trainer.update_weights(version=version).ok
                asking.version = version
                if version >= UPDATES and asking.has("version_changed"):
                    break
        finally:
            answers = asking.end()
    assert asking.has("version_changed")
    whole = [(version, answer.json()) for version, answer in answers if answer.status_code == 200]
    assert whole
    for version, answer in whole:
        said = answer["meta_info"] if "meta_info" in answer else answer["choices"][0]
        assert {label["version"].split(":")[0] for label in said["weight_versions"] or ()} <= {str(version)}, said
        stamped = answer.get("meta_info", answer)
        assert (stamped["weight_version_start"], stamped["weight_version_end"]) == (version, version)
    refused = {answer.json()["reason"] for _, answer in answers if answer.status_code != 200}
    assert refused <= {"version_changed", "version_gone", "version_not_yet", "updating"}


@pytest.mark.parametrize("mark", [pytest.param(None, marks=needs_vllm)])
def test_vllms_gate_gives_no_token_of_another_version(
    vllm: tuple[Cluster, GatewayProcess], tmp_path: Path, mark: None
) -> None:
    check_exact(vllm[0], tmp_path, "/inference/v1/generate")


@pytest.mark.parametrize("mark", [pytest.param(None, marks=needs_sglang)])
def test_sglangs_gate_gives_no_token_of_another_version(
    sglang: tuple[Cluster, GatewayProcess], tmp_path: Path, mark: None
) -> None:
    check_exact(sglang[0], tmp_path, "/generate")


@pytest.mark.parametrize("mark", [pytest.param(None, marks=needs_vllm)])
def test_a_server_that_lacks_a_route_says_so_through_the_gateway(
    vllm: tuple[Cluster, GatewayProcess], tmp_path: Path, mark: None
) -> None:
    """This model does not embed, so vLLM has no such route."""
    cluster, gateway = vllm
    with Trainer(cluster.address, lineage="routes") as trainer:
        trainer.publish(make_tiny_qwen3(tmp_path / "model", 0))
        assert trainer.update_weights(version=1).ok
    refused = gateway.post("/v1/embeddings", {"model": "tiny", "input": "Call me"})
    assert (refused.status_code, refused.json()["reason"]) == (501, "no_dialect"), refused.text
