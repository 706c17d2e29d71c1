"""Real replicas go back to an older version while requests run and wait that asked for a later one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from ckpt_engine import Client, Trainer
from tests.cluster import Cluster, running_cluster
from tests.gateway.gateways import GatewayProcess, running_gateway
from tests.gateway.test_gateway import BODIES, running, said_of, tokens_of
from tests.tiny_model import make_tiny_qwen3

MODES = ("keep", "in_place", "abort", "wait")
TOKENS = 300
TIMES = 10
"""A rollback is to come in the middle of a request; an engine may be faster than one, on a busy machine."""


@dataclass
class Ended:
    """One request. said: its `ckpt_engine`; empty: no token came. reason: of its error; empty: it is whole."""

    tokens: list[int]
    said: dict[str, Any]
    reason: str


class World:
    """Two replicas, a relay that holds the last versions, a gateway, a trainer. version: the last one."""

    def __init__(self, cluster: Cluster, gateway: GatewayProcess, trainer: Trainer) -> None:
        self.cluster, self.gateway, self.trainer = cluster, gateway, trainer
        self.version, self.before = 0, 0
        self.update()

    def update(self, mode: str = "keep") -> None:
        report = self.trainer.update_weights(pause_mode=mode)  # type: ignore[arg-type]
        assert report.ok, report
        self.before, self.version = self.version, report.version

    def go_back(self, mode: str) -> None:
        with Client(self.cluster.address) as client:
            report = client.rollback(self.before, pause_mode=mode, timeout=120)
        assert report.ok, report
        self.version = self.before


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    torch.set_num_threads(1)
    path: Path = tmp_path_factory.mktemp("rollback")
    make_tiny_qwen3(path / "bare", weights=False)
    with running_cluster(path) as cluster:
        for name in ("a", "b"):
            cluster.replica(name, "reference", path / "bare", "--served-model-name", "tiny")
        relay = cluster.relay("relay")
        with running_gateway(path / "gateway.log", "--manager", cluster.address, "--queue-seconds", "60") as gateway:
            for replica in cluster.replicas:
                replica.registered()
            relay.registered()
            with Trainer(cluster.address, lineage="run") as trainer:
                trainer.publish(make_tiny_qwen3(path / "one", 1))
                yield World(cluster, gateway.ready(), trainer)


def bodies() -> list[tuple[str, dict[str, Any]]]:
    """A long request in each form."""
    found = []
    for route, body in BODIES.items():
        most = "max_new_tokens" if route == "/generate" else "max_tokens"
        sampling = body.get("sampling_params")
        more = {"max_tokens": TOKENS} if sampling is None else {"sampling_params": {**sampling, most: TOKENS}}
        found.append((route, {**body, **more}))
    return found


async def ask(world: World, least: int, route: str, body: dict[str, Any], stream: bool) -> Ended:
    """For this version or a later one."""
    headers = {"x-ckpt-engine-min-version": str(least)}
    url = f"{world.gateway.url}{route}"
    async with (
        httpx.AsyncClient(timeout=180) as client,
        client.stream("POST", url, json={**body, "stream": stream}, headers=headers) as opened,
    ):
        text = (await opened.aread()).decode()
        if not stream or opened.status_code != 200:
            answer = json.loads(text)
            if "reason" in answer:
                (choice,) = answer.get("choices", [{}])
                return Ended(choice.get("token_ids", []), choice.get("ckpt_engine", {}), answer["reason"])
            return Ended(tokens_of(answer), said_of(answer), "")
        *events, done = [part.removeprefix("data: ") for part in text.split("\n\n") if part.startswith("data: ")]
        told = [json.loads(each) for each in events]
        assert done == "[DONE]"
        if "error" in told[-1]:
            (choice,) = told[-1]["error"].get("choices", [{}])
            seen = [] if len(told) < 2 else tokens_of(told[-2]) if route == "/generate" else joined(told[:-1])
            assert choice.get("token_ids", [])[: len(seen)] == seen
            return Ended(seen, choice.get("ckpt_engine", {}), told[-1]["error"]["reason"])
        return Ended(tokens_of(told[-1]) if route == "/generate" else joined(told), said_of(told[-1]), "")


def joined(told: list[Any]) -> list[int]:
    return [token for each in told for token in tokens_of(each)]


async def asked_during_a_rollback(world: World, mode: str) -> list[Ended]:
    """Requests that ran when it began, and some that came while it went on."""
    least = world.version
    running_ones = [
        asyncio.ensure_future(ask(world, least, *each, stream)) for each in bodies() for stream in (True, False)
    ]
    async with asyncio.timeout(90):
        while not await asyncio.to_thread(running, world) and not all(each.done() for each in running_ones):
            pass
    back = asyncio.ensure_future(asyncio.to_thread(world.go_back, mode))
    others = []
    while not back.done():
        others.append(asyncio.ensure_future(ask(world, least, *bodies()[len(others) % 3], len(others) % 2 == 0)))
        await asyncio.sleep(0.05)
    await back
    return list(await asyncio.gather(*running_ones, *others))


@pytest.mark.parametrize("mode", MODES)
def test_no_answer_has_tokens_of_less_than_it_asked_for(world: World, mode: str) -> None:
    for _ in range(TIMES):
        world.update()
        least = world.version
        ended = asyncio.run(asked_during_a_rollback(world, mode))
        for each in ended:
            if each.reason:
                assert each.reason == "rolled_back", each
            else:
                assert len(each.tokens) == TOKENS, each
                assert each.said["min_version"] >= least, each
                assert each.said["exact"], each
        if mode in ("abort", "wait") or any(each.reason and each.tokens for each in ended):
            break
    assert any(each.reason for each in ended)


@dataclass
class AtGate:
    """The answer of a replica itself to a request with a bound. versions: of its tokens, as the engine labels them.
    reason: of its refusal, or of the end of its stream; empty: it is whole."""

    bound: dict[str, int]
    versions: set[int]
    reason: str

    @property
    def holds(self) -> bool:
        if "exact_version" in self.bound:
            return self.versions <= {self.bound["exact_version"]}
        return all(version >= self.bound["min_version"] for version in self.versions)


def labels_of(answer: dict[str, Any]) -> set[int]:
    return {int(span["version"]) for span in answer["meta_info"]["weight_versions"]}


async def ask_gate(client: httpx.AsyncClient, url: str, number: int, version: int) -> AtGate:
    """One of several bounds, lengths and forms. version: the last one that is known."""
    bound = [{"exact_version": version}, {"min_version": version}, {"min_version": max(0, version - 1)}][number % 3]
    body: dict[str, Any] = {
        "input_ids": [1, 2, 3],
        "sampling_params": {"max_new_tokens": 3 + number * 7 % 60, "temperature": 0},
        "stream": number % 2 == 0,
    }
    headers = {}
    if number % 4 < 2:
        body["weight_version"] = bound
    else:
        names = {"exact_version": "x-ckpt-engine-version", "min_version": "x-ckpt-engine-min-version"}
        headers = {names[name]: str(value) for name, value in bound.items()}
    answer = await client.post(f"{url}/generate", json=body, headers=headers)
    if answer.status_code != 200:
        return AtGate(bound, set(), answer.json()["reason"])
    if not body["stream"]:
        return AtGate(bound, labels_of(answer.json()), "")
    *events, done = [part.removeprefix("data: ") for part in answer.text.split("\n\n") if part.startswith("data: ")]
    assert done == "[DONE]"
    contents = [json.loads(event) for event in events]
    reason = contents.pop()["error"]["reason"] if "error" in contents[-1] else ""
    return AtGate(bound, {version for each in contents for version in labels_of(each)}, reason)


async def asked_at_a_gate(world: World, url: str) -> list[AtGate]:
    """While versions come and go in each mode."""

    def change() -> None:
        for mode in MODES:
            world.update()
            world.go_back(mode)

    changing = asyncio.ensure_future(asyncio.to_thread(change))
    answers: list[AtGate] = []

    async def ask_again_and_again(first: int, client: httpx.AsyncClient) -> None:
        number = first
        while not changing.done():
            answers.append(await ask_gate(client, url, number, world.version))
            number += 5

    async with httpx.AsyncClient(timeout=180) as client, asyncio.TaskGroup() as group:
        for first in range(5):
            group.create_task(ask_again_and_again(first, client))
    await changing
    return answers


def test_no_bound_is_broken_at_a_gate(world: World) -> None:
    """A replica is asked itself. What the engine labels its tokens with is compared; the gate does not look at it."""
    answers = asyncio.run(asked_at_a_gate(world, world.cluster.replicas[0].url))
    assert all(each.holds for each in answers), [each for each in answers if not each.holds]
    reasons = {each.reason for each in answers}
    assert reasons <= {"", "version_not_yet", "version_gone", "rolled_back", "version_changed", "updating", "hold_full"}
    assert any(not each.reason and each.versions for each in answers)
    assert reasons & {"version_gone", "rolled_back", "version_changed"}


async def turn(world: World, session: str, prompt: list[int], field: bool) -> httpx.Response:
    """One turn of a conversation. field: whether the session is in the body, and not in a header."""
    body: dict[str, Any] = {"model": "tiny", "prompt": prompt, "max_tokens": 40, "return_token_ids": True}
    headers = {} if field else {"x-ckpt-engine-session": session}
    if field:
        body["weight_version"] = {"session": session}
    async with httpx.AsyncClient(timeout=180) as client:
        return await client.post(f"{world.gateway.url}/v1/completions", json=body, headers=headers)


async def turns_during_updates(world: World, mode: str) -> list[dict[str, Any]]:
    """A conversation, and an update in each of its turns."""
    session, prompt, found = "new", [5, 6, 7], []
    for number in range(3):
        asked = asyncio.ensure_future(turn(world, session, prompt, number % 2 == 0))
        await asyncio.to_thread(world.update, mode)
        answer = await asked
        assert answer.status_code == 200, answer.text
        (choice,) = answer.json()["choices"]
        prompt += choice["token_ids"] + [11, 12]
        session = choice["ckpt_engine"]["session"]
        found.append(choice["ckpt_engine"])
    return found


@pytest.mark.parametrize("mode", MODES)
def test_no_turn_is_made_by_older_weights_than_the_last_one(world: World, mode: str) -> None:
    turns = asyncio.run(turns_during_updates(world, mode))
    versions = [version for each in turns for version in (each["min_version"], each["max_version"])]
    assert versions == sorted(versions), turns
    last = turns[-1]["spans"][-1]
    assert turns[-1]["session"] == f"{last['version']}:{last['root'][:8]}:run"
    assert len({each["session"] for each in turns}) > 1, "the updates came between"


def test_a_conversation_says_that_its_weights_were_taken_back(world: World) -> None:
    world.update()
    first = asyncio.run(turn(world, "new", [5, 6, 7], True)).json()
    session = first["choices"][0]["ckpt_engine"]["session"]
    assert session.startswith(f"{world.version}:")
    world.go_back("keep")
    for field in (True, False):
        refused = asyncio.run(turn(world, session, [5, 6, 7], field))
        assert (refused.status_code, refused.json()["reason"]) == (409, "rolled_back"), refused.text
    assert asyncio.run(turn(world, "new", [5, 6, 7], True)).status_code == 200
