"""Collectives over Gloo whose members are on several hosts: network namespaces that share nothing but a switch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from ckpt_engine.v1 import manager_pb2
from tests.cluster import eventually
from tests.end_to_end.conftest import PADDED_VOCABULARY
from tests.end_to_end.test_several_hosts import TOKENS, World
from tests.network.hosts import hosts
from tests.tiny_model import DECISIVE_GAP, decisive_prompts, make_tiny_qwen3, reference_tokens

pytestmark = pytest.mark.slow


@pytest.fixture
def world(tmp_path: Path, bare_model: Path) -> Iterator[World]:
    """The manager and the trainer on the first host, a replica on each of two."""
    with ExitStack() as stack:
        made = World(tmp_path, bare_model, stack.enter_context(hosts(2)), stack)
        for number, name in enumerate(("near", "far")):
            made.replica(name, number)
        for name in ("near", "far"):
            made.registers(name)
        yield made


def publish(world: World, path: Path, seed: int, **given: Any) -> None:
    """The trainer offers the weights of a seed for collectives."""
    wishes = {"train": [str(path / str(seed)), seed], "publish": {"transport": "nccl"}, **given}
    assert world.trainer.ask(**wishes) is True


def update(world: World) -> dict[str, Any]:
    """What came of one."""
    found: dict[str, Any] = world.trainer.ask(update={"timeout": 60.0})
    return found


def connected(world: World, name: str) -> bool:
    answer = manager_pb2.GetStatusResponse.FromString(bytes.fromhex(world.trainer.ask(members=True)))
    return any(each.connected and each.serving for each in answer.replicas if each.name == name)


def generates(world: World, path: Path, seed: int) -> None:
    """Both replicas generate what transformers does with the weights of a seed."""
    model = make_tiny_qwen3(path / f"like-{seed}", seed, vocabulary=PADDED_VOCABULARY, weights=False)
    prompt = decisive_prompts(model, 1, TOKENS)[0]
    reference = reference_tokens(model, prompt, TOKENS)
    assert reference.gap > DECISIVE_GAP
    for number, name in enumerate(("near", "far")):
        assert world.tokens(name, number, prompt) == reference.tokens, name


def test_a_trainer_that_tells_no_address_reaches_its_own_host_only(world: World, tmp_path: Path) -> None:
    publish(world, tmp_path, 1)
    told = update(world)
    assert told["outcomes"] == {"near": "new_serving", "far": "quarantined"}, told
    for words in ("at no address of its network", "finds the members of its collective", "advertise"):
        assert words in told["problems"]["far"], told


def test_replicas_of_two_hosts_take_part_and_a_cut_link_is_named_and_mended(world: World, tmp_path: Path) -> None:
    publish(world, tmp_path, 1, advertise=world.hosts[0].address)
    told = update(world)
    assert told["outcomes"] == {"near": "new_serving", "far": "new_serving"}, told
    assert "far and near are updated by a collective" in told["collective"]
    assert told["transports"] == {"near": ["nccl"], "far": ["nccl"]}
    generates(world, tmp_path, 1)
    world.hosts[1].cut()
    try:
        told = update(world)  # over the communicator that they keep
    finally:
        world.hosts[1].mend()
    assert told["outcomes"]["near"] == "old_serving", told
    assert "far" in told["problems"]["near"], told
    eventually("far is back", 120.0, lambda: connected(world, "far"))
    publish(world, tmp_path, 2)
    told = update(world)
    assert told["outcomes"] == {"near": "new_serving", "far": "new_serving"}, told
    generates(world, tmp_path, 2)
