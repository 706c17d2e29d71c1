"""The adapter of transformers: command lines, names of checkpoints, and what becomes of requests in each pause mode.

Generation is transformers' own continuous batching of a small model, in this process. The real server is asked by
tests/conformance.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest
import pytest_asyncio
import torch
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import StreamingResponse
from safetensors.torch import load_file

from ckpt_engine.engine.programs import kind_of
from ckpt_engine.record.record import record
from ckpt_engine.v1 import weights_pb2
from ckpt_engine_adapters.transformers_serve import driver
from ckpt_engine_adapters.transformers_serve.command import WRAPPER
from ckpt_engine_adapters.transformers_serve.versions import TokenVersions, VersionedAnswers
from tests.conformance.weights import load, of_either_version, of_one_version
from tests.engines.transformers_server import why_not_here
from tests.tiny_model import decisive_prompts, make_tiny_qwen3, reference_tokens

Result = TypeVar("Result")

# ------------------------------------------------------------------------------------------------- command lines


@pytest.fixture
def script(tmp_path: Path) -> str:
    """What pip installs as `transformers`."""
    path = tmp_path / "transformers"
    path.write_text("#!/there/bin/python3\n")
    path.chmod(0o755)
    return str(path)


def test_a_command_as_users_type_it_starts_behind_the_gate(script: str) -> None:
    command = [script, "serve", "Qwen/Qwen3-4B", "--cb-num-blocks", "64"]
    assert kind_of(command, ["transformers"]) == "transformers"
    plan = driver.launch_plan(command, 8123, "")
    end = ("--cb-num-blocks", "64", "--port", "8123", "--host", "127.0.0.1")
    assert plan.argv == ("/there/bin/python3", "-m", WRAPPER, "Qwen/Qwen3-4B", *end)
    assert (plan.url, plan.workers) == ("http://127.0.0.1:8123", 1)


def test_the_model_may_come_from_the_agent_and_address_from_the_command(script: str) -> None:
    environment = ["env", "A=1", script, "serve", "--port=9", "--host", "0.0.0.0"]
    plan = driver.launch_plan(environment, 8123, "/models/a")
    start = ("env", "A=1", "/there/bin/python3", "-m", WRAPPER, "/models/a")
    assert plan.argv == (*start, "--port=9", "--host", "0.0.0.0")
    assert plan.url == "http://127.0.0.1:9"
    module = ["python", "-m", "transformers.cli.transformers", "serve", "a"]
    assert kind_of(module, ["transformers"]) == "transformers"
    assert driver.launch_plan(module, 8123, "").argv[:4] == ("python", "-m", WRAPPER, "a")
    assert driver.launch_plan(["--device", "cpu"], 8123, "a").argv[1:4] == ("-m", WRAPPER, "a")


@pytest.mark.parametrize(
    ("arguments", "model", "why"),
    [
        (["--port", "1"], "", "no model"),
        (["--quantization", "bnb-4bit"], "a", "--quantization bnb-4bit cannot be used"),
        (["--no-continuous-batching"], "a", "nothing can pause"),
        (["--non-blocking"], "a", "--non-blocking cannot be used"),
        (["--device", "cpu"], "org/name:q4.gguf", "GGUF"),
        (["python", "-m", "http.server"], "a", "does not say how transformers starts"),
        (["python", "-m", WRAPPER, "b"], "a", "two models"),
    ],
)
def test_what_cannot_be_updated_is_refused_before_it_is_launched(arguments: list[str], model: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        driver.launch_plan(arguments, 8123, model)


def test_the_version_with_a_pause_is_required() -> None:
    assert driver.SUPPORTED.refusal("5.23.0") == driver.SUPPORTED.untested("5.23.0") == ""
    assert "transformers 5.22.1 is not supported; it must be 5.23.0 or newer" in driver.SUPPORTED.refusal("5.22.1")
    assert "5.24.0 is not among the tested versions" in driver.SUPPORTED.untested("5.24.0")


# ------------------------------------------------------------------------------------------ names of checkpoints

_SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def model_of(kind: str) -> Any:
    import transformers

    more: dict[str, Any] = {
        "Qwen3": {"head_dim": 8, "tie_word_embeddings": True},
        "Mixtral": {"num_local_experts": 4},
        "Qwen3Moe": {"head_dim": 8, "num_experts": 4, "moe_intermediate_size": 24, "num_experts_per_tok": 2},
    }[kind]
    config = getattr(transformers, f"{kind}Config")(**_SIZES, **more)
    return getattr(transformers, f"{kind}ForCausalLM")(config).eval()


def manifest_of(weights: dict[str, torch.Tensor]) -> weights_pb2.Manifest:
    tensors = [
        weights_pb2.TensorSpec(name=name, dtype="float32", shape=weights[name].shape) for name in sorted(weights)
    ]
    return weights_pb2.Manifest(tensors=tensors)


@pytest.mark.parametrize("kind", ["Qwen3", "Mixtral", "Qwen3Moe"])
def test_tensors_go_where_from_pretrained_brings_them(kind: str, tmp_path: Path) -> None:
    """Under the names of a checkpoint, which has experts one by one, and under those of the model; by plain copies."""
    from ckpt_engine_adapters.transformers_serve.target import TransformersTarget

    trained, served = model_of(kind), model_of(kind)
    trained.save_pretrained(tmp_path)
    checkpoint = load_file(tmp_path / "model.safetensors")
    target = TransformersTarget(served)
    if kind != "Qwen3":
        assert not checkpoint.keys() <= served.state_dict().keys(), "experts would not be tried"
    for weights in (checkpoint, dict(trained.state_dict()), checkpoint):
        assert not record(manifest_of(weights), target).handovers
        target.load_weights(weights.items())
        assert_equal(served, trained)
        for parameter in served.parameters():
            parameter.data.zero_()
    target.reload(checkpoint.items())
    assert_equal(served, trained)


def assert_equal(one: Any, other: Any) -> None:
    theirs = other.state_dict()
    assert [name for name, tensor in one.state_dict().items() if not torch.equal(tensor, theirs[name])] == []


def test_tensors_without_a_place_are_refused_by_name() -> None:
    from ckpt_engine_adapters.transformers_serve.target import TransformersTarget

    target = TransformersTarget(model_of("Qwen3Moe"))
    expert = "model.layers.0.mlp.experts.{}.up_proj.weight"
    for name, shape, why in (
        (expert.format(4), (24, 32), "has no place for it"),
        (expert.format(1), (23, 32), "do not make model.layers.0.mlp.experts.gate_up_proj"),
        (expert.format(1), (24, 31), "the model's shape is"),
        ("model.norm.weight", (1,), "the model's shape is"),
        ("model.extra.weight", (1,), "has no such parameter"),
    ):
        with pytest.raises(ValueError, match=why) as refused:
            target.load_weights([(name, torch.zeros(shape))])
        assert name in str(refused.value)
    assert target.ignored("model.layers.0.self_attn.rotary_emb.inv_freq")
    assert not target.ignored("lm_head.weight")
    assert target.ignored("model.norm.weight") is None
    assert "tied" in str(TransformersTarget(model_of("Qwen3")).ignored("lm_head.weight"))


# ------------------------------------------------------------------------------------------------ pause modes

OLD, NEW = 0, 1
BEGUN, COUNT = 5, 60


class Words:
    """In the place of a tokenizer: an answer's text is its token ids."""

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        return " ".join(map(str, tokens))


class Serving:
    """Continuous batching of a model whose weights change; `models` has the versions."""

    def __init__(self, path: Path) -> None:
        from transformers import ContinuousBatchingConfig

        from ckpt_engine_adapters.transformers_serve.generation import PausableGeneration

        torch.set_num_threads(1)
        self.models = [make_tiny_qwen3(path, seed, weights=False) for seed in (OLD, NEW)]
        self.live = make_tiny_qwen3(path, OLD, weights=False)
        # Pages of few tokens, so that requests with the same beginning could share some.
        config = ContinuousBatchingConfig(page_size=8, num_blocks=64, max_batch_tokens=64)
        self.held = OLD
        self.versions = TokenVersions(lambda: self.held)
        self.versions.renew()
        self.generation = PausableGeneration(self.versions, config)
        self.thread = ThreadPoolExecutor(1)
        self.prompt = decisive_prompts(self.models[NEW], 1, 32, length=20)[0]
        self._asked = 0

    async def on_thread(self, what: Callable[..., Result], *arguments: Any) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self.thread, what, *arguments)

    async def ask(self, count: int = COUNT) -> list[int]:
        """Greedy tokens after the prompt."""
        from transformers import GenerationConfig

        config = GenerationConfig(do_sample=False, max_new_tokens=count, eos_token_id=-1, use_cache=False)
        self.generation.init_cb(self.live, config)
        self._asked += 1
        inputs, name = {"input_ids": list(self.prompt)}, f"request-{self._asked}"
        assert self.versions.open(name)
        answer = await self.generation.generate_non_streaming(self.live, Words(), inputs, config, request_id=name)
        return list(answer[2])

    async def begun(self) -> asyncio.Task[list[int]]:
        """A request that has some of its tokens and not all; the loop stands still."""
        await self.on_thread(self.generation.pause, "in_place", 60.0)
        scheduler = self.generation._processor.scheduler
        while True:  # a step may be several on a busy machine, so one request may have ended before it is looked at
            request = asyncio.create_task(self.ask())
            await asyncio.sleep(0)
            while not request.done():
                if any(state.generated_len() >= BEGUN for state in scheduler.active_requests.values()):
                    return request
                await self.on_thread(self.generation._step)

    def install(self) -> None:
        """The new version, while the loop stands still."""
        load(self.live, self.models[NEW])
        self.held = NEW

    def made_by(self, version: int, tokens: Sequence[int]) -> bool:
        return of_one_version([self.models[version]], self.prompt, tokens)


@pytest_asyncio.fixture
async def serving(tmp_path: Path) -> AsyncIterator[Serving]:
    """Has answered one request with the old weights."""
    if reason := why_not_here():
        pytest.skip(reason)
    serving = Serving(tmp_path)
    assert serving.made_by(OLD, await serving.ask())
    yield serving
    await serving.on_thread(serving.generation.resume)
    await serving.on_thread(serving.generation.stop)
    serving.thread.shutdown()


@pytest.mark.parametrize("mode", ["keep", "abort", "wait", "in_place"])
async def test_a_running_request_ends_as_the_pause_mode_says(serving: Serving, mode: str) -> None:
    running = await serving.begun()
    name = f"request-{serving._asked}"
    later = asyncio.create_task(serving.ask(32))
    await asyncio.sleep(0)
    await serving.on_thread(serving.generation.pause, mode, 60.0)
    await serving.on_thread(serving.generation.pause, mode, 60.0)
    serving.install()
    await asyncio.sleep(0.05)
    assert not later.done(), "a step was computed during the pause"
    await serving.on_thread(serving.generation.resume)
    match mode:
        case "abort":
            with pytest.raises(HTTPException, match="ended early"):
                await running
        case "wait":
            assert serving.made_by(OLD, await running)
        case "keep":
            tokens = await running
            assert len(tokens) == COUNT
            assert of_either_version(serving.models, serving.prompt, tokens)
        case "in_place":
            tokens = await running
            assert len(tokens) == COUNT
            assert not of_either_version(serving.models, serving.prompt, tokens), "caches were computed again"
    spans = [(each["version"], each["start"], each["end"]) for each in serving.versions.of(name)]
    match mode:
        case "abort":
            assert [(version, start) for version, start, _ in spans] == [(OLD, 0)]
            assert spans[0][2] >= BEGUN
        case "wait":
            assert spans == [(OLD, 0, COUNT)]
        case _:
            (first, second) = spans
            assert (first[0], first[1], second[0], second[2]) == (OLD, 0, NEW, COUNT)
            assert first[2] == second[1] >= BEGUN
            assert serving.made_by(OLD, tokens[: first[2]])
            assert not serving.made_by(OLD, tokens[: first[2] + 8])
    # The same prompt again, which the caches of other requests would answer with old weights.
    expected = reference_tokens(serving.models[NEW], serving.prompt, 32).tokens
    assert await later == expected
    assert await serving.ask(32) == expected


async def test_a_pause_that_waits_gives_up_in_time_and_nothing_is_lost(serving: Serving) -> None:
    running = await serving.begun()
    with pytest.raises(TimeoutError, match="still running"):
        await serving.on_thread(serving.generation.pause, "wait", 0.0)
    assert serving.generation.paused
    await serving.on_thread(serving.generation.resume)
    assert serving.made_by(OLD, await running)


async def test_the_first_request_of_all_waits_for_the_end_of_a_pause(tmp_path: Path) -> None:
    if reason := why_not_here():
        pytest.skip(reason)
    serving = Serving(tmp_path)
    await serving.on_thread(serving.generation.pause, "keep", 60.0)
    request = asyncio.create_task(serving.ask(32))
    await asyncio.sleep(0.05)
    assert not serving.generation._cb.is_running()
    serving.install()
    await serving.on_thread(serving.generation.resume)
    await serving.on_thread(serving.generation.resume)
    assert await request == reference_tokens(serving.models[NEW], serving.prompt, 32).tokens
    await serving.on_thread(serving.generation.stop)
    serving.thread.shutdown()


# --------------------------------------------------------------------------------------------- what answers say


async def test_answers_say_which_version_made_which_token() -> None:
    """A whole answer, and a stream's last event, whichever events come together; other answers are passed on."""
    held = [7]
    versions = TokenVersions(lambda: held[0])
    app = FastAPI()

    async def answer(request: Request) -> Any:
        name = request.headers["x-request-id"]
        for held[0], tokens in ((7, 3), (8, 3), (8, 5), (9, 9)):
            versions.renew()
            versions.count(name, tokens)
        if request.query_params.get("stream"):
            events = ['data: {"choices":[{"text":"a"}]}', 'data: {"choices":[{"text":"","finish_reason":"length"}]}']
            chunks = ["\n\n".join([*events, ""]), 'data: {"error": "finish_reason"}\n\n']
            return StreamingResponse(iter(chunks), media_type="text/event-stream")
        return {"choices": [{"text": "a", "finish_reason": "length"}]}

    app.add_api_route("/v1/completions", answer, methods=["POST"])
    app.add_api_route("/v1/responses", answer, methods=["POST"])
    app.add_middleware(VersionedAnswers, versions=versions)
    spans = [{"version": 7, "start": 0, "end": 3}, {"version": 8, "start": 3, "end": 5}]
    spans.append({"version": 9, "start": 5, "end": 9})
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://engine") as client:
        whole = (await client.post("/v1/completions")).json()
        assert whole["weight_versions"] == spans
        streamed = (await client.post("/v1/completions?stream=1")).text.split("\n\n")
        assert [json.loads(each.removeprefix("data: ")).get("weight_versions") for each in streamed[:3]] == [
            None,
            spans,
            None,
        ]
        other = await client.post("/v1/responses", headers={"x-request-id": "mine"})
        assert "weight_versions" not in other.json()
        assert (await client.post("/v1/completions", content=b"{")).status_code == 200
        assert (await client.get("/v1/completions")).status_code == 405
