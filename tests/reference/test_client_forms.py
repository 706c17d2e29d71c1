"""What clients and routers made for SGLang and vLLM post to the reference engine, and what they read in its answers."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import torch
from pydantic import TypeAdapter, ValidationError

from ckpt_engine.v1 import manager_pb2
from ckpt_engine_adapters.reference.bodies import CompletionBody, GenerateBody, GenerateForm, SglangBody
from ckpt_engine_adapters.reference.sampling import choose
from tests.reference.conftest import TOKENS, Version
from tests.reference.engine_process import CALL_SECONDS, EngineProcess
from tests.reference.test_reference_engine import serving
from tests.tiny_model import reference_tokens

Versions = tuple[Version, Version]

ROUTED = {
    "model": None,
    "return_text_in_logprobs": False,
    "stream": False,
    "log_metrics": True,
    "return_hidden_states": False,
    "background": False,
    "no_logs": False,
    "return_bytes": False,
    "return_entropy": False,
}
"""What sglang-router 0.3.2 adds to every body of /generate."""

COMPLETION_ROUTED = {
    "stream": False,
    "echo": False,
    "no_stop_trim": False,
    "ignore_eos": False,
    "skip_special_tokens": True,
    "return_hidden_states": False,
}
"""What both routers add to every body of /v1/completions."""


async def post(client: httpx.AsyncClient, route: str, **body: Any) -> Any:
    answer = await client.post(route, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def streamed(client: httpx.AsyncClient, route: str, **body: Any) -> list[dict[str, Any]]:
    """Every event but the last, which says that it is."""
    async with client.stream("POST", route, json={**body, "stream": True}) as answer:
        lines = [line.removeprefix("data: ") async for line in answer.aiter_lines() if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


@pytest.fixture
async def client(one_worker: EngineProcess, versions: Versions) -> AsyncIterator[httpx.AsyncClient]:
    async with serving(one_worker, versions[0]) as (_, client):
        yield client


async def test_sglangs_form_and_its_meta_info(client: httpx.AsyncClient, versions: Versions) -> None:
    version = versions[0]
    expected = reference_tokens(version.model, version.prompt, TOKENS).tokens
    params = {"max_new_tokens": TOKENS, "temperature": 0, "skip_special_tokens": False, "ignore_eos": True}
    body = {"input_ids": version.prompt, "sampling_params": params, "return_logprob": True, "rid": "mine", **ROUTED}
    own = await post(client, "/generate", input_ids=version.prompt, max_tokens=TOKENS, logprobs=True)
    answer = await post(client, "/generate", **body)
    meta = answer["meta_info"]
    assert answer["output_ids"] == expected == own["output_ids"]
    assert meta.pop("e2e_latency") > 0
    assert meta == {
        "id": "mine",
        "finish_reason": {"type": "length", "length": TOKENS},
        "prompt_tokens": len(version.prompt),
        "completion_tokens": TOKENS,
        "cached_tokens": 0,
        "weight_version": "1",
        "weight_versions": [{"version": "1", "start": 0, "end": TOKENS}],
        "input_token_logprobs": [],
        "output_token_logprobs": [
            [logprob, token, None] for logprob, token in zip(own["logprobs"], expected, strict=True)
        ],
        "output_token_logprobs_length": TOKENS,
    }

    stop = {**params, "stop_token_ids": [expected[4]]}
    stopped = await post(client, "/generate", input_ids=version.prompt, sampling_params=stop)
    assert stopped["output_ids"] == expected[: expected.index(expected[4]) + 1]
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": expected[4]}


async def test_nested_prompts_and_several_samples_come_back_in_order(
    client: httpx.AsyncClient, versions: Versions
) -> None:
    first, second = versions[0].prompt, versions[0].prompt[:3]
    params = {"max_new_tokens": 5, "temperature": 1.0, "sampling_seed": 7, "n": 2}
    nested = await post(client, "/generate", input_ids=[first, second], sampling_params=params, rid=["a", "b"])
    assert [answer["meta_info"]["id"] for answer in nested] == ["a_0", "a_1", "b_0", "b_1"]
    alone = await post(client, "/generate", input_ids=second, max_tokens=5, temperature=1.0, seed=8)
    assert nested[3]["output_ids"] == alone["output_ids"]
    assert nested[0]["output_ids"] != nested[1]["output_ids"]
    one = await post(client, "/generate", input_ids=[first], sampling_params={"max_new_tokens": 1})
    assert isinstance(one, list)

    completion = await post(
        client, "/v1/completions", prompt=[first, second], max_tokens=5, seed=7, n=2, return_token_ids=True
    )
    assert [choice["index"] for choice in completion["choices"]] == [0, 1, 2, 3]
    assert [choice["token_ids"] for choice in completion["choices"]] == [answer["output_ids"] for answer in nested]
    assert completion["usage"] == {"prompt_tokens": 9, "completion_tokens": 20, "total_tokens": 29}


async def test_completions_of_token_ids(client: httpx.AsyncClient, versions: Versions) -> None:
    version = versions[0]
    expected = reference_tokens(version.model, version.prompt, TOKENS).tokens
    body = {"model": "", "prompt": version.prompt, "max_tokens": TOKENS, "temperature": 0, **COMPLETION_ROUTED}
    plain = await post(client, "/v1/completions", **body, user="x", not_known=1)
    assert "token_ids" not in plain["choices"][0]
    answer = await post(client, "/v1/completions", **body, return_token_ids=True, logprobs=1)
    (choice,) = answer["choices"]
    assert choice["token_ids"] == expected
    assert choice["prompt_token_ids"] == version.prompt
    assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in expected]
    assert (choice["finish_reason"], choice["stop_reason"], choice["text"]) == ("length", None, "")
    assert answer["metadata"] == {"weight_version": "1"}
    stopped = await post(client, "/v1/completions", **body, stop_token_ids=[expected[4]])
    assert (stopped["choices"][0]["finish_reason"], stopped["choices"][0]["stop_reason"]) == ("stop", expected[4])


async def test_streams_of_both_forms_end_with_the_reason(client: httpx.AsyncClient, versions: Versions) -> None:
    prompt = versions[0].prompt
    params = {"max_new_tokens": 4, "temperature": 0}
    whole = await post(client, "/generate", input_ids=prompt, sampling_params=params)
    events = await streamed(client, "/generate", input_ids=prompt, sampling_params=params)
    assert [event["output_ids"] for event in events] == [whole["output_ids"][:count] for count in range(1, 5)]
    assert {event["meta_info"]["weight_version"] for event in events} == {"1"}
    reasons = [event["meta_info"]["finish_reason"] for event in events]
    assert reasons == [None, None, None, {"type": "length", "length": 4}]
    both = await streamed(client, "/generate", input_ids=[prompt, prompt], sampling_params=params)
    for number in (0, 1):
        last = [event for event in both if event["index"] == number][-1]
        assert last["output_ids"] == whole["output_ids"]
        assert last["meta_info"]["finish_reason"] == {"type": "length", "length": 4}

    *chunks, usage = await streamed(
        client,
        "/v1/completions",
        prompt=prompt,
        max_tokens=4,
        temperature=0,
        return_token_ids=True,
        stream_options={"include_usage": True},
    )
    assert [chunk["choices"][0]["token_ids"] for chunk in chunks] == [[token] for token in whole["output_ids"]]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, None, "length"]
    assert chunks[0]["choices"][0]["prompt_token_ids"] == prompt
    assert "prompt_token_ids" not in chunks[1]["choices"][0]
    assert (usage["choices"], usage["usage"]["completion_tokens"]) == ([], 4)


async def test_a_stream_that_is_aborted_says_so(one_worker: EngineProcess, versions: Versions) -> None:
    version = versions[0]
    async with serving(one_worker, version) as (agent, client):
        for route, body in (
            ("/generate", {"input_ids": version.prompt, "sampling_params": {"max_new_tokens": 450}}),
            ("/v1/completions", {"prompt": version.prompt, "max_tokens": 450}),
        ):
            events: list[dict[str, Any]] = []
            async with client.stream("POST", route, json={**body, "stream": True}) as answer:
                async for line in answer.aiter_lines():
                    if line.startswith("data: {"):
                        events.append(json.loads(line.removeprefix("data: ")))
                    if len(events) == 3:
                        await agent.adapter.pause(manager_pb2.PAUSE_MODE_ABORT, CALL_SECONDS)
            await agent.adapter.resume(CALL_SECONDS)
            last = events[-1]
            if "meta_info" in last:
                assert last["meta_info"]["finish_reason"]["type"] == "abort"
                assert len(last["output_ids"]) == last["meta_info"]["completion_tokens"] < 450
            else:
                assert last["choices"][0]["finish_reason"] == "abort"


async def test_a_refusal_is_words(client: httpx.AsyncClient) -> None:
    params = '{"input_ids": [1], "sampling_params": {"top_p": 0.9}}'
    infinite = '{"input_ids": [1], "sampling_params": {"temperature": Infinity}}'  # JSON has no way to send it back
    for body, named in ((params, "top_p: this engine cannot"), (infinite, "temperature: Input should be a finite")):
        answer = await client.post("/generate", content=body, headers={"content-type": "application/json"})
        assert answer.status_code == 422
        assert named in answer.json()["detail"]


async def test_another_model_is_not_found_in_openais_words(client: httpx.AsyncClient, versions: Versions) -> None:
    """As vLLM has it; without a name the model is meant that there is."""
    (card,) = (await client.get("/v1/models")).json()["data"]
    prompt = versions[0].prompt
    body = {"prompt": prompt, "max_tokens": 1}
    for name in (card["id"], f"{card['id']}/", "", None):
        assert (await post(client, "/v1/completions", **body, model=name))["choices"]
    tokens = {"token_ids": prompt, "sampling_params": {"max_tokens": 1}}
    for route, fields in (("/v1/completions", body), ("/inference/v1/generate", tokens)):
        answer = await client.post(route, json={**fields, "model": "gpt-4"})
        assert answer.status_code == 404
        error = answer.json()["error"]
        assert error["code"] == "model_not_found"
        assert "'gpt-4'" in error["message"]
        assert card["id"] in error["message"]


async def test_routers_learn_the_model_in_any_state(one_worker: EngineProcess, versions: Versions) -> None:
    async with serving(one_worker, versions[1]) as (agent, client):
        assert (await client.get("/model_info")).json()["weight_version"] == "2"
        await agent.adapter.discard(CALL_SECONDS)
        (card,) = (await client.get("/v1/models")).json()["data"]
        about = (await client.get("/server_info")).json()
        assert card["id"] == about["served_model_name"] == about["model_path"]
        assert card["max_model_len"] == about["context_length"] == 512
        assert (await client.get("/model_info")).status_code == 503  # it names weights


FORM: TypeAdapter[GenerateBody | SglangBody] = TypeAdapter(GenerateForm)
PARAMS = {"max_new_tokens": 3}


@pytest.mark.parametrize(
    ("body", "form"),
    [
        ({"input_ids": [1]}, GenerateBody),
        ({"input_ids": [1], "max_tokens": 3, "stream": True}, GenerateBody),
        ({"input_ids": [1], "sampling_params": PARAMS}, SglangBody),
        ({"input_ids": [[1], [2]]}, SglangBody),
        ({"input_ids": [1], **ROUTED}, SglangBody),
        ({"input_ids": [1], "sampling_params": PARAMS, "of_a_later_sglang": 1}, SglangBody),
    ],
)
def test_whose_form_a_body_has(body: dict[str, Any], form: type) -> None:
    assert isinstance(FORM.validate_python(body), form)


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"input_ids": [1], "max_token": 3}, "max_token"),
        ({"input_ids": [1], "max_tokens": 3, "sampling_params": PARAMS}, "max_tokens: SGLang's form"),
        ({"input_ids": [1], "temperature": 0.5, **ROUTED}, "temperature: SGLang's form"),
        ({"text": "a"}, "text: this engine cannot"),
        ({"input_ids": [1], "return_logprob": True, "logprob_start_len": 0}, "logprob_start_len"),
        ({"input_ids": [1], "sampling_params": {"top_p": 0.9}}, "top_p"),
        ({"input_ids": [1], "sampling_params": {"stop": ["a"]}}, "stop"),
        ({"input_ids": [1], "sampling_params": {"max_tokens": 3}}, "max_tokens"),
        ({"input_ids": [1], "sampling_params": {"n": 100_000}}, "1024"),
        ({"input_ids": [[1], [2]], "sampling_params": [PARAMS]}, "1 for 2 prompts"),
        ({"input_ids": [[1], [2]], "sampling_params": [{"n": 2}, {}]}, "n must be the same"),
        ({"input_ids": [[1], "a"]}, "token ids"),
        ({"input_ids": [[1], []]}, "at least 1"),
        ({"input_ids": [[1], 2]}, "list"),
        ({"input_ids": [1], "seed": 10**4299}, "seed"),  # a number that JSON can bring and not take on
        ({"input_ids": [1], "sampling_params": {"sampling_seed": 10**4300 - 1}}, "sampling_seed"),
    ],
)
def test_what_would_change_the_meaning_is_refused(body: dict[str, Any], named: str) -> None:
    with pytest.raises(ValidationError) as refused:
        FORM.validate_python(body)
    assert named in str(refused.value)


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"prompt": "a"}, "token ids"),
        ({"prompt": ["a"]}, "token ids"),
        ({"prompt": [1], "echo": True}, "echo"),
        ({"prompt": [1], "logprobs": 5}, "logprobs"),
        ({"prompt": [1], "top_k": 20}, "top_k"),
        ({"prompt": [1], "response_format": {"type": "json_object"}}, "response_format"),
        ({"prompt": [1], "max_tokens": 0}, "max_tokens"),
        ({"prompt": [1], "min_tokens": 2}, "min_tokens"),
        ({"prompt": [1], "min_tokens": 1, "stop_token_ids": [3]}, "min_tokens"),
    ],
)
def test_completions_that_would_mean_something_else_are_refused(body: dict[str, Any], named: str) -> None:
    with pytest.raises(ValidationError) as refused:
        CompletionBody.model_validate(body)
    assert named in str(refused.value)


@pytest.mark.parametrize("least", [0, 1])
def test_an_answer_that_nothing_ends_has_a_token(least: int) -> None:
    (one,) = CompletionBody.model_validate({"prompt": [1], "min_tokens": least}).generations(512)
    assert not one.stop_tokens


def test_no_limit_means_what_the_model_has_room_for() -> None:
    (own,) = SglangBody.model_validate(
        {"input_ids": [1] * 12, "sampling_params": {"max_new_tokens": None}}
    ).generations(512)
    (completion,) = CompletionBody.model_validate({"prompt": [1] * 12, "max_tokens": None}).generations(512)
    assert own.max_tokens == completion.max_tokens == 500


def test_a_temperature_that_would_overflow_is_greedy() -> None:
    logits = torch.tensor([1.0, 30.0, 2.0])
    assert choose(logits, 1e-40, 0, 0) == choose(logits, 0.0, 0, 0)
