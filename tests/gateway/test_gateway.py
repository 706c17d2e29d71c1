"""A gateway process before two real reference replicas, a real manager and a real trainer."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import grpc
import httpx
import psutil
import pytest
import torch

from ckpt_engine import Trainer
from ckpt_engine.channel import ManagerStub
from ckpt_engine.v1 import manager_pb2
from tests.cluster import Cluster, Replica, eventually, running_cluster
from tests.gateway.gateways import GatewayProcess, events, running_gateway
from tests.tiny_model import ROUNDING, make_tiny_qwen3, reference_tokens, regrets

PROMPT = [1, 2, 3]


class World:
    """cluster with two replicas that serve version 1 of `model`, and a gateway before them."""

    def __init__(self, cluster: Cluster, gateway: GatewayProcess, trainer: Trainer, model: Any, other: Any) -> None:
        self.cluster, self.gateway, self.trainer = cluster, gateway, trainer
        self.model, self.other = model, other
        self.version = 0
        self.update()

    def update(self, **options: Any) -> int:
        """One more version; all have equal weights unless a test changes them."""
        self.version += 1
        report = self.trainer.update_weights(version=self.version, **options)
        assert report.ok, report
        return self.version


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp("gateway")
    make_tiny_qwen3(path / "bare", weights=False)
    with running_cluster(path) as cluster:
        for name in ("a", "b"):
            cluster.replica(name, "reference", path / "bare", "--served-model-name", "tiny")
        with running_gateway(path / "gateway.log", "--manager", cluster.address, "--queue-seconds", "30") as gateway:
            for replica in cluster.replicas:
                replica.registered()
            model, other = make_tiny_qwen3(path / "one", 1), make_tiny_qwen3(path / "two", 2)
            with Trainer(cluster.address, lineage="run") as trainer:
                trainer.publish(model, move=True)
                yield World(cluster, gateway.ready(), trainer, model, other)


BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "logprobs": 0, "return_token_ids": True},
    "/inference/v1/generate": {
        "token_ids": PROMPT,
        "sampling_params": {"max_tokens": 8, "temperature": 0, "logprobs": 0},
    },
    "/generate": {
        "input_ids": PROMPT,
        "sampling_params": {"max_new_tokens": 8, "temperature": 0},
        "return_logprob": True,
    },
}


def tokens_of(answer: dict[str, Any]) -> list[int]:
    tokens: list[int] = answer["output_ids"] if "output_ids" in answer else answer["choices"][0]["token_ids"]
    return tokens


def said_of(answer: dict[str, Any]) -> dict[str, Any]:
    said: dict[str, Any] = (answer["meta_info"] if "meta_info" in answer else answer["choices"][0])["ckpt_engine"]
    return said


@pytest.mark.parametrize("route", BODIES)
def test_every_form_is_answered_whole_and_streamed_with_its_versions(world: World, route: str) -> None:
    answer = world.gateway.post(route, BODIES[route])
    assert answer.status_code == 200, answer.text
    expected = reference_tokens(world.model, PROMPT, 8).tokens
    assert tokens_of(answer.json()) == expected
    said = said_of(answer.json())
    (span,) = said["spans"]
    assert (span["first"], span["count"], span["version"], span["exact"]) == (0, 8, world.version, True)
    assert (span["lineage"], len(span["root"])) == ("run", 64)
    assert said["global_steps"] == world.version
    assert [leg["ended"] for leg in said["legs"]] == ["whole"]

    async def stream() -> list[Any]:
        async with httpx.AsyncClient(timeout=60) as client:
            return [each async for each in events(client, f"{world.gateway.url}{route}", BODIES[route])]

    *told, done = asyncio.run(stream())
    assert done == "[DONE]"
    assert said_of(told[-1])["spans"] == said["spans"]
    joined = tokens_of(told[-1]) if route == "/generate" else [token for each in told for token in tokens_of(each)]
    assert joined == expected


def test_several_samples_and_prompts_come_back_in_their_order(world: World) -> None:
    body = {"prompt": [[1, 2], [7]], "n": 2, "max_tokens": 4, "temperature": 0, "return_token_ids": True}
    choices = world.gateway.post("/v1/completions", body).json()["choices"]
    expected = [reference_tokens(world.model, prompt, 4).tokens for prompt in ([1, 2], [1, 2], [7], [7])]
    assert [choice["token_ids"] for choice in choices] == expected
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]


def assert_right(world: World, prompt: list[int], tokens: list[int], count: int) -> None:
    """Each of them is the greedy one after those before it. Long outputs come near a tie, where rounding decides."""
    assert len(tokens) == count
    assert max(regrets(world.model, prompt, tokens)) < ROUNDING


def ask_in_the_background(world: World, body: dict[str, Any], **headers: str) -> tuple[threading.Thread, list[Any]]:
    found: list[Any] = []

    def ask() -> None:
        found.append(world.gateway.post("/v1/completions", body, **headers))

    thread = threading.Thread(target=ask)
    thread.start()
    return thread, found


LONG = {"prompt": PROMPT, "max_tokens": 400, "temperature": 0, "return_token_ids": True}


TIMES = 20
"""An update is to come in the middle of a request; an engine may be faster than one, on a busy machine."""


def running(world: World) -> list[Replica]:
    """Replicas inside which a request runs."""
    return [each for each in world.cluster.replicas if httpx.get(f"{each.url}/info", timeout=60).json()["running"]]


@pytest.mark.parametrize("mode", ["abort", "keep"])
def test_an_update_in_the_middle_is_no_end(world: World, mode: str) -> None:
    for _ in range(TIMES):
        before, answer = updated(world, LONG, mode)
        choice = answer.json()["choices"][0]
        said = choice["ckpt_engine"]
        if said["min_version"] != said["max_version"]:
            break
    after = world.version
    assert_right(world, PROMPT, choice["token_ids"], 400)
    assert (said["min_version"], said["max_version"], said["exact"]) == (before, after, True)
    assert said["resumes"] == (1 if mode == "abort" else 0)
    assert [span["caches"] for span in said["spans"]] == ["recomputed", "recomputed"]
    assert answer.json()["usage"] == {"prompt_tokens": 3, "completion_tokens": 400, "total_tokens": 403}


def test_what_is_not_resumable_ends_with_the_reason_and_the_ids_so_far(world: World) -> None:
    body = {**LONG, "a_field_of_tomorrow": True}
    for answer in (interrupted(world, body), interrupted(world, LONG, x_ckpt_engine_resume="off")):
        problem = answer.json()
        assert answer.status_code == 502
        (choice,) = problem["choices"]
        count = len(choice["token_ids"])
        assert 0 < count < 400
        assert_right(world, PROMPT, choice["token_ids"], count)
        assert problem["reason"] == ("resume_off" if "switched" in problem["detail"] else "not_resumable")
    assert world.gateway.post("/v1/completions", {**body, "max_tokens": 2}).status_code == 200


def updated(world: World, body: dict[str, Any], mode: str, **headers: str) -> tuple[int, httpx.Response]:
    """The version before an update that begins while a request runs, and the request's answer."""
    before = world.version
    thread, found = ask_in_the_background(world, body, **headers)
    eventually("it runs", 90, lambda: found or running(world))
    world.update(pause_mode=mode)
    thread.join(120)
    return before, found[0]


def interrupted(world: World, body: dict[str, Any], **headers: str) -> httpx.Response:
    for _ in range(TIMES):
        _, answer = updated(world, body, "abort", **headers)
        if answer.status_code != 200 and answer.json()["choices"][0]["token_ids"]:
            break
    return answer


def test_a_caller_who_leaves_cancels_its_leg(world: World) -> None:
    with pytest.raises(httpx.ReadTimeout):
        world.gateway.post("/v1/completions", LONG, timeout=httpx.Timeout(60, read=0.3))
    eventually("nothing runs", 90, lambda: not running(world))


def test_versions_that_are_asked_for(world: World) -> None:
    body = {**LONG, "max_tokens": 2}
    now = str(world.version)

    def ask(**headers: str) -> httpx.Response:
        return world.gateway.post("/v1/completions", body, **headers)

    assert ask(x_ckpt_engine_version=now).status_code == 200
    assert ask(x_ckpt_engine_min_version=now, x_ckpt_engine_max_lag="0").status_code == 200
    soon = {"x_ckpt_engine_queue_seconds": "0.3"}
    gone, later = ask(x_ckpt_engine_version="0"), ask(x_ckpt_engine_min_version=str(world.version + 1), **soon)
    assert (gone.status_code, gone.json()["reason"]) == (409, "version_gone")
    assert (later.status_code, later.json()["reason"]) == (503, "version_not_yet")
    other = ask(x_ckpt_engine_lineage="another", **soon)
    assert (other.status_code, other.json()["reason"]) == (503, "no_replica")
    assert ask(x_ckpt_engine_version="new").status_code == 400


def test_an_exact_version_ends_where_the_replica_goes_on(world: World) -> None:
    for _ in range(TIMES):
        before, answer = updated(world, LONG, "keep", x_ckpt_engine_version=str(world.version))
        if answer.status_code != 200:
            break
    problem = answer.json()
    assert (answer.status_code, problem["reason"]) == (409, "version_changed")
    spans = problem["choices"][0]["ckpt_engine"]["spans"]
    assert [(span["version"], span["count"]) for span in spans] == [(before, len(problem["choices"][0]["token_ids"]))]


class SlimesClient:
    """Asks external servers as slime's trainer does: a client of the contract that replica and gateway must keep.

    The contract is that of THUDM/slime, pull request 2071 ("external rollouts endpoint", open in August 2026; its
    tests show the requests), of which a trainer knows one address:
    - It posts SGLang's form to `/generate`: `input_ids`, `sampling_params`, `return_logprob`.
    - A hook puts the version into the body: `weight_version`, `{"exact_version": N}` or `{"min_required_version": N}`.
    - Any error is asked for again a while later, so many times; the servers answer 404 or 409 until they have loaded
      the version.
    - Of the answer it reads `text`, and of `meta_info` `output_token_logprobs`, `finish_reason` and `weight_version`.

    Miles' page (radixark/miles, docs/advanced/disaggregated-rollout.md) asks for the same, and that an answer says
    which version it began and ended under, without fixing names; those here are of the service that it points to
    (modal-projects/stitch): `{"exact_version": N, "min_version": null}`, `weight_version_start`, `weight_version_end`.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self.tries = 0

    def generate(self, constraint: dict[str, int | None], retries: int = 60, pause: float = 0.05) -> dict[str, Any]:
        """The answer; httpx.HTTPStatusError after so many tries."""
        sampling = {
            "max_new_tokens": 8,
            "temperature": 0.0,
            "top_p": 1.0,
            "top_k": -1,
            "stop": None,
            "stop_token_ids": None,
            "skip_special_tokens": True,
            "no_stop_trim": True,
            "spaces_between_special_tokens": False,
        }
        payload = {"sampling_params": sampling, "return_logprob": True, "input_ids": PROMPT}
        for left in reversed(range(retries)):
            self.tries += 1
            try:
                answer = httpx.post(
                    f"{self._url}/generate", json={**payload, "weight_version": constraint}, timeout=120
                )
                answer.raise_for_status()
            except httpx.HTTPError:
                if not left:
                    raise
                time.sleep(pause)
                continue
            output: dict[str, Any] = answer.json()
            break
        assert isinstance(output["text"], str)
        assert output["meta_info"]["finish_reason"]["type"] == "length"
        return output


@pytest.mark.parametrize("at", ["replica", "gateway"])
def test_a_client_of_slimes_external_servers_works_unchanged(world: World, at: str) -> None:
    client = SlimesClient(world.gateway.url if at == "gateway" else world.cluster.replicas[0].url)
    now = world.version
    expected = reference_tokens(world.model, PROMPT, 8).tokens
    constraints: list[dict[str, int | None]] = [
        {"exact_version": now},
        {"min_required_version": now - 1},
        {"exact_version": now, "min_version": None},
        {"exact_version": None, "min_version": None},
    ]
    for constraint in constraints:
        output = client.generate(constraint)
        meta = output["meta_info"]
        assert [pair[1] for pair in meta["output_token_logprobs"]] == expected
        assert (meta["weight_version"], meta["weight_version_start"], meta["weight_version_end"]) == (
            str(now),
            now,
            now,
        )
    assert client.tries == 4
    # A version that comes while it asks, and one that went.
    updates = threading.Timer(0.2, world.update)
    updates.start()
    assert client.generate({"exact_version": now + 1}, retries=600)["meta_info"]["weight_version"] == str(now + 1)
    updates.join(120)
    with pytest.raises(httpx.HTTPStatusError, match="409"):
        client.generate({"exact_version": now}, retries=2)


def test_requests_are_bounded_and_refused_by_name(world: World) -> None:
    gateway = world.gateway
    assert gateway.post("/v1/completions", {"prompt": []}).json()["reason"] == "bad_request"
    assert gateway.post("/v1/completions", {"prompt": [1], "max_tokens": 5000}).status_code == 400
    refused = gateway.post("/v1/completions", {"prompt": [1], "presence_penalty": 1.0})
    assert (refused.status_code, refused.json()["reason"]) == (422, "engine_refused")
    assert "presence_penalty" in refused.json()["detail"]
    assert httpx.post(f"{gateway.url}/generate", content=b"{" * 9, timeout=60).json()["reason"] == "bad_request"
    assert httpx.get(f"{gateway.url}/v1/models", timeout=60).json()["data"][0]["id"] == "tiny"
    with running_gateway(
        world.cluster.path / "small.log", "--manager", world.cluster.address, "--body-bytes", "64", "--requests", "1"
    ) as small:
        small.ready()
        large = small.post("/v1/completions", {"prompt": list(range(100))})
        assert (large.status_code, large.json()["reason"]) == (413, "too_large")


MISTAKES: dict[str, tuple[str, dict[str, Any], int, str]] = {
    "no token is asked for": ("/v1/completions", {"prompt": [1], "max_tokens": 0}, 422, "max_tokens"),
    "no sample": ("/v1/completions", {"prompt": [1], "n": 0}, 400, "n: must be an integer of 1 or more, not 0"),
    "texts for ids": ("/inference/v1/generate", {"token_ids": "Call me", "sampling_params": {}}, 400, "token_ids"),
    "text as input_ids": ("/generate", {"input_ids": "Call me"}, 400, "texts are `text`"),
    "a text": ("/v1/completions", {"prompt": "Call me"}, 422, "prompt"),
    "too many log-probabilities": ("/v1/completions", {"prompt": [1], "logprobs": 1000}, 422, "logprobs"),
    "a stop string": ("/v1/completions", {"prompt": [1], "stop": ["."]}, 422, "stop"),
    "an id that the model lacks": ("/v1/completions", {"prompt": [99999]}, 400, "tokens 0 to 511"),
    "too long": ("/v1/completions", {"prompt": [1], "max_tokens": 5000}, 400, "positions"),
    "a number as text": ("/v1/completions", {"prompt": [1], "temperature": "hot"}, 422, "temperature"),
    "no such route": ("/v1/complete", {"prompt": [1]}, 404, "POST /v1/completions"),
    "half a character": ("/v1/completions", {"prompt": [], "user": "\ud800"}, 400, "prompt"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_told_in_words(world: World, mistake: str) -> None:
    route, body, status, said = MISTAKES[mistake]
    answer = httpx.post(f"{world.gateway.url}{route}", content=json.dumps(body), timeout=60)
    print(mistake, answer.status_code, answer.text)
    assert answer.status_code == status
    assert said in answer.json()["detail"]


def test_the_name_of_a_session_may_be_any_json_text(world: World) -> None:
    body = json.dumps({"prompt": [1], "max_tokens": 1, "user": "\ud800"})
    assert httpx.post(f"{world.gateway.url}/v1/completions", content=body, timeout=60).status_code == 200


@contextlib.contextmanager
def asleep(world: World) -> Iterator[None]:
    """No replica serves: their engines sleep, as in hybrid training."""
    with grpc.insecure_channel(world.cluster.address) as channel:
        stub = ManagerStub(channel)
        stub.Sleep(manager_pb2.SleepRequest(level=1, timeout_seconds=120), timeout=150)
        try:
            yield
        finally:
            stub.Wake(manager_pb2.WakeRequest(timeout_seconds=120), timeout=150)


def test_while_all_sleep_requests_wait_and_the_gateway_is_ready(world: World) -> None:
    with asleep(world):
        impatient = world.gateway.post("/v1/completions", {**LONG, "max_tokens": 2}, x_ckpt_engine_queue_seconds="0.2")
        assert (impatient.status_code, impatient.json()["reason"]) == (503, "no_replica")
        assert "asleep" in impatient.json()["detail"]
        assert httpx.get(f"{world.gateway.url}/readyz", timeout=60).status_code == 200
        with pytest.raises(httpx.ReadTimeout):  # a caller who leaves while it waits
            world.gateway.post("/v1/completions", LONG, timeout=httpx.Timeout(60, read=0.3))
        eventually("nobody waits", 60, lambda: inside(world) == 0)
        thread, found = ask_in_the_background(world, {**LONG, "max_tokens": 2})
        time.sleep(0.3)
        assert not found
    thread.join(60)
    assert found[0].status_code == 200, found[0].text


def inside(world: World) -> float:
    """Requests that run or wait in the gateway."""
    lines = httpx.get(f"{world.gateway.url}/metrics", timeout=60).text.splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith("ckpt_engine_gateway_requests_inside "))


@pytest.mark.slow
def test_what_the_manager_told_last_stays_while_it_is_away(world: World) -> None:
    manager = world.cluster.manager
    manager.kill()
    manager.wait(60)
    try:
        assert world.gateway.post("/v1/completions", {**LONG, "max_tokens": 2}).status_code == 200
    finally:
        world.cluster.restart_manager()
    for replica in world.cluster.replicas:
        replica.registered()
    now = world.update()
    ask = {"x_ckpt_engine_min_version": str(now), "x_ckpt_engine_queue_seconds": "60"}
    answer = world.gateway.post("/v1/completions", {**LONG, "max_tokens": 2}, **ask)
    assert answer.json()["choices"][0]["ckpt_engine"]["min_version"] == now


def test_a_gateway_without_a_manager_knows_replicas_by_their_answers(world: World) -> None:
    options = [part for replica in world.cluster.replicas for part in ("--replica", replica.url)]
    with running_gateway(world.cluster.path / "alone.log", *options, "--workers", "2") as gateway:
        answer = gateway.ready().post("/v1/completions", {**LONG, "max_tokens": 4})
        (span,) = answer.json()["choices"][0]["ckpt_engine"]["spans"]
        assert (span["version"], span["lineage"], span["exact"]) == (world.version, None, True)
        assert "ckpt_engine_gateway_legs_total" in httpx.get(f"{gateway.url}/metrics", timeout=60).text


def test_sigterm_lets_requests_end_and_then_ends_them_with_what_they_have(world: World) -> None:
    options = ("--manager", world.cluster.address, "--drain-seconds", "0.2")
    with running_gateway(world.cluster.path / "stopped.log", *options) as gateway:
        gateway.ready()
        found: list[Any] = []

        async def stream() -> None:
            async with httpx.AsyncClient(timeout=60) as client:
                async for each in events(client, f"{gateway.url}/v1/completions", LONG):
                    found.append(each)
                    if len(found) == 5:
                        gateway.process.send_signal(signal.SIGTERM)

        asyncio.run(stream())
        *_, last, done = found
        assert done == "[DONE]"
        assert last["error"]["reason"] == "stopping"
        tokens = last["error"]["choices"][0]["token_ids"]
        assert_right(world, PROMPT, tokens, len(tokens))
        told = [token for each in found[:-2] for token in tokens_of(each)]  # one event may bring several
        assert tokens[: len(told)] == told


def test_a_replica_that_is_killed_costs_no_token(world: World) -> None:
    """The last one here but the slow: its replica takes a while to come back."""
    thread, found = ask_in_the_background(world, LONG)
    (victim,) = eventually("it runs", 90, lambda: running(world))
    (worker,) = victim.workers()
    server = psutil.Process(worker.ppid())
    server.kill()
    thread.join(120)
    assert found[0].status_code == 200, found[0].text
    choice = found[0].json()["choices"][0]
    assert_right(world, PROMPT, choice["token_ids"], 400)
    legs = choice["ckpt_engine"]["legs"]
    assert [leg["ended"] for leg in legs] == ["broken", "whole"]
    assert legs[0]["replica"] != legs[1]["replica"]
    assert choice["ckpt_engine"]["exact"] is True


@pytest.mark.slow
def test_a_request_inside_two_engines_that_died_is_given_up_by_name(world: World) -> None:
    world.update(min_replicas=1)
    for replica in world.cluster.replicas:
        replica.registered()
    world.version += 1
    assert world.trainer.update_weights(version=world.version).ok
    found: list[Any] = []

    async def stream() -> None:
        """Kills an engine once it has made tokens, and then the next one."""
        killed: list[int] = []
        async with httpx.AsyncClient(timeout=120) as client:
            async for each in events(client, f"{world.gateway.url}/v1/completions", LONG):
                found.append(each)
                if len(killed) < 2 and isinstance(each, dict) and "error" not in each:
                    for victim in running_among_the_living(world):
                        server = psutil.Process(victim.workers()[0].ppid())
                        if server.pid not in killed:
                            killed.append(server.pid)
                            server.kill()

    asyncio.run(stream())
    *_, last, done = found
    assert done == "[DONE]"
    assert last["error"]["reason"] == "poisoned"
    (choice,) = last["error"]["choices"]
    assert_right(world, PROMPT, choice["token_ids"], len(choice["token_ids"]))
    assert [leg["ended"] for leg in choice["ckpt_engine"]["legs"]] == ["broken", "broken"]


def running_among_the_living(world: World) -> list[Replica]:
    found = []
    for replica in world.cluster.replicas:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{replica.url}/info", timeout=60).json()["running"]:
                found.append(replica)
    return found
