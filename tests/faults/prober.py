"""Asks one replica for tokens all the time, and keeps every answer that it must not have given."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from ckpt_engine.gate.holding import ALONE, ASLEEP, DEAD_WORKER, NO_WEIGHTS, QUARANTINED
from tests.tiny_model import DECISIVE_GAP, ROUNDING, make_tiny_qwen3, reference_tokens, regrets

SEEDS = 3
TOKENS = 8
PAUSE_SECONDS = 0.1
REASONS = {ALONE, ASLEEP, DEAD_WORKER, NO_WEIGHTS, QUARANTINED}


@dataclass(frozen=True)
class Expected:
    """What weights of each seed answer to one prompt at which rounding decides for none of them."""

    prompt: list[int]
    tokens: list[list[int]]
    models: list[Any]

    def made(self, version: int, before: list[int], tokens: list[int]) -> bool:
        """Whether weights of `version` make `tokens` after the prompt and `before`, with caches of their own."""
        seed, start = version % SEEDS, len(before)
        if before == self.tokens[seed][:start]:
            return tokens == self.tokens[seed][start : start + len(tokens)]
        return max(regrets(self.models[seed], self.prompt + before, tokens)) < ROUNDING


def make_weights(path: Path) -> Expected:
    """Writes a directory with model.safetensors for each seed, and finds a prompt that tells them apart."""
    import torch

    models = [make_tiny_qwen3(path / str(seed), seed, layers=1, hidden=64, vocabulary=256) for seed in range(SEEDS)]
    generator = torch.Generator().manual_seed(1)
    while True:
        prompt = torch.randint(0, 256, (6,), generator=generator).tolist()
        found = [reference_tokens(model, prompt, TOKENS) for model in models]
        if all(each.gap > DECISIVE_GAP for each in found) and len({each.tokens[0] for each in found}) == SEEDS:
            return Expected(prompt, [each.tokens for each in found], models)


@dataclass
class Answer:
    """One answered request. began: time.monotonic() before it was sent. version: that of its last token."""

    began: float
    version: int


class Prober(threading.Thread):
    """url: of the replica, running or not. highest: the last version that anybody has tried to publish."""

    def __init__(
        self, name: str, url: str, expected: Expected, highest: Callable[[], int], pause: float = PAUSE_SECONDS
    ) -> None:
        super().__init__(daemon=True)
        self._pause = pause
        self.replica, self.url, self.expected, self.highest = name, url, expected, highest
        self.violations: list[str] = []
        self.answers = self.refusals = 0
        self.last: Answer | None = None
        self._ended = threading.Event()
        self._roots: dict[int, str] = {}

    def run(self) -> None:
        body = {"input_ids": self.expected.prompt, "max_tokens": TOKENS, "temperature": 0}
        with httpx.Client(timeout=30.0) as client:
            while not self._ended.wait(self._pause):
                began = time.monotonic()
                try:
                    response = client.post(f"{self.url}/generate", json=body)
                except httpx.HTTPError:
                    continue
                if response.status_code == 200:
                    self._judge(began, response)
                else:
                    self.refusals += 1
                    self._refused(response)

    def end(self) -> None:
        self._ended.set()
        self.join(60)

    def answered(self, version: int, since: float, seconds: float) -> bool:
        """Whether a request that began after `since` was answered with weights of `version`, within `seconds`."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            last = self.last
            if last is not None and last.began >= since and last.version == version:
                return True
            time.sleep(0.02)
        return False

    def _refused(self, response: httpx.Response) -> None:
        """Only with a reason that is one: weights that change are none, since requests wait for the end of that."""
        reason = response.json().get("reason")
        if reason not in REASONS:
            self.violations.append(
                f"{self.replica} refuses with {response.status_code} and {reason!r}: {response.text}"
            )

    def _judge(self, began: float, response: httpx.Response) -> None:
        answer = response.json()
        if not answer["weight_versions"]:
            return  # ended by a pause before its first token
        self.answers += 1
        self.last = Answer(began, answer["weight_versions"][-1]["version"])
        found = wrong(self.expected, self.highest(), answer, response.headers, self._roots)
        self.violations += [f"{self.replica} {each}" for each in found]


def wrong(
    expected: Expected, highest: int, answer: Mapping[str, Any], headers: Mapping[str, str], roots: dict[int, str]
) -> list[str]:
    """What must not be in an answer of the reference engine, over updates in pause mode keep.

    The body names a version for each token, which must be of its weights. The headers name the version that was there
    when the request was let in; what is there later is never older. roots: those seen of each content; filled in here.
    """
    tokens, spans = answer["output_ids"], answer["weight_versions"]
    found = []
    ends = [0, *(span["end"] for span in spans)]
    if [span["start"] for span in spans] != ends[:-1] or ends[-1] != len(tokens):
        found.append(f"does not say of each of {len(tokens)} tokens which version made it: {spans}")
    for span in spans:
        version, start, end = span["version"], span["start"], span["end"]
        if version > highest:
            found.append(f"names version {version}, but {highest} is the highest")
        if not expected.made(version, tokens[:start], tokens[start:end]):
            found.append(f"calls tokens {start} to {end} of {tokens} those of version {version}, which they are not")
    admitted, root = int(headers["x-ckpt-engine-admitted-version"]), headers["x-ckpt-engine-admitted-root"]
    if admitted > spans[0]["version"]:
        found.append(f"let a request in under version {admitted} and answered it with version {spans[0]['version']}")
    if roots.setdefault(admitted % SEEDS, root) != root:
        found.append(f"has two roots for one content: {root}, version {admitted}")
    return found
