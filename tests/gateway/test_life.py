"""What a gateway says of itself, what it bounds, and what it does while it ends; in this process."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from ckpt_engine.gateway import server
from ckpt_engine.gateway.choice import key_of
from ckpt_engine.gateway.engines import installed_engines
from ckpt_engine.gateway.fleet import Fleet, FleetState, ReplicaNews, VersionWant
from ckpt_engine.gateway.metrics import GatewayMetrics
from ckpt_engine.gateway.placing import Placing
from ckpt_engine.gateway.refusals import RefusedError
from ckpt_engine.gateway.settings import GatewaySettings
from ckpt_engine.gateway.upstream import Upstream
from tests.gateway.misbehaving import BODY, WHOLE, Engine, asking, forever, told
from tests.waiting import until


async def test_it_is_not_ready_when_nobody_could_serve_for_too_long_and_while_it_stops() -> None:
    engine = Engine(lambda _number, body: told(body))
    async with asking(engine, unready_after=0.2) as client:
        assert (await client.get("/readyz")).status_code == 200
        assert (await client.get("/health")).status_code == 200
        engine.die()
        await until(lambda: bool(engine.gateway.why_not_ready()))
        answer = await client.get("/readyz")
        assert (answer.status_code, answer.json()["reason"]) == (503, "not_ready")
        assert "no replica could serve" in answer.json()["detail"]
        assert (await client.get("/health")).status_code == 503
        assert (await client.get("/livez")).status_code == 200
    again = Engine(lambda _number, body: told(body))
    async with asking(again) as client:
        again.gateway.stopping = True
        assert "stopping" in (await client.get("/readyz")).json()["detail"]
        answer = await client.post("/v1/completions", json=BODY)
        assert (answer.status_code, answer.json()["reason"]) == (503, "stopping")


async def test_models_are_told_also_while_no_replica_answers() -> None:
    engine = Engine(lambda _number, body: told(body))
    async with asking(engine) as client:
        told_first = await client.get("/v1/models")
        engine.die()
        await until(lambda: all(member.down for member in engine.gateway.placing.fleet.members.values()))
        assert (await client.get("/v1/models")).content == told_first.content


async def test_more_requests_than_it_carries_are_refused_by_name() -> None:
    engine = Engine(lambda _number, _body: forever())
    async with asking(engine, requests=1) as client:
        first = asyncio.ensure_future(client.post("/v1/completions", json=BODY))
        await until(lambda: engine.inside == 1)
        answer = await client.post("/v1/completions", json=BODY)
        assert (answer.status_code, answer.json()["reason"]) == (429, "too_many")
        assert "retry-after" in answer.headers
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)


@pytest.mark.parametrize("breaks", [False, True])
async def test_a_stream_ends_with_its_usage_once_and_done(breaks: bool) -> None:
    """Usage counts the answer, not the legs."""
    engine = Engine(
        lambda number, body: told(body, 3 if breaks and not number else None, done=not breaks or number > 0)
    )
    async with asking(engine) as client:
        options = {"stream": True, "stream_options": {"include_usage": True}}
        answer = await client.post("/v1/completions", json={**BODY, **options})
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line.startswith("data: ")]
    assert lines.count("[DONE]") == 1
    assert lines[-1] == "[DONE]"
    events = [json.loads(line) for line in lines[:-1]]
    usages = [event["usage"] for event in events if event.get("usage")]
    assert usages == [{"prompt_tokens": 3, "completion_tokens": len(WHOLE), "total_tokens": 3 + len(WHOLE)}]
    assert len(engine.asked) == 1 + breaks


async def test_prefills_of_resumed_requests_are_bounded_at_each_replica() -> None:
    settings, fleet, key = GatewaySettings(prefills=1), Fleet(), key_of("", [1])
    fleet.tell([ReplicaNews("a", "http://a", "vllm", FleetState.SERVING)])
    async with Upstream(settings) as upstream:
        placing = Placing(settings, fleet, upstream, GatewayMetrics(), installed_engines())

        async def place(resumed: bool) -> Any:
            return await placing.place(VersionWant(), key, placing.patience(0.0), resumed)

        member = await place(True)
        with placing.inside(member, True) as visit:
            assert await place(False) is member
            with pytest.raises(RefusedError, match="all are taken"):
                await place(True)
            visit.begin()  # its first token has come
            assert await place(True) is member


async def test_a_part_that_fails_is_not_silent(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(*_: object) -> None:
        raise KeyError("what nobody thought of")

    monkeypatch.setattr(server, "probe_loads", fail)
    async with server.running_gateway(GatewaySettings(replicas=("http://127.0.0.1:1",))):
        await until(lambda: "a part of this gateway has failed" in caplog.text)
    assert "what nobody thought of" in caplog.text
