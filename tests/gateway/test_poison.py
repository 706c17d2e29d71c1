"""Requests that kill engines, or still them, are given up by name; those that only last long are not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from ckpt_engine.gateway import fleet
from ckpt_engine.gateway.poison import Suspects
from ckpt_engine.gateway.settings import GatewaySettings
from ckpt_engine.gateway.upstream import Upstream
from tests.gateway.misbehaving import BODY, WHOLE, Behaviour, Engine, asking, told


def shun_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the next leg goes elsewhere, however slow this machine is."""
    monkeypatch.setattr(fleet, "SHUN_SECONDS", 60.0)
    monkeypatch.setattr(fleet, "MOST_SHUN_SECONDS", 60.0)


@pytest.mark.parametrize("slowly", [False, True])
async def test_a_prompt_that_kills_engines_is_given_up_however_long_they_take_to_die(
    slowly: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one dies long after it broke off, and is back when the second one breaks off; that one may still answer
    then, and dies a moment later."""
    shun_for_long(monkeypatch)
    asked: list[Engine] = []

    def behave(engine: Engine) -> Behaviour:
        return lambda _number, body: killed(engine, body)

    async def killed(engine: Engine, body: dict[str, Any]) -> AsyncIterator[bytes]:
        asked.append(engine)
        if len(asked) == 2:
            await asked[0].is_seen_dead_and_comes_back()
            engine.looked = engine.die
        async for event in told(body, 1, done=False):
            yield event
        if not slowly and len(asked) > 1:
            engine.die()

    engines = [Engine(lambda *_: told(BODY)) for _ in range(3)]
    for engine in engines:
        engine.behave = behave(engine)
    async with asking(*engines, dying=20.0) as client:
        answer = await client.post("/v1/completions", json=BODY)
    problem = answer.json()
    assert (answer.status_code, problem["reason"]) == (502, "poisoned")
    assert "2 engines died" in problem["detail"]
    assert sorted(len(engine.asked) for engine in engines) == [0, 1, 1]
    assert problem["choices"][0]["token_ids"] == WHOLE[:2]


async def test_an_engine_whose_gate_tells_of_a_dead_worker_is_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its API process has outlived the worker."""
    shun_for_long(monkeypatch)

    def behave(engine: Engine) -> Behaviour:
        return lambda _number, body: broken(engine, body)

    async def broken(engine: Engine, body: dict[str, Any]) -> AsyncIterator[bytes]:
        engine.dead_worker = True
        async for event in told(body, 1, done=False):
            yield event

    engines = [Engine(lambda *_: told(BODY)) for _ in range(3)]
    for engine in engines:
        engine.behave = behave(engine)
    async with asking(*engines, dying=0.0) as client:
        answer = await client.post("/v1/completions", json=BODY)
    assert (answer.status_code, answer.json()["reason"]) == (502, "poisoned")
    assert sorted(len(engine.asked) for engine in engines) == [0, 1, 1]


async def test_engines_that_live_on_are_no_deaths() -> None:
    engines = [Engine(lambda _number, body: told(body, 2, done=False)) for _ in range(2)]
    async with asking(*engines, dying=0.1) as client:
        answer = await client.post("/v1/completions", json=BODY)
    assert answer.json()["choices"][0]["token_ids"] == WHOLE
    assert sum(len(engine.asked) for engine in engines) == 6


async def test_a_prompt_after_which_engines_fall_silent_is_given_up() -> None:
    async def silent(body: dict[str, Any]) -> AsyncIterator[bytes]:
        async for event in told(body, 2, done=False):
            yield event
        await asyncio.sleep(3600)

    engines = [Engine(lambda _number, body: silent(body)) for _ in range(3)]
    async with asking(*engines, idle=0.3) as client:
        answer = await client.post("/v1/completions", json=BODY)
    assert (answer.status_code, answer.json()["reason"]) == (502, "poisoned")
    assert sum(len(engine.asked) for engine in engines) == 2


class Dead(Upstream):
    """Nobody lives there any more. A fake: what is asked is which of many engines are asked after, and when."""

    async def lives(self, url: str) -> bool:
        return False


@pytest.mark.parametrize(
    ("tokens", "seconds", "count"),
    [(0, 0.0, 2), (511, 1e9, 2), (1 << 20, 59.0, 2), (512, 60.0, 1)],
    ids=["at once", "few tokens", "soon", "long after"],
)
async def test_a_request_that_went_on_for_long_is_cleared_of_an_engine_s_death(
    tokens: int, seconds: float, count: int
) -> None:
    """Engines die for other reasons as well, one after the other where they are restarted in turn."""
    first, second = (
        fleet.FleetReplica(fleet.ReplicaNews(name, "http://x", "", fleet.FleetState.SERVING)) for name in "ab"
    )
    suspects = Suspects(Dead(GatewaySettings()), 2, 0.0)
    suspects.add(first, "http://x", 0, False, 1000.0, 10)
    assert await suspects.dead() == 1
    suspects.add(second, "http://x", 0, False, 1000.0 + seconds, 10 + tokens)
    assert await suspects.dead() == count


async def test_an_engine_that_breaks_a_request_off_again_is_a_suspect_anew() -> None:
    member, other = (
        fleet.FleetReplica(fleet.ReplicaNews(name, "http://x", "", fleet.FleetState.SERVING)) for name in "ab"
    )
    suspects = Suspects(Dead(GatewaySettings()), 2, 0.0)
    suspects.add(member, "http://x", 0, True, 0.0, 0)
    suspects.add(member, "http://x", 0, True, 59.0, 600)
    suspects.add(other, "http://x", 0, True, 61.0, 601)
    assert await suspects.dead() == 2


@pytest.mark.slow
async def test_a_stream_may_last_longer_than_every_idle_limit() -> None:
    """An engine brings a token in less than the limit; all of them take several times as long as it."""

    async def slow(body: dict[str, Any]) -> AsyncIterator[bytes]:
        async for event in told(body):
            await asyncio.sleep(0.5)
            yield event

    engine = Engine(lambda _number, body: slow(body))
    async with asking(engine, idle=4.0, queue_seconds=4.0, comment=0.1, connect=4.0, drain=4.0) as client:
        answer = await client.post("/v1/completions", json={**BODY, "stream": True})
    events = [json.loads(line[6:]) for line in answer.text.split("\n\n") if line.startswith("data: {")]
    assert [token for event in events for token in event["choices"][0]["token_ids"]] == WHOLE
    assert len(engine.asked) == 1
