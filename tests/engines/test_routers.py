"""Two replicas behind each of the routers that people use: updates, closed replicas and their return, seen by clients.

Started as docs/routers.md says. The routers' own retries are off where they would hide what a replica answered.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from ckpt_engine import Trainer
from ckpt_engine.gate.directory import EngineDirectory
from ckpt_engine.gate.page import DIRTY, EnginePage
from tests.cluster import Cluster, Replica, corrupt_after_sealing, eventually, outcomes, running_cluster
from tests.engines.routers import FLAGS, MODULES, Router, ask, needs_routers, running_router
from tests.tiny_model import make_tiny_qwen3

pytestmark = needs_routers

STREAMS = 64
UPDATES = 5
TOKENS = 4
LONG_UPDATE_SECONDS = 1.5
PROBED_SECONDS = 60.0
"""Many times the interval of a second at which FLAGS has replicas probed, and less than the two minutes after which the
routers' own flags would have a replica used again."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp("routed")
    model_of(path / "bare", 0)
    with running_cluster(path) as running:
        for name in ("a", "b"):
            running.replica(name, "reference", path / "bare", "--served-model-name", "tiny")
        for replica in running.replicas:
            replica.registered()
        yield running


def model_of(path: Path, seed: int) -> Any:
    """Not quite as small as elsewhere: installing it takes so long that requests arrive meanwhile."""
    return make_tiny_qwen3(path, seed, layers=6, hidden=512, intermediate=1536, weights=False)


def urls(cluster: Cluster) -> list[str]:
    return [replica.url for replica in cluster.replicas]


def answered(router: Router, number: int) -> Counter[str]:
    """Versions in the answers to so many requests of different prompts, all of which must succeed."""
    found: Counter[str] = Counter()
    for first in range(number):
        response = ask(router, [first, 2, 3])
        assert response.status_code == 200, f"{response.text}\n{router.tail()}"
        found[response.json()["meta_info"]["weight_version"]] += 1
    return found


@pytest.mark.parametrize("kind", MODULES)
def test_a_quarantined_replica_gets_no_request_and_after_its_return_its_share(
    cluster: Cluster, tmp_path: Path, kind: str
) -> None:
    model = model_of(tmp_path / "model", 1)
    one, other = urls(cluster)
    with Trainer(cluster.address, lineage=f"return {kind}") as trainer:
        trainer.publish(model, move=True)
        assert trainer.update_weights(version=1).ok
        with running_router(kind, [one, other], tmp_path / "router.log", *FLAGS) as router:
            eventually("both are found", 60, lambda: router.healthy() == {one, other})
            restore = corrupt_after_sealing(trainer, next(iter(model.parameters())), 100)
            assert outcomes(trainer.update_weights(version=2, replicas=["b"])) == {"b": "quarantined"}
            restore()
            assert answered(router, 8) == {"1": 8}  # retried at the other one, as long as the router knows nothing
            eventually("the router has seen it", PROBED_SECONDS, lambda: router.healthy() == {one})
            assert answered(router, 8) == {"1": 8}

            assert trainer.update_weights(version=3, replicas=["b"]).ok
            eventually("it gets requests again", PROBED_SECONDS, lambda: answered(router, 2)["3"])
            # A probe that comes late on a busy machine takes either of them out for a moment.
            eventually("each gets its share", PROBED_SECONDS, lambda: answered(router, 8) == {"1": 4, "3": 4})


@pytest.mark.parametrize("kind", MODULES)
def test_what_a_router_passes_on(cluster: Cluster, tmp_path: Path, kind: str) -> None:
    """As docs/routers.md says of these versions."""
    model = model_of(tmp_path / "model", 1)
    with Trainer(cluster.address, lineage=f"passes {kind}") as trainer:
        trainer.publish(model, move=True)
        assert trainer.update_weights(version=7).ok
        with running_router(kind, urls(cluster), tmp_path / "router.log", *FLAGS) as router:
            eventually("both are found", 60, lambda: router.healthy() == set(urls(cluster)))
            answer = ask(router, [1, 2, 3], rid="mine", return_logprob=True)
            assert answer.headers["x-ckpt-engine-admitted-version"] == "7"
            meta = answer.json()["meta_info"]
            assert (meta["id"], len(meta["output_token_logprobs"])) == ("mine", 4)
            body = {"input_ids": [[1, 2], [3]], "sampling_params": {"max_new_tokens": 2, "n": 2}}
            nested = httpx.post(f"{router.url}/generate", json=body, timeout=60).json()
            assert len(nested) == {"sglang": 4, "vllm": 2}[kind]  # vllm-router drops n

            body = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 4, "temperature": 0, "return_token_ids": True}
            completion = httpx.post(f"{router.url}/v1/completions", json=body, timeout=60)
            if kind == "sglang":
                assert completion.status_code == 422
            else:
                assert completion.json()["choices"][0]["token_ids"] == answer.json()["output_ids"]
                assert completion.json()["metadata"] == {"weight_version": "7"}

            # A version that is gone; where the wish is lost, the answer is of another one.
            form = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 2}}
            header, field = {"x-ckpt-engine-version": "6"}, {"weight_version": {"exact_version": 6}}
            lost = httpx.post(f"{router.url}/generate", json={**form, **field}, timeout=60)
            assert lost.status_code == 200
            by_header = httpx.post(f"{router.url}/generate", json=form, headers=header, timeout=60)
            assert by_header.status_code == {"sglang": 200, "vllm": 409}[kind]
            if kind == "vllm":
                refused = httpx.post(f"{router.url}/v1/completions", json={**body, **field}, timeout=60)
                assert (refused.status_code, refused.json()["reason"]) == (409, "version_gone")


class HeldUp(threading.Thread):
    """Stops a replica's worker for a while as soon as it writes weights, so that the update takes as long."""

    def __init__(self, replica: Replica) -> None:
        super().__init__(daemon=True)
        (self._worker,) = replica.workers()
        directory = httpx.get(f"{replica.url}/ckpt_engine/info", timeout=30).json()["directory"]
        self._page = EnginePage(EngineDirectory(Path(directory)).page)
        self._ended = threading.Event()
        self.stopped = False
        self.start()

    def run(self) -> None:
        while not self._ended.wait(0.0005):
            if self._page.read()[0].state == DIRTY:
                self._worker.suspend()
                try:
                    self.stopped = not self._ended.wait(LONG_UPDATE_SECONDS)
                finally:
                    self._worker.resume()
                return

    def end(self) -> bool:
        """Whether it did."""
        self._ended.set()
        self.join()
        self._page.close()
        return self.stopped


def update_slowly(cluster: Cluster, trainer: Trainer, version: int) -> int:
    """Updates both replicas, each for longer than a router's probes are apart. Returns the version that they hold."""
    for attempt in range(version, version + 20):  # a worker may have written everything before anybody looked
        slow = [HeldUp(replica) for replica in cluster.replicas]
        try:
            report = trainer.update_weights(version=attempt)
        finally:
            stopped = [each.end() for each in slow]
        assert report.ok, report
        if all(stopped):
            return attempt
    raise AssertionError("no worker was seen writing")


class Streams:
    """So many clients of one router, each with one stream after another until `end`. answers: how each one ended."""

    def __init__(self, router: Router, number: int) -> None:
        self._router, self._number = router, number
        self._ended = threading.Event()
        self.answers: list[str] = []
        self.versions: list[list[int]] = []
        self._thread = threading.Thread(target=lambda: asyncio.run(self._all()), daemon=True)
        self._thread.start()

    async def _all(self) -> None:
        limits = httpx.Limits(max_connections=self._number)
        async with httpx.AsyncClient(base_url=self._router.url, timeout=60, limits=limits) as client:
            await asyncio.gather(*(self._one(client, number) for number in range(self._number)))

    async def _one(self, client: httpx.AsyncClient, number: int) -> None:
        params = {"max_new_tokens": TOKENS, "temperature": 0}
        while not self._ended.is_set():
            try:
                self.answers.append(await self._stream(client, {"input_ids": [number, 7], "sampling_params": params}))
            except httpx.HTTPError as error:
                self.answers.append(f"{type(error).__name__}: {error}")

    async def _stream(self, client: httpx.AsyncClient, body: dict[str, Any]) -> str:
        async with client.stream("POST", "/generate", json={**body, "stream": True}) as answer:
            if answer.status_code != 200:
                return f"{answer.status_code}: {(await answer.aread()).decode()[:300]}"
            meta: dict[str, Any] = {"finish_reason": None}
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    meta = json.loads(line.removeprefix("data: "))["meta_info"]
        if not meta["finish_reason"]:
            return "cut off"
        self.versions.append([int(span["version"]) for span in meta["weight_versions"]])
        return str(meta["finish_reason"]["type"])

    def end(self) -> None:
        self._ended.set()
        self._thread.join(90)
        assert not self._thread.is_alive()


@pytest.mark.parametrize("kind", MODULES)
def test_no_request_fails_while_both_replicas_are_updated_every_second(
    cluster: Cluster, tmp_path: Path, kind: str
) -> None:
    model = model_of(tmp_path / "model", 1)
    with Trainer(cluster.address, lineage=f"updates {kind}") as trainer:
        trainer.publish(model, move=True)
        assert trainer.update_weights(version=0).ok
        flags = (*FLAGS, "--disable-retries")
        with running_router(kind, urls(cluster), tmp_path / "router.log", *flags, policy="cache_aware") as router:
            eventually("both are found", 60, lambda: router.healthy() == set(urls(cluster)))
            streams = Streams(router, STREAMS)
            try:
                for version in range(1, UPDATES + 1):
                    time.sleep(1)
                    assert trainer.update_weights(version=version).ok
                version = update_slowly(cluster, trainer, UPDATES + 1)
                eventually(
                    "the last version serves", 120, lambda: any(spans[0] == version for spans in streams.versions)
                )
            finally:
                streams.end()
    assert Counter(streams.answers) == {"length": len(streams.answers)}, router.tail()
    assert len(streams.answers) > STREAMS
    for spans in streams.versions:
        assert spans == sorted(spans)
