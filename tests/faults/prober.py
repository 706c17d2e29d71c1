"""Asks one replica for tokens all the time, and keeps every answer that it must not have given."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from ckpt_engine.install.holding import ASLEEP, DEAD_WORKER, NO_WEIGHTS, QUARANTINED
from tests.tiny_model import DECISIVE_GAP, make_tiny_qwen3, reference_tokens

SEEDS = 3
TOKENS = 8
PAUSE_SECONDS = 0.1
REASONS = {ASLEEP, DEAD_WORKER, NO_WEIGHTS, QUARANTINED}


@dataclass(frozen=True)
class Expected:
    """What weights of each seed answer to one prompt at which rounding decides for none of them."""

    prompt: list[int]
    tokens: list[list[int]]


def make_weights(path: Path) -> Expected:
    """Writes a directory with model.safetensors for each seed, and finds a prompt that tells them apart."""
    import torch

    models = [make_tiny_qwen3(path / str(seed), seed, layers=1, hidden=64, vocabulary=256) for seed in range(SEEDS)]
    generator = torch.Generator().manual_seed(1)
    while True:
        prompt = torch.randint(0, 256, (6,), generator=generator).tolist()
        found = [reference_tokens(model, prompt, TOKENS) for model in models]
        if all(each.gap > DECISIVE_GAP for each in found) and len({each.tokens[0] for each in found}) == SEEDS:
            return Expected(prompt, [each.tokens for each in found])


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
        """An answer's tokens are those of the one version that it names; while versions change, up to the change."""
        answer = response.json()
        tokens, versions = answer["output_ids"], [each["version"] for each in answer["weight_versions"]]
        if not versions:
            return  # ended by a pause before its first token
        self.answers += 1
        self.last = Answer(began, versions[-1])
        first, header = versions[0], int(response.headers["x-ckpt-engine-version"])
        if max(*versions, header) > self.highest():
            self.violations.append(f"{self.replica} names version {versions}, but {self.highest()} is the highest")
        seed = first % SEEDS
        if len(set(versions)) == 1 and not same(tokens, self.expected.tokens[seed]):
            self.violations.append(f"{self.replica} answers {tokens} as version {first}: {self.expected.tokens[seed]}")
        root = response.headers["x-ckpt-engine-root"]
        if self._roots.setdefault(header % SEEDS, root) != root:
            self.violations.append(f"{self.replica} has two roots for one content: {root}, version {header}")


def same(tokens: Sequence[int], expected: Sequence[int]) -> bool:
    """An answer that was cut short by a pause is right as far as it goes."""
    return list(tokens) == list(expected[: len(tokens)])
