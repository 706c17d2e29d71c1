"""Streams through a gateway while weights change and replicas are killed; and a judge of every token that came out."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch

from ckpt_engine import CkptEngineError, Client, ErrorCode, Trainer
from ckpt_engine.addresses import split_address
from tests.cluster import Cluster, running_cluster
from tests.gateway.gateways import running_gateway
from tests.tiny_model import ROUNDING, make_tiny_qwen3, regrets

WEIGHTS = 5
KILLS_APART = 10.0
"""Seconds, where updates come every second."""

BACK_EVERY = 8
"""Every so many updates the last one is taken back, in the ten minutes."""

MODES = ("keep", "abort", "wait", "in_place")
TOKENS = 16
REQUEST_SECONDS = 120

make_model: Callable[..., Any] = partial(make_tiny_qwen3, layers=1, hidden=64, intermediate=64, dtype=torch.float32)
"""A third of the usual tiny model's time for each token: hundreds of streams share two cores with all else."""
ENGINE_OPTIONS = ("--dtype", "float32", "--max-running", "64", "--served-model-name", "tiny")


@dataclass
class Answer:
    """One request, as its caller saw it. told: the ids of all events in their order."""

    prompt: list[int]
    told: list[int]
    finish: str
    said: dict[str, Any]
    error: str = ""
    seconds: float = 0.0
    bounds: dict[str, Any] = field(default_factory=dict)  # the versions that it asks for
    reason: str = ""  # why the gateway ended it, if it was for its bounds
    openai: bool = False  # asked with OpenAI's client


@dataclass
class Tally:
    """What the streams saw. crossed: answers of two versions or more. resumed: of several legs. kills_late: legs
    that a kill broke after ten tokens or more had come. from_zero: legs that asked for tokens again which had come;
    not_begun: those that began again where nothing had come. longest: seconds of an answer."""

    answers: int = 0
    tokens: int = 0
    crossed: int = 0
    resumed: int = 0
    kills_late: int = 0
    from_zero: int = 0
    not_begun: int = 0
    bounded: int = 0  # whole answers with bounds
    openai: int = 0  # answers that OpenAI's client has read
    ended: Counter[str] = field(default_factory=Counter)  # answers that their bounds ended, by reason
    longest: float = 0.0
    failures: list[str] = field(default_factory=list)


class AnswerRefusedError(Exception):
    """An answer that is an error from its beginning; its argument is the reason."""


async def streamed(host: str, port: int, body: dict[str, Any], route: str = "/v1/completions") -> AsyncIterator[Any]:
    """Events of an answer: objects, then "[DONE]". A client of a few lines on a connection of its own: a pool
    of some hundred connections in Python takes longer than all that is looked at here."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        content = json.dumps(body).encode()
        lines = (
            f"POST {route} HTTP/1.1",
            f"Host: {host}",
            "Connection: close",
            "Content-Type: application/json",
            f"Content-Length: {len(content)}",
        )
        writer.write("\r\n".join((*lines, "", "")).encode() + content)
        answer = await reader.readuntil(b"\r\n\r\n")
        if not answer.startswith(b"HTTP/1.1 200"):
            problem = await reader.read()
            assert b'"reason"' in problem, answer + problem
            raise AnswerRefusedError(json.loads(problem[problem.index(b"{") : problem.rindex(b"}") + 1])["reason"])
        assert b"transfer-encoding: chunked" in answer.lower(), answer
        rest = b""
        while size := await _chunk(reader):
            *whole, rest = (rest + (await reader.readexactly(size + 2))[:-2]).split(b"\n\n")
            for event in whole:
                if event.startswith(b"data: "):
                    yield "[DONE]" if event == b"data: [DONE]" else json.loads(event[6:])
    finally:
        writer.close()


async def _chunk(reader: asyncio.StreamReader) -> int:
    """Bytes of the next one. Raises EOFError if there is none: the answer was cut off."""
    line = await reader.readline()
    if not line.endswith(b"\r\n"):
        raise EOFError("the answer was cut off")
    return int(line, 16)


def body_of(route: str, prompt: list[int]) -> dict[str, Any]:
    """Asks for TOKENS greedy tokens."""
    sampling = {"temperature": 0, "ignore_eos": True}
    if route == "/generate":
        return {"input_ids": prompt, "sampling_params": {**sampling, "max_new_tokens": TOKENS}}
    if route == "/inference/v1/generate":
        return {"token_ids": prompt, "sampling_params": {**sampling, "max_tokens": TOKENS}}
    return {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "return_token_ids": True}


OPENAI_CALLERS = (1, 7)
"""Of each sixteen callers on OpenAI's route, those that ask with OpenAI's client: one takes any version, one asks for
versions. A client of a few lines has the others, since it takes a tenth of the time."""

OF_BOUNDS = ("rolled_back", "version_gone", "version_changed")
"""Reasons with which an answer may end whose caller has asked for versions."""


class Streams:
    """So many callers, each with one stream after another, until `end`. Of four callers two take any version, one holds
    conversations of three turns, and one asks for `newest` or later, or in every other request for exactly that."""

    newest = 0
    """The last version that an update has brought; set from outside."""

    def __init__(self, url: str, number: int, seed: int, route: str = "/v1/completions") -> None:
        self._route = route
        self._host, self._port = split_address(url.removeprefix("http://"))
        self._number, self._seed = number, seed
        self._ended = threading.Event()
        self.answers: list[Answer] = []
        self._begun: dict[int, float] = {}
        self._thread = threading.Thread(target=lambda: asyncio.run(self._all()), daemon=True)
        self._thread.start()

    async def _all(self) -> None:
        await asyncio.gather(*(self._one(number, self._asking(number)) for number in range(self._number)))

    def _asking(self, number: int) -> Callable[[Answer], Awaitable[None]]:
        """The client of one caller."""
        if self._route != "/v1/completions" or number % 16 not in OPENAI_CALLERS:
            return self._ask
        import openai  # only this route's tests need it

        address = f"http://{self._host}:{self._port}/v1"
        client = openai.AsyncOpenAI(base_url=address, api_key="none", max_retries=0, timeout=REQUEST_SECONDS)
        return partial(self._ask_with_openai, client)

    async def _one(self, number: int, ask: Callable[[Answer], Awaitable[None]]) -> None:
        drawn = random.Random(self._seed * 10_000 + number)
        last, turns = Answer([], [], "", {}), 0
        for asked in itertools.count():
            if self._ended.is_set():
                return
            prompt = [drawn.randrange(512) for _ in range(6)]
            bounds: dict[str, Any] = {}
            if number % 4 == 2:
                turns = turns + 1 if last.finish and turns < 3 else 1
                prompt = last.prompt + last.told + prompt[:2] if turns > 1 else prompt
                bounds = {"session": last.said["session"] if turns > 1 else "new"}
            elif number % 4 == 3:
                bounds = {"exact_version" if asked % 2 else "min_version": self.newest}
            last = answer = Answer(prompt, [], "", {}, bounds=bounds)
            self._begun[number] = time.monotonic()
            try:
                async with asyncio.timeout(REQUEST_SECONDS):
                    await ask(answer)
            except AnswerRefusedError as refusal:
                answer.reason = str(refusal)
            except (OSError, EOFError, AssertionError) as error:
                answer.error = f"{type(error).__name__}: {error}"
            answer.seconds = time.monotonic() - self._begun.pop(number)
            self.answers.append(answer)

    def all_begun_after(self, moment: float) -> bool:
        """Whether every request that runs now was asked later than that (monotonic seconds)."""
        return all(begun > moment for begun in list(self._begun.values()))

    async def _ask_with_openai(self, client: Any, answer: Answer) -> None:
        import openai

        answer.openai, last = True, None
        body = body_of(self._route, answer.prompt)
        extra = {"return_token_ids": body.pop("return_token_ids")}
        if answer.bounds:
            extra["weight_version"] = answer.bounds
        try:
            async for last in await client.completions.create(model="tiny", **body, stream=True, extra_body=extra):
                (choice,) = last.choices
                answer.told += choice.model_extra["token_ids"]
                answer.finish = choice.finish_reason or answer.finish
                answer.said = choice.model_extra.get("ckpt_engine", answer.said)
        except openai.APIStatusError as error:
            raise AnswerRefusedError(error.code) from error
        except openai.APIError as error:
            if isinstance(error.body, dict):  # an event of the stream
                self._note_error(answer, error.body)
            else:
                answer.error = f"{type(error).__name__}: {error}"
        except Exception as error:  # of the library below it
            answer.error = f"{type(error).__name__}: {error}"
        if last is None and not answer.reason:
            answer.error = answer.error or "it was cut off"

    @staticmethod
    def _note_error(answer: Answer, error: Any) -> None:
        if error.get("reason") in OF_BOUNDS and answer.bounds:
            answer.reason = error["reason"]
            (choice,) = error.get("choices") or [{}]
            answer.said = choice.get("ckpt_engine", {})
        else:
            answer.error = str(error)

    async def _ask(self, answer: Answer) -> None:
        body = {**body_of(self._route, answer.prompt), "stream": True}
        last: Any = None
        if answer.bounds:
            body["weight_version"] = answer.bounds
        async for event in streamed(self._host, self._port, body, self._route):
            if event != "[DONE]" and "error" in event:
                self._note_error(answer, event["error"])
            elif event != "[DONE]" and "output_ids" in event:
                answer.told = event["output_ids"]  # SGLang's form has all of them in each event
                meta = event["meta_info"]
                answer.finish = (meta["finish_reason"] or {}).get("type", answer.finish)
                answer.said = meta.get("ckpt_engine", answer.said)
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
    """Kills one replica's engine every so often, by SIGKILL; its agent starts it anew.

    Where requests last longer than that, it waits for those of the last kill (one that was inside two engines that died
    is rightly given up), and makes up for it later.
    """

    def __init__(self, cluster: Cluster, streams: Streams, seconds: float) -> None:
        super().__init__(daemon=True)
        self._cluster, self._streams, self._seconds = cluster, streams, seconds
        self._ended = threading.Event()
        self.kills = 0
        self.start()

    def run(self) -> None:
        wait, last, due = self._seconds, 0.0, time.monotonic() + self._seconds
        for victim in self._in_turn():
            while self._ended.wait(wait) or not self._streams.all_begun_after(last):
                if self._ended.is_set():
                    return
                wait = 0.1
            status = victim.status
            others = [each.status for each in self._cluster.replicas if each is not victim]
            well = sum(bool(each and each.serving) for each in others)
            if status is None or not status.serving or not well:
                wait = 0.2  # it is in an update, is not back yet from the last time, or is the only one
                continue
            try:
                psutil.Process(psutil.Process(status.workers[0].pid).ppid()).kill()
                self.kills, last, due = self.kills + 1, time.monotonic(), due + self._seconds
                wait = max(0.1, due - last)
            except psutil.NoSuchProcess:
                continue

    def _in_turn(self) -> Any:
        while True:
            yield from self._cluster.replicas

    def end(self) -> None:
        self._ended.set()
        self.join(60)


def update_for(
    trainer: Trainer,
    model: Any,
    models: Sequence[Any],
    seconds: float,
    apart: float,
    enough: Callable[[], bool],
    served: Callable[[int], object],
    modes: Sequence[str] = MODES,
) -> int:
    """Updates through the pause modes, as far apart, for so long, and on a slow machine on until there is enough; three
    times as long at most. Version v has the weights of models[v % len(models)]. Returns the last version.

    served: called with each version that an update has brought.
    """
    begun, version = time.monotonic(), 0
    while (passed := time.monotonic() - begun) < seconds or (passed < 3 * seconds and not enough()):
        version += 1
        take(model, models[version % len(models)])
        trainer.update_weights(version=version, pause_mode=modes[version % len(modes)], min_replicas=1)  # type: ignore[arg-type]
        served(version)
        time.sleep(max(0.0, apart - (time.monotonic() - begun - passed)))
    return version


def take(model: Any, other: Any) -> None:
    """The weights of another one, in place."""
    with torch.no_grad():
        for mine, its in zip(model.parameters(), other.parameters(), strict=True):
            mine.copy_(its)


def count(answers: Sequence[Answer]) -> Tally:
    """What callers saw: each of their answers is whole, and its spans have no hole and are exact."""
    tally = Tally()
    for answer in answers:
        tally.answers += 1
        tally.tokens += len(answer.told)
        tally.longest = max(tally.longest, answer.seconds)
        assert_bounded(answer)
        if answer.reason in OF_BOUNDS and not answer.error:
            tally.ended[answer.reason] += 1
            continue
        tally.bounded += bool(answer.bounds)
        tally.openai += answer.openai and not answer.error
        if answer.error or answer.finish != "length" or len(answer.told) != TOKENS:
            why = answer.error or answer.reason
            tally.failures.append(f"{len(answer.told)} tokens, finish {answer.finish!r}: {why}")
            continue
        said = answer.said
        at = 0
        for span in said["spans"]:
            assert span["first"] == at, f"a hole in {said['spans']}"
            at += span["count"]
        assert at == TOKENS, said["spans"]
        # What a real engine had not labelled when it was killed is of a range of versions.
        assert said["exact"] or (any(leg["ended"] == "broken" for leg in said["legs"])), said["spans"]
        tally.crossed += said["min_version"] != said["max_version"]
        tally.resumed += said["resumes"] > 0
        delivered = 0
        for before, leg in zip(said["legs"], said["legs"][1:], strict=False):
            delivered += before["count"]
            tally.kills_late += before["ended"] == "broken" and delivered >= 10
            tally.from_zero += delivered > 0 and leg["first"] != delivered
            tally.not_begun += delivered == 0
    return tally


def assert_bounded(answer: Answer) -> None:
    """No token of it is of a version that its caller did not ask for."""
    spans = answer.said.get("spans", [])
    least = answer.bounds.get("min_version", answer.bounds.get("exact_version"))
    if (session := answer.bounds.get("session", "new")) != "new":
        least = int(session.split(":")[0])
    for span in spans if least is not None else []:
        assert span["min_version"] is not None, answer
        assert span["min_version"] >= least, answer
        assert "exact_version" not in answer.bounds or span["max_version"] == least, answer


def judge(answers: Sequence[Answer], models: Sequence[Any]) -> int:
    """Compares each token with the weights that it is said to be of; of an exact version's answer all that came, also
    of one that was ended early. Returns how many were compared.

    Tokens computed over caches that an older version had made are no version's alone, and are not judged.
    """
    exact = sum(_judge_exact(answer, models) for answer in answers if "exact_version" in answer.bounds)
    return exact + sum(_judge_one(answer, models) for answer in answers if answer.finish and not answer.error)


def _judge_exact(answer: Answer, models: Sequence[Any]) -> int:
    version = answer.bounds["exact_version"]
    found = regrets(models[version % len(models)], answer.prompt, answer.told) if answer.told else []
    assert max(found, default=0.0) < ROUNDING, f"a token is not of version {version}: {answer}"
    return len(found)


def _judge_one(answer: Answer, models: Sequence[Any]) -> int:
    count, found = 0, {}
    for span in answer.said["spans"]:
        if span["caches"] != "recomputed" or not span["exact"]:
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


def play(
    path: Path,
    start: Callable[[Cluster, str], object],
    replicas: int,
    streams: int,
    seconds: float,
    crossed: int,
    late: int,
    rollbacks: bool = False,
    route: str = "/v1/completions",
    apart: float = 1.0,
    make: Callable[..., Any] = make_model,
    modes: Sequence[str] = MODES,
    device: str = "cpu",
    judged: int | None = None,
) -> Tally:
    """Runs it for so long, and longer until so many answers crossed two versions and so many legs were killed late.

    start: starts a replica by its name; its model is at `path / "bare"`. rollbacks: every so many updates the last one
    is taken back, from a relay that has the one before. apart: seconds from one update to the next. make: makes models.
    modes: that the engine can be paused in. device: of the trainer. judged: so many answers at most, evenly
    drawn from all, are compared with the weights; None: all.
    """
    torch.set_num_threads(1)
    models = [make(path / f"weights-{number}", number) for number in range(WEIGHTS)]
    model = make(path / "model", 0).to(device)
    make(path / "bare", weights=False)
    with running_cluster(path) as cluster:
        for number in range(replicas):
            start(cluster, f"r{number}")
        for replica in cluster.replicas:
            replica.registered(600)
        if rollbacks:
            cluster.relay("relay").registered()
        options = ("--manager", cluster.address, "--workers", "2")
        with Trainer(cluster.address, lineage="run") as trainer, running_gateway(path / "g.log", *options) as gateway:
            trainer.publish(model, move=True)
            assert trainer.update_weights(version=0).ok
            gateway.ready()
            callers = Streams(gateway.url, streams, 1, route)
            killer = Killer(cluster, callers, KILLS_APART * apart)

            def enough() -> bool:
                now = count(callers.answers)
                return now.crossed >= crossed and now.kills_late >= late

            def served(version: int) -> None:
                callers.newest = version
                if rollbacks and version % BACK_EVERY == 0:
                    callers.newest = 0
                    mode = MODES[version // BACK_EVERY % len(MODES)]
                    try:
                        with Client(cluster.address) as client:
                            taken_back.append(client.rollback(version - 1, pause_mode=mode).version)
                    except CkptEngineError as error:
                        if error.code is not ErrorCode.NOT_FOUND:  # an update may have gone on without the relay
                            raise

            taken_back: list[int] = []
            try:
                versions = update_for(trainer, model, models, seconds, apart, enough, served, modes)
            finally:
                killer.end()
                answers = callers.end()
            tally = count(answers)
            tokens = judge(answers if judged is None else answers[:: len(answers) // judged + 1], models)
            print(f"{tally} judged={tokens} {versions=} kills={killer.kills} rollbacks={len(taken_back)}")
            assert not tally.failures, f"{reasons(tally)}\n{gateway.tail()}"
    assert tokens
    assert tally.bounded
    assert tally.openai or route != "/v1/completions"
    assert bool(taken_back) == rollbacks
    assert tally.from_zero == 0
    assert tally.resumed
    assert tally.crossed >= crossed
    assert tally.kills_late >= late
    return tally
