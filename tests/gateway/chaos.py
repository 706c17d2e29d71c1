"""Streams through a gateway while weights change and replicas are killed; and a judge of every token that came out."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import psutil
import torch

from ckpt_engine import Trainer
from tests.cluster import Cluster
from tests.gateway.gateways import events
from tests.tiny_model import ROUNDING, regrets

MODES = ("keep", "abort", "wait", "in_place")
TOKENS = 24


@dataclass
class Answer:
    """One request, as its caller saw it. told: the ids of all events in their order."""

    prompt: list[int]
    told: list[int]
    finish: str
    said: dict[str, Any]
    error: str = ""


@dataclass
class Tally:
    """What the streams saw."""

    answers: int = 0
    tokens: int = 0
    judged: int = 0
    crossed: int = 0
    resumed: int = 0
    kills_late: int = 0
    from_zero: int = 0
    failures: list[str] = field(default_factory=list)


class Streams:
    """So many callers, each with one stream after another, until `end`."""

    def __init__(self, url: str, number: int, seed: int) -> None:
        self._url, self._number, self._seed = url, number, seed
        self._ended = threading.Event()
        self.answers: list[Answer] = []
        self._thread = threading.Thread(target=lambda: asyncio.run(self._all()), daemon=True)
        self._thread.start()

    async def _all(self) -> None:
        limits = httpx.Limits(max_connections=self._number)
        async with httpx.AsyncClient(timeout=120, limits=limits) as client:
            await asyncio.gather(*(self._one(client, number) for number in range(self._number)))

    async def _one(self, client: httpx.AsyncClient, number: int) -> None:
        drawn = random.Random(self._seed * 10_000 + number)
        while not self._ended.is_set():
            prompt = [drawn.randrange(512) for _ in range(6)]
            answer = Answer(prompt, [], "", {})
            try:
                await self._ask(client, answer)
            except (httpx.HTTPError, AssertionError) as error:
                answer.error = f"{type(error).__name__}: {error}"
            self.answers.append(answer)

    async def _ask(self, client: httpx.AsyncClient, answer: Answer) -> None:
        body = {"prompt": answer.prompt, "max_tokens": TOKENS, "temperature": 0, "return_token_ids": True}
        last: Any = None
        async for event in events(client, f"{self._url}/v1/completions", body):
            if event != "[DONE]" and "error" in event:
                answer.error = str(event["error"])
            elif event != "[DONE]":
                (choice,) = event["choices"]
                answer.told += choice["token_ids"]
                answer.finish = choice["finish_reason"] or answer.finish
                answer.said = choice.get("ckpt_engine", answer.said)
            last = event
        if last != "[DONE]":
            answer.error = answer.error or "it was cut off"

    def end(self, seconds: float = 180.0) -> list[Answer]:
        """Waits for the requests that run."""
        self._ended.set()
        self._thread.join(seconds)
        assert not self._thread.is_alive(), "a stream did not end"
        return self.answers


class Killer(threading.Thread):
    """Kills one replica's engine every so often, by SIGKILL; its agent starts it anew."""

    def __init__(self, cluster: Cluster, seconds: float, first: float) -> None:
        super().__init__(daemon=True)
        self._cluster, self._seconds, self._first = cluster, seconds, first
        self._ended = threading.Event()
        self.kills = 0
        self.start()

    def run(self) -> None:
        wait = self._first
        for victim in self._in_turn():
            if self._ended.wait(wait):
                return
            wait = self._seconds
            status = victim.status
            others = [each.status for each in self._cluster.replicas if each is not victim]
            well = sum(bool(each and each.serving) for each in others)
            if status is None or not status.serving or not well:
                wait = 0.2  # it is in an update, is not back yet from the last time, or is the only one
                continue
            try:
                psutil.Process(psutil.Process(status.workers[0].pid).ppid()).kill()
                self.kills += 1
            except psutil.NoSuchProcess:
                continue

    def _in_turn(self) -> Any:
        while True:
            yield from self._cluster.replicas

    def end(self) -> None:
        self._ended.set()
        self.join(60)


def update_for(trainer: Trainer, model: Any, models: Sequence[Any], seconds: float, apart: float) -> int:
    """Updates through the pause modes, as far apart. Version v has the weights of models[v % len(models)]. Returns the
    last version."""
    end, version = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        begun = time.monotonic()
        version += 1
        take(model, models[version % len(models)])
        trainer.update_weights(version=version, pause_mode=MODES[version % len(MODES)], min_replicas=1)  # type: ignore[arg-type]
        time.sleep(max(0.0, apart - (time.monotonic() - begun)))
    return version


def take(model: Any, other: Any) -> None:
    """The weights of another one, in place."""
    with torch.no_grad():
        for mine, its in zip(model.parameters(), other.parameters(), strict=True):
            mine.copy_(its)


def judge(answers: Sequence[Answer], models: Sequence[Any], most: int) -> Tally:
    """Of all answers what callers saw, and of `most` of them each token by the weights that it is said to be of.

    Tokens computed over caches that an older version had made are no version's alone, and are not judged.
    """
    tally = Tally()
    judged = random.Random(0).sample(range(len(answers)), min(most, len(answers)))
    for answer in answers:
        tally.answers += 1
        tally.tokens += len(answer.told)
        if answer.error or answer.finish != "length" or len(answer.told) != TOKENS:
            tally.failures.append(f"{len(answer.told)} tokens, finish {answer.finish!r}: {answer.error}")
            continue
        said = answer.said
        at = 0
        for span in said["spans"]:
            assert span["first"] == at, f"a hole in {said['spans']}"
            at += span["count"]
        assert at == TOKENS, said["spans"]
        assert said["exact"], said["spans"]
        tally.crossed += said["min_version"] != said["max_version"]
        tally.resumed += said["resumes"] > 0
        delivered = 0
        for before, leg in zip(said["legs"], said["legs"][1:], strict=False):
            delivered += before["count"]
            tally.kills_late += before["ended"] == "broken" and delivered >= 10
            tally.from_zero += delivered > 0 and leg["first"] == 0
    for place in judged:
        answer = answers[place]
        if not answer.error and answer.said:
            tally.judged += _judge_one(answer, models)
    return tally


def _judge_one(answer: Answer, models: Sequence[Any]) -> int:
    count, found = 0, {}
    for span in answer.said["spans"]:
        if span["caches"] != "recomputed":
            continue
        weights = span["version"] % len(models)
        if weights not in found:
            found[weights] = regrets(models[weights], answer.prompt, answer.told)
        worst = max(found[weights][span["first"] : span["first"] + span["count"]])
        assert worst < ROUNDING, f"a token is not of version {span['version']}: {answer}"
        count += span["count"]
    return count


def reasons(tally: Tally) -> Counter[str]:
    """Why requests failed."""
    return Counter(failure[:200] for failure in tally.failures)
