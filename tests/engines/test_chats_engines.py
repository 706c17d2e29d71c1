"""Chats through a gateway before real vLLM servers: an interrupted chat is the one that nothing interrupted.

Two replicas with parsers for reasoning and tools serve a model that thinks and calls a tool
(tests/engines/talking_model.py); every version has the same weights, so that any leg may be cut anywhere.
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch

from ckpt_engine import Trainer
from tests.cluster import Cluster, Replica, running_cluster
from tests.engines.talking_model import PLACES, SCRIPT, THOUGHTS, make_talking_qwen3
from tests.engines.vllm_server import needs_vllm, run_in_vllm, start_vllm
from tests.gateway.gateways import GatewayProcess, running_gateway

pytestmark = needs_vllm

PARSERS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--reasoning-parser", "qwen3")
OPTIONS = ("--enable-scale-out", "--no-skip-tokenizer-init", "--max-num-seqs", "16")
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
CHAT: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "Where is it?"}],
    "tools": [TOOL],
    "temperature": 0,
    "return_token_ids": True,
    "max_tokens": 200,
}
STREAM = {"stream": True, "stream_options": {"include_usage": True}}
REASONING = "".join(THOUGHTS)
ARGUMENTS = json.dumps({"at": "".join(PLACES)})
MOST_TRIES = 200

Said = dict[str, Any]


def said(answer: httpx.Response) -> Said:
    """A chat as its caller puts it together, from a stream or not."""
    assert answer.status_code == 200, answer.text
    if not answer.headers["content-type"].startswith("text/event-stream"):
        content = answer.json()
        (choice,) = content["choices"]
        message = choice["message"]
        calls = [call["function"] for call in message.get("tool_calls") or []]
        end, usage, ids = choice, content["usage"], choice["token_ids"]
        texts = [message.get(name) or "" for name in ("content", "reasoning")]
    else:
        lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
        assert lines[-1] == "[DONE]"
        events = [json.loads(line) for line in lines[:-1]]
        assert all("error" not in event for event in events), events[-1]
        assert len({(event["id"], event["created"], event["model"]) for event in events}) == 1
        choices = [choice for event in events for choice in event["choices"]]
        assert ["role" in choice["delta"] for choice in choices] == [True] + [False] * (len(choices) - 1)
        deltas = [choice["delta"] for choice in choices]
        pieces = [call["function"] for delta in deltas for call in delta.get("tool_calls") or []]
        calls = [{name: "".join(each.get(name) or "" for each in pieces) for name in ("name", "arguments")}]
        calls = calls if pieces else []
        end, usage = choices[-1], events[-1]["usage"]
        ids = [token for choice in choices for token in choice.get("token_ids") or []]
        texts = ["".join(delta.get(name) or "" for delta in deltas) for name in ("content", "reasoning")]
    return {
        "content": texts[0].strip(),
        "reasoning": texts[1],
        "calls": [(call["name"], call["arguments"]) for call in calls],
        "ids": ids,
        "finish": (end["finish_reason"], end["stop_reason"]),
        "usage": {name: usage[name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")},
        "about": end.get("ckpt_engine"),
    }


def same(one: Said, other: Said) -> None:
    for name in one.keys() - {"about"}:
        assert one[name] == other[name], name


class Chats:
    """What the tests share: replicas, a gateway, and a trainer whose versions have equal weights."""

    def __init__(self, cluster: Cluster, gateway: GatewayProcess, trainer: Trainer) -> None:
        self.cluster, self.gateway, self.trainer = cluster, gateway, trainer
        self.version = 0

    def update(self, mode: Any) -> None:
        self.version += 1
        report = self.trainer.update_weights(version=self.version, pause_mode=mode)
        assert report.ok, report

    def ask(self, body: dict[str, Any]) -> Said:
        return said(self.gateway.post("/v1/chat/completions", body))


def _running(path: Path, replicas: int, *arguments: str) -> Iterator[Chats]:
    torch.set_num_threads(1)
    model = make_talking_qwen3(path / "bare")
    with running_cluster(path) as cluster:
        started = [start_vllm(cluster, f"r{number}", path / "bare", *OPTIONS, *arguments) for number in range(replicas)]
        for replica in started:
            replica.registered(600)
        with (
            running_gateway(path / "gateway.log", "--manager", cluster.address) as gateway,
            Trainer(cluster.address, lineage="talk") as trainer,
        ):
            trainer.publish(model)
            chats = Chats(cluster, gateway.ready(), trainer)
            chats.update("keep")
            yield chats


@pytest.fixture(scope="module")
def parsed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chats]:
    yield from _running(tmp_path_factory.mktemp("parsed"), 2, *PARSERS)


def interrupted(chats: Chats, body: dict[str, Any], whole: Said, mode: str) -> None:
    """Updates begin while chats run, until one chat has been resumed (or, in a mode that resumes none, has crossed
    versions; before an update that waits none does). All of them are the same as the whole one."""
    url = f"{chats.gateway.url}/v1/chat/completions"
    for _ in range(3 if mode == "wait" else MOST_TRIES):
        with httpx.stream("POST", url, json={**body, **STREAM}, timeout=120) as answer:
            lines = answer.iter_raw()
            first = next(lines)
            chats.update(mode)
            content = b"".join([first, *lines])
        chat = said(httpx.Response(200, headers=answer.headers, content=content))
        same(chat, whole)
        about = chat["about"]
        if about["resumes"] or (mode != "abort" and about["min_version"] != about["max_version"]):
            return
    assert mode == "wait", "no update met a chat"


def test_a_chat_is_the_engines_own(parsed: Chats) -> None:
    """Streamed or not: reasoning, tool calls, ids, the end and the usage are those that vLLM itself answers with. (In a
    stream with stop strings vLLM's text lags behind its tokens, and its parsers let markup through: `<tool_call`.)"""
    for more in ({}, STREAM, {"stop": " t10 t11"}, {"stop": "p7"}, {"max_tokens": 30, **STREAM}):
        body = {**CHAT, **more}
        own = said(httpx.post(f"{parsed.cluster.replicas[0].url}/v1/chat/completions", json=body, timeout=120))
        ours = parsed.ask(body)
        assert "not_resumable" not in ours["about"]
        assert ours["about"]["exact"]
        same(ours, own)
    whole = parsed.ask(CHAT)
    assert (whole["reasoning"], whole["calls"]) == (REASONING, [("look", ARGUMENTS)])
    assert (whole["finish"], whole["usage"]["completion_tokens"]) == (("tool_calls", None), len(SCRIPT))


@pytest.mark.parametrize("mode", ["abort", "keep", "wait", "in_place"])
def test_updates_interrupt_no_chat(parsed: Chats, mode: str) -> None:
    """In the middle of reasoning and of a tool call."""
    interrupted(parsed, CHAT, parsed.ask(CHAT), mode)


def test_a_stop_string_ends_a_resumed_chat(parsed: Chats) -> None:
    """In the middle of a call: what has come of it is there."""
    body = {**CHAT, "stop": ["p30 p31 "]}
    whole = parsed.ask({**body, **STREAM})
    (call,) = whole["calls"]
    assert (whole["finish"], call[1].strip()[-7:]) == (("tool_calls", "p30 p31 "), "p28 p29")
    interrupted(parsed, body, whole, "abort")


def test_openais_client_reads_them(parsed: Chats, tmp_path: Path) -> None:
    bodies = [{name: value for name, value in CHAT.items() if name != "return_token_ids"}]
    bodies.append({**bodies[0], **STREAM})
    (tmp_path / "asked").write_text(json.dumps({"url": parsed.gateway.url, "bodies": bodies}))
    for found in run_in_vllm("tests.engines.chat_reader", tmp_path / "asked"):
        assert (found["reasoning"], found["name"]) == (REASONING, "look")
        assert found["arguments"] == ARGUMENTS
        assert (found["finish"], found["usage"], found["ids"]) == ("tool_calls", len(SCRIPT), 1)


def test_a_replica_that_is_killed_costs_no_chat(parsed: Chats) -> None:
    """It is stopped while its chat runs, so that nothing more comes of it, and then killed."""
    whole = parsed.ask(CHAT)
    url = f"{parsed.gateway.url}/v1/chat/completions"
    for _ in range(MOST_TRIES):
        with httpx.stream("POST", url, json={**CHAT, **STREAM}, timeout=300) as answer:
            lines = answer.iter_raw()
            first = next(lines)
            stopped = [each for replica in parsed.cluster.replicas if running(replica) for each in processes(replica)]
            for process in stopped:
                process.send_signal(signal.SIGSTOP)
            for process in stopped:
                process.kill()
            content = b"".join([first, *lines])
        chat = said(httpx.Response(200, headers=answer.headers, content=content))
        same(chat, whole)
        if stopped:
            for replica in parsed.cluster.replicas:
                replica.serving(parsed.version, 300)
        if any(leg["ended"] == "broken" for leg in chat["about"]["legs"]):
            return
    pytest.fail("no kill met a chat")


def running(replica: Replica) -> bool:
    """Whether its engine has a request inside."""
    metrics = httpx.get(f"{replica.url}/metrics", timeout=60).text
    counts = re.findall(r"^vllm:num_requests_running(?:\{[^}]*\})? ([0-9.]+)$", metrics, re.M)
    return sum(map(float, counts)) > 0


def processes(replica: Replica) -> list[psutil.Process]:
    """The engine's, without the agent that started it."""
    found: list[psutil.Process] = psutil.Process(replica.process.pid).children(recursive=True)
    return found


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, parsed: Chats) -> Iterator[Chats]:
    """Without parsers: what the model says is all content."""
    parsed.cluster.close()
    yield from _running(tmp_path_factory.mktemp("plain"), 1)


def test_without_parsers_all_is_content(plain: Chats) -> None:
    body = {name: value for name, value in CHAT.items() if name != "tools"} | {"logprobs": True, "top_logprobs": 2}
    (replica,) = plain.cluster.replicas
    kept = {"stop": " t5", "include_stop_str_in_output": True, **STREAM}
    for more in ({}, STREAM, {"stop": "p3 p4"}, kept):
        own = said(httpx.post(f"{replica.url}/v1/chat/completions", json={**body, **more}, timeout=120))
        ours = plain.ask({**body, **more})
        assert "not_resumable" not in ours["about"]
        same(ours, own)
    interrupted(plain, body, plain.ask(body), "abort")
