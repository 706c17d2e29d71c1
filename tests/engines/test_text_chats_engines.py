"""Chats by text through a gateway before real servers without routes for ids: SGLang, and vLLM as it is by default.

Two replicas serve a model that says one thing (tests/engines/talking_model.py); every version has the same weights, so
that any leg may be cut anywhere. The routes that are only passed on are asked here too: these servers have tokenizers.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from ckpt_engine import Trainer
from ckpt_engine.gateway.engines import installed_engines
from ckpt_engine.http_client.connections import Answer
from tests.cluster import Replica, running_cluster
from tests.engines.sglang_server import needs_sglang, start_sglang
from tests.engines.talking_model import IM_END, PLACES, THOUGHTS, make_talking_qwen3
from tests.engines.test_chats_engines import MOST_TRIES, Chats, processes
from tests.engines.vllm_server import needs_vllm, start_vllm
from tests.gateway.gateways import running_gateway

WORDS = [*THOUGHTS, *PLACES]
TEXT = "".join(WORDS)
SESSION = {"x-session-id": "one"}
CHAT: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "Where is it?"}],
    "temperature": 0,
    "max_tokens": 200,
}
STREAM = {"stream": True, "stream_options": {"include_usage": True}}


@pytest.fixture(
    scope="module",
    params=[pytest.param("sglang", marks=needs_sglang), pytest.param("vllm", marks=[*needs_vllm, pytest.mark.slow])],
)
def chats(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chats]:
    torch.set_num_threads(1)
    path: Path = tmp_path_factory.mktemp(request.param)
    model = make_talking_qwen3(path / "bare", [*WORDS, IM_END])
    with running_cluster(path) as cluster:
        for name in ("r0", "r1"):
            if request.param == "sglang":
                start_sglang(cluster, name, path / "bare", "--served-model-name", "tiny", tokenizer=True)
            else:
                start_vllm(cluster, name, path / "bare", "--no-skip-tokenizer-init", "--max-num-seqs", "16")
        for replica in cluster.replicas:
            replica.registered(600)
        with (
            running_gateway(path / "gateway.log", "--manager", cluster.address) as gateway,
            Trainer(cluster.address, lineage="talk") as trainer,
        ):
            trainer.publish(model)
            found = Chats(cluster, gateway.ready(), trainer)
            found.update("keep")
            yield found


def said(text: str) -> dict[str, Any]:
    """A streamed chat, as its caller puts it together."""
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    events = [json.loads(line) for line in lines[:-1]]
    assert all("error" not in event for event in events), events[-1]
    assert len({(event["id"], event["created"], event["model"]) for event in events}) == 1
    choices = [choice for event in events for choice in event["choices"]]
    roles = [bool(choice["delta"].get("role")) for choice in choices]
    assert roles == [True] + [False] * (len(choices) - 1)
    ends = [choice for choice in choices if choice["finish_reason"]]
    return {
        "text": "".join(choice["delta"].get("content") or "" for choice in choices),
        "finish": [choice["finish_reason"] for choice in ends],
        "usage": {name: events[-1]["usage"][name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")},
        "about": ends[-1]["ckpt_engine"],
    }


def assert_whole(chat: dict[str, Any], whole: dict[str, Any]) -> None:
    assert {**chat, "about": None} == {**whole, "about": None}


def ask_whole(chats: Chats) -> dict[str, Any]:
    """A chat that nothing interrupts."""
    url = f"{chats.gateway.url}/v1/chat/completions"
    found = said(httpx.post(url, json={**CHAT, **STREAM}, headers=SESSION, timeout=120).text)
    assert (found["text"], found["finish"], found["about"]["resumes"]) == (TEXT, ["stop"], 0)
    assert found["usage"]["completion_tokens"] == len(WORDS) + 1
    assert "not_resumable" not in found["about"]
    return found


@pytest.mark.parametrize("mode", ["abort", "keep", "wait", "in_place"])
def test_updates_interrupt_no_streamed_chat(chats: Chats, mode: str, request: pytest.FixtureRequest) -> None:
    if mode == "wait" and "sglang" in request.node.callspec.id:
        pytest.skip("SGLang has no such pause")
    whole = ask_whole(chats)
    url = f"{chats.gateway.url}/v1/chat/completions"
    for _ in range(3 if mode == "wait" else MOST_TRIES):
        with httpx.stream("POST", url, json={**CHAT, **STREAM}, timeout=120) as answer:
            lines = answer.iter_text()
            first = next(lines)
            chats.update(mode)
            text = "".join([first, *lines])
        chat = said(text)
        assert_whole(chat, whole)
        about = chat["about"]
        if mode == "abort" and about["resumes"]:
            assert about["resumed_by"] == "text"
            return
        if mode != "abort" and about["min_version"] != about["max_version"]:
            assert about["resumes"] == 0
            return
    assert mode == "wait", "no update met a chat"


def test_an_update_interrupts_no_whole_chat(chats: Chats) -> None:
    """It begins again, since its caller has got nothing."""
    url = f"{chats.gateway.url}/v1/chat/completions"
    for _ in range(3):
        with httpx.stream("POST", url, json=CHAT, timeout=120) as answer:
            chats.update("abort")
            content = json.loads(answer.read())
        (choice,) = content["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == (TEXT, "stop")


def inside(replica: Replica) -> int:
    """Requests that its engine has, as the gateway asks for them."""
    assert replica.status is not None
    load = installed_engines().sides[replica.status.engine.kind].load
    assert load is not None
    answer = httpx.get(f"{replica.url}{load.route}", timeout=60)
    count = load.requests(Answer(answer.status_code, {}, answer.content))
    assert count is not None, answer.text
    return count


def test_what_is_passed_on(chats: Chats) -> None:
    """The routes of OpenAI's API that are not resumed, and the tokenizer's."""
    url = chats.gateway.url
    (listed,) = httpx.get(f"{url}/v1/models", timeout=60).json()["data"]
    one = httpx.get(f"{url}/v1/models/tiny", timeout=60).json()
    assert (one["id"], one["root"], one.keys()) == ("tiny", listed["root"], listed.keys())
    assert httpx.get(f"{url}/v1/models/other", timeout=60).status_code == 404
    ids = chats.gateway.post("/tokenize", {"model": "tiny", "prompt": TEXT}).json()["tokens"]
    assert len(ids) == len(WORDS)
    back = chats.gateway.post("/detokenize", {"model": "tiny", "tokens": ids}).json()
    assert TEXT in back.values()
    body = {"model": "tiny", "input": "Where is it?", "temperature": 0, "max_output_tokens": 20}
    answer = chats.gateway.post("/v1/responses", {**body, "weight_version": {"exact_version": chats.version}})
    assert answer.status_code == 200, answer.text
    response = answer.json()
    assert "t0 t1" in json.dumps(response["output"])
    assert response["ckpt_engine"]["max_version"] == chats.version == response["weight_version_end"]
    stream = chats.gateway.post("/v1/responses", {**body, "stream": True})
    names = [line.removeprefix("event: ") for line in stream.text.splitlines() if line.startswith("event: ")]
    assert (names[0], "response.output_text.delta" in names) == ("response.created", True), names
    last = json.loads(stream.text.rstrip().rpartition("data: ")[2])
    assert last["response"]["ckpt_engine"]["max_version"] == chats.version
    embeddings = chats.gateway.post("/v1/embeddings", {"model": "tiny", "input": "Where is it?"})
    assert embeddings.status_code in (400, 404, 501), embeddings.text


@pytest.mark.slow
def test_a_replica_that_is_killed_costs_no_chat(chats: Chats) -> None:
    """Neither a stream, which goes on, nor a whole one, which begins again. The replica is stopped while they run, so
    that nothing more comes of it, and then killed."""
    url = f"{chats.gateway.url}/v1/chat/completions"
    whole = ask_whole(chats)
    name = whole["about"]["legs"][0]["replica"]
    (replica,) = [each for each in chats.cluster.replicas if each.name == name]
    for _ in range(MOST_TRIES):
        with ThreadPoolExecutor(1) as threads:
            with httpx.stream("POST", url, json={**CHAT, **STREAM}, headers=SESSION, timeout=300) as answer:
                lines = answer.iter_text()
                first = next(lines)
                beside = threads.submit(httpx.post, url, json=CHAT, headers=SESSION, timeout=300)
                both = False
                while not both and not beside.done():
                    both = inside(replica) >= 2
                stopped = processes(replica) if both else []
                for process in stopped:
                    process.send_signal(signal.SIGSTOP)
                for process in stopped:
                    process.kill()
                chat = said("".join([first, *lines]))
            content = beside.result().json()
        assert_whole(chat, whole)
        assert content["choices"][0]["message"]["content"] == TEXT
        if stopped:
            replica.serving(chats.version, 300)
        legs, other = chat["about"]["legs"], content["choices"][0]["ckpt_engine"]["legs"]
        if len(legs) == 2 and other[0]["replica"] != name:
            assert [leg["ended"] for leg in legs] == ["broken", "whole"], legs
            assert (chat["about"]["resumed_by"], legs[0]["replica"]) == ("text", name)
            return
    pytest.fail("no kill met both chats")
