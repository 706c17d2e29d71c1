"""Parts of the reference engine that need no server: sampling, version spans, the launch plan."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from ckpt_engine.core.probe import against_trainer
from ckpt_engine.engine.adapter import AdapterSettings, load_adapter
from ckpt_engine.v1 import manager_pb2, weights_pb2
from ckpt_engine_adapters.reference.driver import ReferenceAdapter, launch_plan
from ckpt_engine_adapters.reference.generation import Generation
from ckpt_engine_adapters.reference.model import ReferenceModel
from ckpt_engine_adapters.reference.sampling import choose
from ckpt_engine_adapters.reference.server import parse
from tests.gate.server import serve
from tests.tiny_model import make_tiny_qwen3


def _identity(version: int, lineage: str = "run") -> weights_pb2.Identity:
    return weights_pb2.Identity(lineage=lineage, version=version, root=bytes([version]) * 32)


def test_greedy_takes_the_best_token_and_its_probability_under_the_model() -> None:
    logits = torch.tensor([0.0, 2.0, 1.0])
    result = choose(logits, 0.0, 0, 0)
    assert result is not None
    assert result[0] == 1
    assert result[1] == pytest.approx(float(torch.log_softmax(logits, 0)[1]))


def test_samples_depend_on_seed_and_place_alone_and_follow_the_distribution() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0])
    draws = [choose(logits, 1.0, 7, index) for index in range(3000)]
    assert draws == [choose(logits, 1.0, 7, index) for index in range(3000)]
    counts = Counter(draw[0] for draw in draws if draw is not None)
    for token, probability in enumerate(torch.softmax(logits, 0).tolist()):
        assert counts[token] / 3000 == pytest.approx(probability, abs=0.04)
    assert [choose(logits, 1.0, 8, index) for index in range(50)] != draws[:50]


def test_logits_that_are_not_numbers_choose_nothing() -> None:
    assert choose(torch.tensor([0.0, float("nan")]), 0.0, 0, 0) is None


def test_spans_name_the_version_of_every_token() -> None:
    generation = Generation([1, 2], max_tokens=5)
    for token, identity in enumerate([_identity(3), _identity(3), _identity(4), _identity(4, "other run")]):
        generation.append(token, -1.0, identity)
    assert generation.weight_versions() == [
        {"version": 3, "start": 0, "end": 2},
        {"version": 4, "start": 2, "end": 3},
        {"version": 4, "start": 3, "end": 4},
    ]
    assert not generation.ended.is_set()
    generation.append(9, -1.0, _identity(5))
    assert generation.finish_reason == "length"


def test_a_request_without_cache_brings_all_of_its_tokens() -> None:
    generation = Generation([1, 2], max_tokens=5)
    assert generation.item()["tokens"] == [1, 2]
    generation.append(7, -1.0, _identity(1))
    assert (generation.item()["fresh"], generation.item()["tokens"]) == (False, [7])
    generation.fresh = True
    assert (generation.item()["tokens"], generation.item()["index"]) == ([1, 2, 7], 1)


def test_a_stop_token_ends_a_request() -> None:
    generation = Generation([1], max_tokens=5, stop_tokens=[4])
    generation.append(4, -1.0, _identity(1))
    assert (generation.finish_reason, generation.output) == ("stop", [4])


async def test_scores_of_weights_that_are_not_numbers_are_called_so(tmp_path: Path) -> None:
    """JSON has no number for them, and the trainer is to read what is wrong."""
    make_tiny_qwen3(tmp_path)
    model = ReferenceModel(tmp_path, torch.bfloat16)
    with torch.no_grad():
        next(model.module.parameters()).fill_(torch.nan)
    sequence = manager_pb2.ProbeSequence(tokens=[1, 2, 3], log_probabilities=[-1.0, -1.0])

    async def score(request: Request) -> JSONResponse:
        body = await request.json()
        return JSONResponse(model.score(body["tokens"], body["more"]))

    with serve(Starlette(routes=[Route("/ckpt_engine/score", score, methods=["POST"])])) as url:
        adapter = ReferenceAdapter(AdapterSettings(url, tmp_path, ""))
        answer = await adapter.score(sequence.tokens, 2, 60.0)
        await adapter.close()
    assert (len(answer.tokens), len(answer.chosen), len(answer.top)) == (2, 2, 2)
    with pytest.raises(ValueError, match="told the log-probability nan in sequence 0, which is not finite"):
        against_trainer(manager_pb2.ProbeScores(sequences=[sequence]), [answer])


def test_the_launch_plan_is_a_command_line_that_the_server_understands(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    plan = launch_plan(["--tensor-parallel=2", "--dtype", "float32"], 4321, str(tmp_path))
    assert (plan.workers, plan.url) == (2, "http://127.0.0.1:4321")
    options = parse(list(plan.argv[3:]))
    assert (options.port, options.tensor_parallel, options.dtype, options.model) == (4321, 2, "float32", tmp_path)
    assert load_adapter("reference").launch_plan([], 1, "dir").workers == 1


@pytest.mark.parametrize(
    ("arguments", "model", "message"),
    [
        (["--port", "1"], "dir", "leave --port out"),
        (["--model", "other"], "dir", "leave --model out"),
        ([], "", "no model"),
        (["--tensor-parallel", "two"], "dir", "must be a number"),
    ],
)
def test_a_launch_that_contradicts_the_agent_is_refused(arguments: list[str], model: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        launch_plan(arguments, 1, model)


def test_neither_the_driver_nor_the_api_process_imports_torch() -> None:
    """The agent stays small, and so does the API process: their start and memory are part of every replica's."""
    program = (
        "import sys, ckpt_engine_adapters.reference.driver, ckpt_engine_adapters.reference.server; "
        "sys.exit(' '.join({'torch', 'transformers'} & set(sys.modules)) or None)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
