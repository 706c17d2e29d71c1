"""What training frameworks get of an update that not every replica took."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from plain_replica import PlainReplica
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from ckpt_engine import CkptEngineError
from ckpt_engine.integrations import openrlhf
from ckpt_engine.integrations.updates import RankUpdates
from ckpt_engine.v1.weights_pb2 import Problem
from tests.gate.server import serve


def test_a_version_that_a_replica_does_not_serve_raises_what_it_said(
    manager: str, replica: Callable[..., PlainReplica]
) -> None:
    good, bad = replica("good"), replica("hung")
    bad.prepare_problem = Problem(code=Problem.CODE_DEADLINE_EXCEEDED, message="its engine does not answer")
    updates = RankUpdates(manager, replicas=2, lineage="run", timeout=60)
    with pytest.raises(CkptEngineError, match="call open"):
        updates.bring(1)
    updates.open({"a": torch.ones(4)})
    try:
        with pytest.raises(CkptEngineError, match="version 1 is not served by all replicas that must") as raised:
            updates.bring(1)
        problem = raised.value.problem
        assert (problem.code, problem.replica) == (Problem.CODE_DEADLINE_EXCEEDED, "hung")
        assert "its engine does not answer" in problem.message
        assert updates.version is None
        assert good.identity is not None
        assert good.identity.version == 1
        bad.prepare_problem = None
        assert updates.bring(2).ok
        assert updates.version == 2
    finally:
        updates.close()


def test_a_start_goes_back_to_a_checkpoint_under_another_lineage_also_of_one_torchrun_id(
    manager: str, replica: Callable[..., PlainReplica], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    held = replica("one")
    for last, first in ((7, 0.0), (5, 1.0)):
        updates = RankUpdates(manager, timeout=60)
        updates.open({"a": torch.full((4,), first)})
        try:
            assert updates.bring(last).lineage.startswith("job-")
        finally:
            updates.close()
        assert held.identity is not None
        assert held.identity.version == last
        assert float(held.weights["a"][0]) == first


def test_a_lineage_that_is_named_is_refused_lower_versions(manager: str, replica: Callable[..., PlainReplica]) -> None:
    held = replica("one")
    for version, said in ((7, ""), (5, "backwards")):
        updates = RankUpdates(manager, lineage="named", timeout=60)
        updates.open({"a": torch.full((4,), float(version))})
        try:
            if said:
                with pytest.raises(CkptEngineError, match=said):
                    updates.bring(version)
            else:
                updates.bring(version)
        finally:
            updates.close()
    assert held.identity is not None
    assert (held.identity.lineage, held.identity.version) == ("named", 7)


class BusyServer:
    """Answers each request on a route with the next of these statuses, the last one again and again."""

    def __init__(self, **statuses: list[int]) -> None:
        """statuses: of the routes /v1/models and /v1/completions, by last name."""
        self._statuses = statuses
        self.asked: list[str] = []
        self.app = Starlette(routes=[Route("/v1/{name}", self._answer, methods=["GET", "POST"])])

    async def _answer(self, request: Request) -> JSONResponse:
        name = request.path_params["name"]
        self.asked.append(name)
        statuses = self._statuses[name]
        status = statuses.pop(0) if len(statuses) > 1 else statuses[0]
        choice = {"text": "", "token_ids": [7], "finish_reason": "stop"}
        answers = {"models": {"data": [{"id": "tiny"}]}, "completions": {"choices": [choice]}}
        return JSONResponse(answers[name] if status == 200 else {"detail": f"status {status} of {name}"}, status)


async def rollout(url: str, seconds: float) -> list[int]:
    """What OpenRLHF's rollout actor gets for one prompt."""
    sampling: Any = SimpleNamespace(**dict.fromkeys((*openrlhf.PASSED_ON, "logprobs")))
    engine = openrlhf.GatewayEngine(url, seconds)
    (answer,) = [each async for each in engine.generate({"prompt_token_ids": [1]}, sampling, "a")]
    return answer.outputs[0].token_ids


async def test_an_openrlhf_rollout_outlasts_an_update(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openrlhf, "AGAIN_SECONDS", 0.05)
    server = BusyServer(models=[503, 200], completions=[503, 429, 503, 200])
    with serve(server.app) as url:
        assert await rollout(url, 300.0) == [7]
    assert server.asked == ["models"] * 2 + ["completions"] * 4


@pytest.mark.parametrize(
    ("status", "seconds", "code"),
    [
        (503, 2.0, Problem.CODE_DEADLINE_EXCEEDED),
        (500, 300.0, Problem.CODE_INTERNAL),
        (400, 300.0, Problem.CODE_INVALID_ARGUMENT),
    ],
)
async def test_an_openrlhf_rollout_ends_with_the_words_of_what_it_asked(
    status: int, seconds: float, code: Problem.Code
) -> None:
    """Or with which route did not answer at all, on a machine that is too busy for 2 s."""
    server = BusyServer(models=[200], completions=[status])
    words = f"status {status} of completions" + ("|does not answer" if status == 503 else "")
    with serve(server.app) as url, pytest.raises(CkptEngineError, match=words) as raised:
        await rollout(url, seconds)
    assert raised.value.problem.code == code
