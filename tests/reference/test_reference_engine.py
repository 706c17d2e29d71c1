"""The reference engine as its users and an agent see it: real server, real workers, weights through our own channel.

What pause modes do to running requests is asked in tests/conformance, of this engine too.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from ckpt_engine import TokenScores
from ckpt_engine.engine.adapter import EngineCallError
from ckpt_engine.gate.page import EnginePage, HoldLimits, RequestHold
from ckpt_engine.integrations.scoring import model_score
from ckpt_engine.v1 import manager_pb2, weights_pb2
from tests.reference.conftest import PADDED_VOCABULARY, TOKENS, Version
from tests.reference.engine_process import CALL_SECONDS, EngineProcess, events, generate
from tests.reference.tiny_agent import RefusedError, TinyAgent
from tests.tiny_model import DECISIVE_GAP, ROUNDING, reference_tokens, regrets
from tests.waiting import until

Versions = tuple[Version, Version]
LONG = 400  # tokens; enough that a pause comes in the middle, and not more than the model has room for
BEGUN = 3  # tokens after which a pause is sent
KEEP, ABORT, WAIT = manager_pb2.PAUSE_MODE_KEEP, manager_pb2.PAUSE_MODE_ABORT, manager_pb2.PAUSE_MODE_WAIT


@contextlib.asynccontextmanager
async def serving(engine: EngineProcess, version: Version) -> AsyncIterator[tuple[TinyAgent, httpx.AsyncClient]]:
    """The engine awake and running with `version`. Ends every request afterwards, whatever a test did."""
    async with engine.driven() as adapter, TinyAgent(engine, adapter) as agent, engine.client() as client:
        await adapter.wake((), CALL_SECONDS)
        await adapter.pause(KEEP, CALL_SECONDS)
        await agent.install(version.model, version.number)
        await adapter.resume(CALL_SECONDS)
        try:
            yield agent, client
        finally:
            await adapter.pause(ABORT, CALL_SECONDS)
            await adapter.resume(CALL_SECONDS)


async def begin(client: httpx.AsyncClient, version: Version, length: int = LONG) -> asyncio.Task[dict[str, Any]]:
    """A long streaming request of which some tokens have come; the task gives its last event."""
    begun = asyncio.Event()

    async def read() -> dict[str, Any]:
        count, last = 0, {}
        async for last in events(client, version.prompt, length):  # noqa: B007
            count += 1
            if count == BEGUN:
                begun.set()
        return last

    task = asyncio.create_task(read())
    async with asyncio.timeout(CALL_SECONDS):
        await begun.wait()
    return task


async def finished(task: asyncio.Task[dict[str, Any]]) -> dict[str, Any]:
    async with asyncio.timeout(CALL_SECONDS):
        return await task


@pytest.mark.parametrize("which", ["one_worker", "two_workers"])
async def test_greedy_tokens_equal_those_of_transformers(
    which: str, versions: Versions, request: pytest.FixtureRequest
) -> None:
    engine: EngineProcess = request.getfixturevalue(which)
    for version in versions:
        expected = reference_tokens(version.model, version.prompt, TOKENS)
        assert expected.gap > DECISIVE_GAP
        async with serving(engine, version) as (_, client):
            answer = await generate(client, version.prompt, TOKENS)
        assert answer["output_ids"] == expected.tokens
        assert answer["weight_versions"] == [{"version": version.number, "start": 0, "end": TOKENS}]
        assert answer["finish_reason"] == "length"


async def test_requests_beside_each_other_do_not_mix(one_worker: EngineProcess, versions: Versions) -> None:
    version = versions[0]
    prompts = [version.prompt[: 1 + number] for number in range(6)] * 2  # more than run at once
    async with serving(one_worker, version) as (_, client):
        together = await asyncio.gather(*(generate(client, prompt, 12, logprobs=True) for prompt in prompts))
        alone = [await generate(client, prompt, 12, logprobs=True) for prompt in prompts[:6]]
    assert together == alone * 2


async def test_a_stream_has_one_event_a_token_and_the_result_last(
    two_workers: EngineProcess, versions: Versions
) -> None:
    version = versions[0]
    async with serving(two_workers, version) as (_, client):
        whole = await generate(client, version.prompt, TOKENS, logprobs=True)
        *tokens, last = [event async for event in events(client, version.prompt, TOKENS, logprobs=True)]
    assert [event["token"] for event in tokens] == whole["output_ids"]
    assert [event["logprob"] for event in tokens] == whole["logprobs"]
    assert {event["version"] for event in tokens} == {version.number}
    assert last == whole


async def test_logprobs_are_those_of_the_model(one_worker: EngineProcess, versions: Versions) -> None:
    import torch

    version = versions[0]
    async with serving(one_worker, version) as (_, client):
        answer = await generate(client, version.prompt, TOKENS, logprobs=True, temperature=1.0, seed=3)
        again = await generate(client, version.prompt, TOKENS, logprobs=True, temperature=1.0, seed=3)
    assert answer == again
    tokens = torch.tensor([version.prompt + answer["output_ids"]])
    with torch.no_grad():
        logits = version.model(tokens).logits[0, len(version.prompt) - 1 : -1].float()
    expected = torch.log_softmax(logits, -1).gather(1, torch.tensor(answer["output_ids"]).unsqueeze(1)).squeeze(1)
    assert answer["logprobs"] == pytest.approx(expected.tolist(), abs=0.25)  # bfloat16, a pass at once or step by step


@pytest.mark.parametrize("which", ["one_worker", "two_workers"])
async def test_scores_are_those_of_the_model_also_while_the_gate_is_closed(
    which: str, versions: Versions, request: pytest.FixtureRequest
) -> None:
    version, tokens = versions[0], versions[0].prompt
    (expected,) = model_score(version.model)([tokens])
    assert isinstance(expected, TokenScores)
    continued = reference_tokens(version.model, tokens, 4)
    engine: EngineProcess = request.getfixturevalue(which)
    page = EnginePage(engine.directory.page)
    async with serving(engine, version) as (agent, client):
        found = await agent.adapter.score(tokens, 4, CALL_SECONDS)
        page.hold(RequestHold(1, 0.0, closed=True), HoldLimits())
        try:
            assert (await client.post("/generate", json={"input_ids": tokens, "max_tokens": 1})).status_code == 503
            assert await agent.adapter.score(tokens, 4, CALL_SECONDS) == found
        finally:
            page.hold(RequestHold(), HoldLimits())
        with pytest.raises(EngineCallError, match="exceed the model's"):
            await agent.adapter.score(tokens, 100_000, CALL_SECONDS)
    assert found.prompt == pytest.approx(list(expected.log_probabilities), abs=0.1)
    assert list(found.top) == list(expected.top)
    assert list(found.tokens) == continued.tokens


async def test_the_admitted_version_is_in_a_header_and_a_stop_token_ends_the_output(
    one_worker: EngineProcess, versions: Versions
) -> None:
    version = versions[1]
    expected = reference_tokens(version.model, version.prompt, TOKENS).tokens
    stop = expected[4]
    async with serving(one_worker, version) as (agent, client):
        body = {"input_ids": version.prompt, "max_tokens": TOKENS, "stop_token_ids": [stop]}
        answer = await client.post("/generate", json=body)
    assert answer.headers["x-ckpt-engine-admitted-version"] == str(version.number)
    assert answer.headers["x-ckpt-engine-admitted-root"] == agent.root.hex()
    assert answer.json()["output_ids"] == expected[: expected.index(stop) + 1]
    assert answer.json()["finish_reason"] == "stop"


async def test_a_body_that_comes_slowly_is_admitted_under_the_version_that_answers_it(
    one_worker: EngineProcess, versions: Versions
) -> None:
    """The gate lets the request in when all of it has come."""
    old, new = versions
    begun, installed = asyncio.Event(), asyncio.Event()

    async def slowly() -> AsyncIterator[bytes]:
        body = json.dumps({"input_ids": new.prompt, "max_tokens": TOKENS}).encode()
        yield body[:5]
        begun.set()
        await installed.wait()
        yield body[5:]

    async with serving(one_worker, old) as (agent, client):
        sent = client.post("/generate", content=slowly(), headers={"content-type": "application/json"})
        request = asyncio.create_task(sent)
        await begun.wait()
        await agent.adapter.pause(ABORT, CALL_SECONDS)
        await agent.install(new.model, new.number)
        await agent.adapter.resume(CALL_SECONDS)
        new_root = agent.root.hex()
        installed.set()
        async with asyncio.timeout(CALL_SECONDS):
            answer = await request
    assert answer.json()["output_ids"] == reference_tokens(new.model, new.prompt, TOKENS).tokens
    assert answer.json()["weight_versions"] == [{"version": new.number, "start": 0, "end": TOKENS}]
    said = {name: value for name, value in answer.headers.items() if name.startswith("x-ckpt-engine")}
    assert said == {
        "x-ckpt-engine-admitted-version": str(new.number),
        "x-ckpt-engine-admitted-root": new_root,
        "x-ckpt-engine-end-version": str(new.number),
        "x-ckpt-engine-end-root": new_root,
    }


async def test_wait_lets_running_requests_finish_with_old_weights_and_new_ones_wait(
    one_worker: EngineProcess, versions: Versions
) -> None:
    old, new = versions
    async with serving(one_worker, old) as (agent, client):
        running = await begin(client, old)
        await agent.adapter.pause(WAIT, CALL_SECONDS)
        answer = await finished(running)
        assert answer["weight_versions"] == [{"version": old.number, "start": 0, "end": LONG}]
        late = asyncio.create_task(generate(client, new.prompt, TOKENS))
        await until(lambda: one_worker.get("/info")["waiting"] == 1)
        await agent.install(new.model, new.number)
        assert not late.done()
        await agent.adapter.resume(CALL_SECONDS)
        assert (await finished(late))["output_ids"] == reference_tokens(new.model, new.prompt, TOKENS).tokens


async def test_wait_that_cannot_be_kept_leaves_the_engine_running(
    one_worker: EngineProcess, versions: Versions
) -> None:
    version = versions[0]
    async with serving(one_worker, version) as (_, client), one_worker.client(token=True) as control:
        running = await begin(client, version, LONG)
        refused = await control.post("/pause", json={"mode": "wait", "seconds": 0.1})
        assert refused.status_code == 409
        assert "still run" in refused.json()["detail"]
        assert one_worker.get("/info")["paused"] is None
        assert (await finished(running))["finish_reason"] == "length"


async def test_discarded_weights_are_never_served(two_workers: EngineProcess, versions: Versions) -> None:
    old, new = versions
    async with serving(two_workers, old) as (agent, client), two_workers.client(token=True) as control:
        running = await begin(client, old)
        slept = await control.post("/sleep", json={"level": 2})
        assert slept.json()["asleep"] == ["kv_cache", "weights"]
        assert two_workers.get("/ckpt_engine/info")["open"] is False
        await agent.adapter.pause(KEEP, CALL_SECONDS)
        with pytest.raises(EngineCallError, match="given up"):
            await agent.install(new.model, new.number)
        await agent.adapter.wake(["weights", "kv_cache"], CALL_SECONDS)
        await agent.adapter.resume(CALL_SECONDS)
        assert (await client.post("/generate", json={"input_ids": [1]})).status_code == 503
        assert two_workers.get("/info")["running"] == 1
        assert not running.done()
        await agent.adapter.pause(KEEP, CALL_SECONDS)
        await agent.install(new.model, new.number)
        await agent.adapter.resume(CALL_SECONDS)
        answer = await finished(running)
        first = answer["weight_versions"][0]["end"]
        assert [span["version"] for span in answer["weight_versions"]] == [old.number, new.number]
        tail = answer["output_ids"][first:]
        assert max(regrets(new.model, old.prompt + answer["output_ids"][:first], tail)) < ROUNDING


async def test_sleep_that_keeps_weights_serves_them_again(one_worker: EngineProcess, versions: Versions) -> None:
    version = versions[0]
    async with serving(one_worker, version) as (agent, client):
        running = await begin(client, version)
        await agent.adapter.sleep(1, CALL_SECONDS)
        assert (await agent.adapter.probe(CALL_SECONDS)).asleep
        assert (await client.post("/generate", json={"input_ids": [1]})).status_code == 503
        await agent.adapter.wake((), CALL_SECONDS)
        answer = await finished(running)
        assert max(regrets(version.model, version.prompt, answer["output_ids"])) < ROUNDING


async def test_weights_are_installed_into_a_paused_engine_only(one_worker: EngineProcess, versions: Versions) -> None:
    async with serving(one_worker, versions[0]) as (agent, _):
        with pytest.raises(EngineCallError, match="POST /pause first") as caught:
            await agent.install(versions[1].model, 2)
        assert caught.value.answered
        assert one_worker.get("/ckpt_engine/info")["version"] == versions[0].number


async def test_each_rank_reads_its_slice_and_pads_the_rest(two_workers: EngineProcess, versions: Versions) -> None:
    async with serving(two_workers, versions[0]) as (agent, _):
        pass
    weights = dict(versions[0].model.named_parameters())
    sliced = {name for name in weights if "norm" not in name}
    for rank, needs in agent.needs.items():
        kinds = {entry.name: entry.kind for entry in needs.accounted}
        padded = {name for name, kind in kinds.items() if kind == weights_pb2.Accounted.KIND_FILLED}
        assert padded == ({"model.embed_tokens.weight", "lm_head.weight"} if rank == 1 else set())
        assert kinds["model.rotary_emb.inv_freq"] == weights_pb2.Accounted.KIND_CONSTANT
    read = sum(report.bytes for report in agent.reports.values())
    once = sum(2 * tensor.numel() for name, tensor in weights.items() if name in sliced)
    twice = sum(2 * tensor.numel() for name, tensor in weights.items() if name not in sliced)
    assert read == once + 2 * twice


async def test_a_manifest_that_does_not_cover_the_model_touches_nothing(
    two_workers: EngineProcess, versions: Versions
) -> None:
    old, new = versions
    name = "model.layers.1.self_attn.k_proj.weight"
    async with serving(two_workers, old) as (agent, client):
        with pytest.raises(RefusedError, match=name):
            await agent.install(new.model, new.number, without=name)
        expected = reference_tokens(old.model, old.prompt, TOKENS).tokens
        assert (await generate(client, old.prompt, TOKENS))["output_ids"] == expected


async def test_weights_that_are_not_what_was_sealed_are_never_served(
    one_worker: EngineProcess, versions: Versions
) -> None:
    old, new = versions
    async with serving(one_worker, old) as (agent, client):
        running = await begin(client, old)
        await agent.adapter.pause(KEEP, CALL_SECONDS)
        with pytest.raises(RefusedError):
            await agent.install(new.model, new.number, torn=True)
        await agent.adapter.resume(CALL_SECONDS)  # an agent would not; the engine must stand still all the same
        assert (await client.post("/generate", json={"input_ids": [1]})).status_code == 503
        before = one_worker.get("/info")
        assert (before["paused"], before["running"]) == (None, 1)
        await agent.adapter.pause(KEEP, CALL_SECONDS)
        await agent.install(new.model, new.number)
        await agent.adapter.resume(CALL_SECONDS)
        answer = await finished(running)
        assert [span["version"] for span in answer["weight_versions"]] == [old.number, new.number]


async def test_an_install_that_outlives_its_call_never_hides_behind_the_old_version(
    one_worker: EngineProcess, versions: Versions
) -> None:
    old, new = versions
    async with serving(one_worker, old) as (agent, client):
        running = await begin(client, old, LONG)
        await agent.adapter.pause(KEEP, CALL_SECONDS)
        with pytest.raises(EngineCallError) as caught:
            await agent.install(new.model, new.number, late_seconds=0.6)
        assert not caught.value.answered
        await agent.adapter.resume(CALL_SECONDS)  # the state word is still clean, of the old version
        answer = await finished(running)
    first = answer["weight_versions"][0]["end"]
    assert [span["version"] for span in answer["weight_versions"]] == [old.number, new.number]
    assert max(regrets(old.model, old.prompt, answer["output_ids"][:first])) < ROUNDING


async def test_a_stamp_that_the_workers_do_not_bear_out_is_refused(
    one_worker: EngineProcess, versions: Versions
) -> None:
    async with serving(one_worker, versions[0]) as (agent, _):
        held = weights_pb2.Identity(lineage=agent.lineage, version=versions[0].number, root=agent.root)
        await agent.adapter.stamp(held, CALL_SECONDS)
        held.version += 1
        with pytest.raises(EngineCallError, match="do not hold version 2"):
            await agent.adapter.stamp(held, CALL_SECONDS)


async def test_what_the_model_cannot_do_is_refused_in_words(one_worker: EngineProcess, versions: Versions) -> None:
    async with serving(one_worker, versions[0]) as (_, client):
        for body, word in (
            ({"input_ids": [PADDED_VOCABULARY]}, "tokens 0 to"),
            ({"input_ids": [1], "max_tokens": 512}, "512 positions"),
        ):
            answer = await client.post("/generate", json=body)
            assert answer.status_code == 400
            assert word in answer.json()["detail"]
        assert (await client.post("/generate", json={"input_ids": []})).status_code == 422


async def test_development_routes_need_the_token(one_worker: EngineProcess) -> None:
    async with one_worker.client() as client:
        for route in ("/pause", "/resume", "/sleep", "/wake", "/stamp", "/ckpt_engine/prepare", "/ckpt_engine/install"):
            assert (await client.post(route, json={})).status_code == 403, route


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_away_frees_its_place(
    one_worker: EngineProcess, versions: Versions, stream: bool
) -> None:
    """The engine is paused when it goes, so its request does not end by itself."""
    body = {"input_ids": [1], "max_tokens": 500, "stream": stream}
    async with serving(one_worker, versions[0]) as (agent, client):
        asking = asyncio.create_task(client.post("/generate", json=body))
        await until(lambda: one_worker.get("/info")["running"] == 1)
        await agent.adapter.pause(KEEP, CALL_SECONDS)
        assert one_worker.get("/info")["running"] == 1
        asking.cancel()
        await until(lambda: one_worker.get("/info")["running"] == 0)
