"""Updates by a collective on real processes: two ranks and their replicas, over Gloo, since all of them are on CPUs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cluster import Cluster, Replica, eventually, generate, running_cluster
from tests.end_to_end.conftest import PADDED_VOCABULARY
from tests.line_process import LineProcess
from tests.tiny_model import decisive_prompts, make_tiny_qwen3, reference_tokens

pytestmark = pytest.mark.slow

TOKENS = 8


class World:
    """A cluster, and two trainer ranks that publish for collectives."""

    def __init__(self, cluster: Cluster, path: Path, bare_model: Path) -> None:
        self.cluster, self.path, self.bare = cluster, path, bare_model
        self.ranks: list[LineProcess] = []

    def replica(self, name: str, *arguments: str) -> Replica:
        return self.cluster.replica(name, "reference", self.bare, *arguments)

    def update(self, seed: int) -> Any:
        """What both ranks say; they say the same."""
        for rank in self.ranks:
            rank.send(seed=seed)
        told, other = [rank.answer() for rank in self.ranks]
        assert told == other
        return told

    def serves(self, seed: int, *replicas: Replica) -> None:
        """Greedy tokens are transformers'."""
        path = self.path / "model" / str(seed)
        model = make_tiny_qwen3(path, seed, vocabulary=PADDED_VOCABULARY, weights=False)
        prompt = decisive_prompts(model, 1, TOKENS)[0]
        expected = reference_tokens(model, prompt, TOKENS).tokens
        for replica in replicas:
            assert generate(replica, prompt, TOKENS) == expected, replica.name


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, bare_model: Path) -> Iterator[World]:
    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp("collective")
    with ExitStack() as stack:
        cluster = stack.enter_context(running_cluster(path / "cluster"))
        world = World(cluster, path, bare_model)
        world.replica("one")
        world.replica("two", "--tensor-parallel", "2")
        for rank in range(2):
            arguments = "tests.end_to_end.collective_rank", cluster.address, str(rank), str(path), "together"
            world.ranks.append(stack.enter_context(LineProcess(*arguments, OMP_NUM_THREADS="1")))
        for replica in cluster.replicas:
            replica.registered()
        assert [rank.answer() for rank in world.ranks] == [{"published": True}] * 2
        yield world


def outcomes(told: Any) -> dict[str, str]:
    return {replica["replica"]: replica["outcome"] for replica in told["replicas"]}


def test_two_ranks_bring_the_weights_to_all_workers(world: World) -> None:
    one, two = world.cluster.replicas
    for seed in (1, 2, 3):
        told = world.update(seed)
        assert told.get("ok"), told
        assert told["verified"]
        assert told["collective"] == ("one and two are updated by a collective: the trainer publishes for it alone")
        assert {each["transport"] for replica in told["replicas"] for each in replica["edges"]} == {"nccl"}
        world.serves(seed, one, two)


def test_a_replica_that_comes_late_waits_for_the_next_update(world: World) -> None:
    third = world.replica("third")
    third.registered()
    try:
        said = "no collective: a late replica is brought up without the others"
        eventually("it is told why it waits", 60, lambda: said in str(third.status))
        assert not third.status.serving
        told = world.update(11)
        assert told["ok"], told
        assert told["collective"].startswith("one, third and two are updated by a collective")
        world.serves(11, *world.cluster.replicas)
    finally:
        third.stop()
        world.cluster.replicas.remove(third)
    told = world.update(12)
    assert {name: outcome for name, outcome in outcomes(told).items() if name != "third"} == {
        "one": "OUTCOME_NEW_SERVING",
        "two": "OUTCOME_NEW_SERVING",
    }
    assert told["collective"].startswith("one and two are updated by a collective")
