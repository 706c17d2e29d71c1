"""A trainer on two hosts, a replica on a third: each trainer's host has a relay with room for what that brings only."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import eventually
from tests.end_to_end.conftest import PADDED_VOCABULARY
from tests.end_to_end.test_several_hosts import TOKENS, World
from tests.line_process import LineProcess
from tests.network.hosts import NetworkHost, hosts
from tests.tiny_model import decisive_prompts, make_tiny_qwen3, named_weights, reference_tokens

pytestmark = pytest.mark.slow

SHAPE = {"layers": 6, "intermediate": 8192}
"""40 MB."""


class Halves(World):
    """Rank 0 is on the manager's host, rank 1 on the next one; each has every other tensor."""

    def __init__(self, path: Path, model: Path, found: list[NetworkHost], stack: ExitStack) -> None:
        super().__init__(path, model, found, stack)
        second = LineProcess(self.TRAINER, self.address, before=self.inside[1], OMP_NUM_THREADS="1")
        self.ranks = [self.trainer, stack.enter_context(second)]

    def relay_of(self, name: str, host: int, memory: str) -> None:
        """A relay with a directory of its own; the replica's host has that of the host."""
        folder = self.relays(host) if host == 2 else self.path / name
        folder.mkdir(mode=0o700, exist_ok=True)
        self.start(
            *(name, host, "relay", "--manager", self.address, "--name", name, "--memory", memory),
            *("--listen", f"{self.hosts[host].address}:0", "--insecure", "--directory", str(folder)),
        )
        eventually(f"relay {name} registers", 120.0, lambda: name in self.status()["relays"])

    def train(self, version: int) -> list[int]:
        """Bytes of each rank's weights."""
        folder = self.path / f"expected-{version}"
        self.model = make_tiny_qwen3(folder, version, vocabulary=PADDED_VOCABULARY, weights=False, **SHAPE)
        sizes = [tensor.numel() * tensor.element_size() for _, tensor in named_weights(self.model)]
        for rank, trainer in enumerate(self.ranks):
            train = [str(self.path / f"train-{rank}"), version]
            assert trainer.ask(train=train, shape=SHAPE, share=[rank, 2]) is True
        return [sum(sizes[rank::2]) for rank in range(2)]

    def update(self, version: int) -> dict[str, Any]:
        wishes = {"version": version, "until": "held"}
        with ThreadPoolExecutor(len(self.ranks)) as pool:
            told: list[dict[str, Any]] = list(pool.map(lambda rank: rank.ask(update=wishes), self.ranks))
        return told[0]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[Halves]:
    model = tmp_path / "bare"
    make_tiny_qwen3(model, vocabulary=PADDED_VOCABULARY, weights=False, **SHAPE)
    with ExitStack() as stack:
        yield Halves(tmp_path, model, stack.enter_context(hosts(3)), stack)


def test_each_trainers_host_needs_memory_for_its_part_and_too_little_is_told(world: Halves) -> None:
    """A slot of 32 MiB takes half of the model and not all of it; one of 4 MiB not even a half."""
    world.relay_of("a-small", 0, "8MiB")
    world.relay_of("b", 1, "64MiB")
    world.relay_of("c", 2, "128MiB")
    world.replica("far", 2)
    world.registers("far")
    first, second = world.train(1)
    assert max(first, second) < 32 << 20 < first + second
    refused = world.update(1)
    assert not refused.get("held")
    assert "a-small" in str(refused), refused
    assert "bytes of a relay's slot, and a slot has 4194304" in str(refused), refused

    world.relay_of("a", 0, "64MiB")
    for version in (2, 3):
        sizes = world.train(version)
        report = world.update(version)
        assert report.get("held"), report
        relays = report["relays"]
        assert relays["relay a"]["brought"] == {"rank 0": sizes[0]}
        assert relays["relay b"]["brought"] == {"rank 1": sizes[1]}
        assert relays["relay c"]["brought"] == {"relay a": sizes[0], "relay b": sizes[1]}
        assert relays["relay c"]["replicas"] == ["far"]
        for rank in world.ranks:
            assert rank.ask(spoil=True) is True
        world.serves("far", version)
        prompt = decisive_prompts(world.model, 1, TOKENS)[0]
        assert world.tokens("far", 2, prompt) == reference_tokens(world.model, prompt, TOKENS).tokens
