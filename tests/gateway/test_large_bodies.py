"""Bodies of very many token ids: others' tokens pass while one is read, and what is too much is not read at all."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import httpx
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ckpt_engine.gateway import json_numbers, large_json
from ckpt_engine.gateway.json_numbers import load_request
from ckpt_engine.gateway.large_json import dump_in_steps, load_in_steps, values_of
from ckpt_engine_adapters.vllm.completions import Completions
from tests.gateway.misbehaving import BODY, Engine, asking, told
from tests.waiting import until

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.lists(st.integers(0, 99), min_size=5) | st.dictionaries(st.text(), inner),
    max_leaves=40,
)


@given(values, st.sampled_from([None, 1]))
def test_in_steps_is_as_at_once(content: Any, indent: int | None) -> None:
    data = json.dumps(content, indent=indent).encode()
    assert load_in_steps(data, float) == content
    assert json.loads(dump_in_steps(content)) == content
    assert values_of(data) >= count(content)


def count(content: Any) -> int:
    inner = content.values() if isinstance(content, dict) else content if isinstance(content, list) else ()
    return 1 + sum(map(count, inner))


@given(st.text('[]{},:"1 0-.e\ntrue', max_size=12))
@example("[1,]")
@example("[1,2,]")
@example("[,1]")
@example("[ ,1]")
@example("[1,,2]")
@example("[1 2,3]")
@example("[01,2]")
@example("[1,2")
@example("[1,2,3}")
@example('[1,"a",]')
def test_what_is_not_json_is_not_in_steps_either(text: str) -> None:
    for each in (text, f"[{text}]"):
        try:
            expected = json.loads(each)
        except ValueError:
            with pytest.raises(ValueError):  # noqa: PT011  # whatever it says of it
                load_in_steps(each.encode(), float)
        else:
            assert load_in_steps(each.encode(), float) == expected


def test_no_step_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = []
    real = json.loads

    def watched(text: str) -> Any:
        steps.append(len(text))
        return real(text)

    monkeypatch.setattr(large_json.json, "loads", watched)
    ids = list(range(100_000))
    assert load_in_steps(b'{"prompt": [[7], ' + json.dumps(ids).encode() + b"]}", float) == {"prompt": [[7], ids]}
    assert max(steps) <= large_json.STEP + 2
    assert sum(steps) > 4 * len(ids)


def test_a_number_that_is_none_is_named_in_a_large_body() -> None:
    content = b'{"prompt": [' + b"1," * 50_000 + b'1], "temperature": NaN}'
    with pytest.raises(ValueError, match="temperature: NaN"):
        load_request(content)
    assert not math.isfinite(load_in_steps(b"[1, NaN]", float)[1])


def test_no_step_of_writing_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = []

    class Watched(json.JSONEncoder):
        def iterencode(self, o: Any, _one_shot: bool = False) -> Iterator[str]:
            for step in super().iterencode(o, _one_shot):
                steps.append(len(step))
                yield step

    monkeypatch.setattr(large_json.json, "JSONEncoder", Watched)
    content = {"prompt": [[7], list(range(100_000))]}
    written = dump_in_steps(content)
    assert json.loads(written) == content
    assert sum(steps) == len(written), "all of it is written in steps"
    assert max(steps) <= large_json.STEP


class Other:
    """A stream of another caller through the same gateway. passed: its tokens so far."""

    def __init__(self) -> None:
        self.passed = 0

    async def tokens(self) -> AsyncIterator[bytes]:
        event = json.dumps({"choices": [{"index": 0, "text": "", "token_ids": [1]}]}).encode()
        while True:
            yield b"data: " + event + b"\n\n"
            self.passed += 1
            await asyncio.sleep(0)

    @contextlib.asynccontextmanager
    async def running(self, client: httpx.AsyncClient) -> AsyncIterator[None]:
        asked = asyncio.ensure_future(client.post("/v1/completions", json={**BODY, "max_tokens": None}))
        await until(lambda: self.passed > 0)
        try:
            yield
        finally:
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)

    def goes_on(self) -> None:
        """Waits until more tokens have passed. On a thread beside the loop."""
        assert threading.current_thread() is not threading.main_thread(), "it holds the loop up"
        before, end = self.passed, time.monotonic() + 60
        while self.passed < before + ENOUGH:
            assert time.monotonic() < end, f"{self.passed - before} tokens of another stream have passed in a minute"
            time.sleep(0.001)


LARGE = 40_000
"""Token ids: enough for a body, and for a leg, to count as large."""

ENOUGH = 20
"""Tokens of another stream."""


@pytest.fixture
def other() -> Other:
    return Other()


@pytest.fixture
def halted(monkeypatch: pytest.MonkeyPatch, other: Other) -> list[str]:
    """Makes all that takes long with a large body wait, in its middle, for tokens of another stream. Of each its name,
    once it went on."""
    went_on: list[str] = []

    def halting(name: str, function: Callable[..., Any], large: Callable[..., bool]) -> Callable[..., Any]:
        def halted(*arguments: Any) -> Any:
            if large(*arguments):
                other.goes_on()
                went_on.append(name)
            return function(*arguments)

        return halted

    for name in ("load_in_steps", "dump_in_steps"):
        function = halting(name.removesuffix("_in_steps"), getattr(json_numbers, name), lambda *_: True)
        monkeypatch.setattr(json_numbers, name, function)
    check = halting("check", Completions.read, lambda body: len(body["prompt"]) >= LARGE)
    monkeypatch.setattr(Completions, "read", check)
    return went_on


async def test_tokens_of_others_pass_while_a_large_body_is_read(other: Other, halted: list[str]) -> None:
    """One that is refused in the end, for its last id."""
    engine = Engine(lambda _number, _body: other.tokens())
    content = json.dumps({**BODY, "prompt": [*[7] * LARGE, -1]}).encode()
    async with asking(engine) as client, other.running(client):
        answer = await client.post("/v1/completions", content=content)
    assert (answer.status_code, len(engine.asked)) == (400, 1)
    assert f"number {LARGE} of it is -1" in answer.json()["detail"]
    assert halted == ["load", "check", "dump"]


async def test_tokens_of_others_pass_while_a_large_request_is_written_once_more(
    other: Other, halted: list[str]
) -> None:
    """Its first leg is aborted; at the end the answer is written."""

    async def aborted() -> AsyncIterator[bytes]:
        choice = {"index": 0, "text": "", "token_ids": [1], "finish_reason": "abort"}
        yield b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"
        yield b"data: [DONE]\n\n"

    def behave(number: int, body: dict[str, Any]) -> AsyncIterator[bytes]:
        if len(body["prompt"]) == 3:
            return other.tokens()
        if number == 1:
            return aborted()
        return told({**body, "prompt": [1]})

    engine = Engine(behave)
    body = {**BODY, "prompt": [7] * LARGE}
    async with asking(engine) as client, other.running(client):
        answer = await client.post("/v1/completions", json=body)
    assert answer.status_code == 200
    assert engine.asked[-1]["prompt"] == [7] * LARGE + [1]
    assert halted == ["load", "check", "dump", "dump", "dump"]


@pytest.mark.parametrize("inside", [b"1,", b"[],", b"{},", b"[1],"])
async def test_more_values_than_a_gateway_takes_are_refused_unread(inside: bytes) -> None:
    """It is no JSON, which nobody finds out."""
    engine = Engine(lambda _number, body: told(body))
    async with asking(engine) as client:
        answer = await client.post("/v1/completions", content=b'{"prompt": [' + inside * 1_200_000)
        assert (answer.status_code, answer.json()["reason"]) == (413, "too_large")
        assert "--body-values" in answer.json()["detail"]
    async with asking(engine, body_values=10) as client:
        assert (await client.post("/v1/completions", json={**BODY, "prompt": [1] * 9})).status_code == 413
        assert (await client.post("/v1/completions", json={**BODY, "prompt": [1] * 5})).status_code == 200
