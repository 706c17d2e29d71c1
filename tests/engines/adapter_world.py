"""A real vLLM server with adapters, and the trainers and judges of their versions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import torch

from ckpt_engine import Trainer
from tests.cluster import Cluster, Replica, running_cluster
from tests.engines.adapter_models import merged
from tests.engines.serving import publish
from tests.engines.vllm_server import start_vllm, tokens
from tests.tiny_model import ROUNDING, make_tiny_qwen3, regrets
from tests.waiting import eventually

PROMPT = [3, 5, 7, 11, 13, 17]
LORA = ("--enable-lora", "--max-loras", "3", "--max-lora-rank", "8")


def ask(server: Any, model: str, count: int = 32, prompt: Sequence[int] = PROMPT) -> httpx.Response:
    """The answer to one greedy completion of token ids."""
    body = {"model": model, "prompt": list(prompt), "max_tokens": count, "temperature": 0, "ignore_eos": True}
    return httpx.post(
        f"{server.url}/v1/completions", json={**body, "return_token_ids": True, "detokenize": False}, timeout=120
    )


def version_of(answer: httpx.Response) -> int:
    """The version of the adapter that made an answer, by its header."""
    return int(answer.headers["x-ckpt-engine-adapter"].rpartition("@")[2])


@dataclass
class World:
    """A server with adapters, and what was brought to it."""

    cluster: Cluster
    base: Any
    root: str = ""
    made: dict[str, Any] = field(default_factory=dict)  # by served name: base and adapter merged in float32

    @property
    def replica(self) -> Replica:
        return self.cluster.replicas[0]

    def bring_base(self, version: int) -> None:
        """Updates the base."""
        with Trainer(self.cluster.address, lineage="base") as trainer:
            publish(trainer, self.base)
            report = trainer.update_weights(version=version)
        assert report.ok, f"{report}\n{self.replica.tail()}"
        self.root = report.root

    def trainer(self, name: str) -> Trainer:
        """A trainer rank of an adapter."""
        return Trainer(self.cluster.address, lineage=name, pool=name)

    def note(self, name: str, model: Any) -> None:
        """Keeps what a version's tokens are judged by."""
        self.made[name] = merged(model)

    def check(self, answer: httpx.Response, name: str) -> None:
        """The answer's tokens are those of this version."""
        found = tokens(answer)
        assert answer.headers["x-ckpt-engine-adapter"] == name
        worst = max(regrets(self.made[name], list(PROMPT), found))
        assert worst < ROUNDING, (name, worst)


@contextmanager
def adapter_world(
    path: Path, adapters: Sequence[str], *arguments: str, tensor_parallel: int = 1, serve: bool = False, **model: int
) -> Iterator[World]:
    """A server with version 1 of a base, and with empty shelves. adapters: values of --adapter. arguments: vLLM's.
    model: the base's sizes."""
    torch.set_num_threads(1)
    make_tiny_qwen3(path / "bare", weights=False, **model)
    with running_cluster(path) as running:
        options = [word for each in adapters for word in ("--adapter", each)]
        start_vllm(
            *(running, "vllm", path / "bare", *LORA, *arguments),
            options=options,
            tensor_parallel=tensor_parallel,
            serve=serve,
        ).registered(600)
        made = World(running, make_tiny_qwen3(path / "base", 83, **model))
        made.bring_base(1)
        names = {f"vllm.{each.partition('=')[0]}" for each in adapters}
        eventually(
            "the shelves are there",
            240,
            lambda: names <= {each.name for each in running.status().replicas if each.connected},
        )
        yield made
