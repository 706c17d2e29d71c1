"""What is asked of a vLLM server with a draft model, on a CPU and on a GPU: both models are parts of one version.

What a draft holds shows in how many of its guesses the target accepts; what the target holds, in its tokens, which no
draft changes. Both are compared with a server that has loaded the same files by itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from safetensors.torch import save_file

from ckpt_engine import CkptEngineError, Trainer, UpdateReport
from ckpt_engine.v1.manager_pb2 import PartReport
from tests.cluster import Replica
from tests.engines.draft_models import Version
from tests.engines.plain import PlainServer
from tests.engines.vllm_server import complete, tokens
from tests.waiting import eventually

PROMPTS = [[3, 5, 7, 11, 13, 17], [101, 2, 333, 44, 250, 6], [17, 400, 8, 91, 77, 5]]

FRESH = 4
"""The version that a server without us has loaded from files."""


class Counts(NamedTuple):
    """What a server has counted: tokens that its draft guessed, and those of them that the target accepted."""

    guessed: int
    accepted: int

    def since(self, before: Counts) -> Counts:
        return Counts(self.guessed - before.guessed, self.accepted - before.accepted)


def counts(server: Replica | PlainServer) -> Counts:
    text = httpx.get(f"{server.url}/metrics", timeout=60).text
    found = [
        sum(float(value) for value in re.findall(rf"^vllm:spec_decode_num_{what}_total{{.*?}} (\S+)$", text, re.M))
        for what in ("draft_tokens", "accepted_tokens")
    ]
    return Counts(*map(int, found))


def guesses(server: Replica | PlainServer) -> tuple[list[list[int]], Counts]:
    """The greedy tokens after each prompt, and what was counted for all of them."""
    before = counts(server)
    answers = [tokens(complete(server, prompt)) for prompt in PROMPTS]
    found: list[Counts] = []

    def counted() -> bool:
        """Whether the counts stand still: the server counts a step after it has sent the step's tokens."""
        found.append(counts(server))
        return len(found) > 1 and found[-1] == found[-2] != before

    eventually("the guesses are counted", 60, counted)
    return answers, found[-1].since(before)


def handling(report: UpdateReport, part: str = "draft") -> PartReport:
    """What the only worker of the only replica says of a part."""
    (found,) = (each for each in report.replicas[0].message.workers[0].parts if each.part == part)
    return found


def save(kind: Any, path: Path) -> None:
    """Writes the files of version FRESH beside their configurations."""
    version = kind.version(path, FRESH)
    for part, weights in (("target", version.target), ("draft", version.draft)):
        if weights is not None:
            save_file(
                {name: each.contiguous() for name, each in weights.items()},
                path / part / "model.safetensors",
                metadata={"format": "pt"},
            )


def check_drafts(
    kind: Any, path: Path, trainer: Trainer, replica: Replica, fresh: PlainServer, told: Callable[[object], object]
) -> None:
    """Versions with right and wrong drafts, without one, and one that is refused. told: takes what was counted."""

    def publish(number: int, version: Version) -> UpdateReport:
        trainer.publish(version.target, draft=version.draft)
        report = trainer.update_weights(version=number)
        assert report.ok, f"{report}\n{replica.tail()}"
        assert report.verified
        assert handling(report).handling == PartReport.HANDLING_INSTALLED
        told(report)
        return report

    for number in (1, 2):
        report = publish(number, kind.version(path, number))
        _, right = guesses(replica)
        told(right)
        assert right.accepted > 0.5 * right.guessed > 0
    assert bool(handling(report).shared) == kind.shared
    publish(3, kind.version(path, 3, right=False))
    _, wrong = guesses(replica)
    told(wrong)
    assert wrong.accepted < 0.3 * wrong.guessed
    publish(FRESH, kind.version(path, FRESH))
    fresh.wait(900)
    assert guesses(replica) == guesses(fresh)
    if kind.name == "eagle":
        _refuses_another_embedding(kind, path, trainer, replica)
    _keeps_the_draft(kind, path, trainer, replica, told)


def _refuses_another_embedding(kind: Any, path: Path, trainer: Trainer, replica: Replica) -> None:
    """The server has one embedding for both models."""
    version = kind.version(path, 5)
    assert version.draft is not None
    version.draft["embed_tokens.weight"][3, 5] += 1
    trainer.publish(version.target, draft=version.draft)
    report = trainer.update_weights(version=5)
    assert not report.ok
    (outcome,) = report.replicas
    assert outcome.outcome == "old_serving"
    assert "draft::embed_tokens.weight and model.embed_tokens.weight" in outcome.problem
    assert complete(replica, PROMPTS[0]).headers["x-ckpt-engine-admitted-version"] == str(FRESH)


def _keeps_the_draft(
    kind: Any, path: Path, trainer: Trainer, replica: Replica, told: Callable[[object], object]
) -> None:
    """A version of the target alone is refused, unless the draft may keep its weights; then its guesses go wrong."""
    target = {name: each for name, each in kind.version(path, 6).target.items() if "mtp" not in name}
    trainer.publish(target)
    with pytest.raises(CkptEngineError, match=r"has a draft model, and the version has no weights for it"):
        trainer.update_weights(version=6)
    assert complete(replica, PROMPTS[0]).headers["x-ckpt-engine-admitted-version"] == str(FRESH)
    report = trainer.update_weights(version=6, draft="keep")
    assert report.ok, f"{report}\n{replica.tail()}"
    assert handling(report).handling == PartReport.HANDLING_KEPT
    assert "its draft keeps its weights: the version has none for it" in str(report)
    _, kept = guesses(replica)
    told(kept)
