"""A server whose two workers are on two hosts, neither of them the trainer's: each is fed by the relay of its host."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_engine.core.deadlines import ENVIRONMENT as DEADLINES
from tests.end_to_end.conftest import PADDED_VOCABULARY
from tests.end_to_end.test_several_hosts import TOKENS, World
from tests.network.hosts import hosts
from tests.tiny_model import DECISIVE_GAP, decisive_prompts, make_tiny_qwen3, named_weights, reference_tokens

pytestmark = pytest.mark.slow

ROWS = (256, PADDED_VOCABULARY - 256)
"""Of the vocabulary, which is padded to 512, that each worker has."""

CONTROL = 1_000_000
"""Bytes that members may send for an update besides the weights."""


@pytest.fixture
def world(tmp_path: Path, bare_model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setenv(DEADLINES, "lease=60")  # a crowded machine may silence an agent for longer than the usual one
    with ExitStack() as stack:
        yield World(tmp_path, bare_model, stack.enter_context(hosts(3)), stack)


def start(world: World, path: Path, model: Path) -> None:
    """The server `wide`: node 0 on the second host, node 1 on the third one."""
    token = path / "node.token"
    token.write_text(secrets.token_hex(32))
    for rank, host in enumerate(world.hosts[1:]):
        runtime = path / f"n{rank}"
        runtime.mkdir(mode=0o700)
        world.start(
            *(f"wide-{rank}", rank + 1, "agent", "--manager", world.address, "--engine", "reference"),
            *("--model", str(model), "--name", "wide", "--engine-output", "--advertise", host.address),
            *("--nodes", "2", "--node-rank", str(rank), "--leader", f"{world.hosts[1].address}:7100"),
            *("--node-token", str(token), "--", "--tensor-parallel", "2", "--host", "0.0.0.0"),
            XDG_RUNTIME_DIR=str(runtime),
            GLOO_SOCKET_IFNAME=host.device,
        )


def needed(model: Any, rank: int) -> int:
    """Bytes of the model that one of two workers has: norms whole, its rows of the vocabulary, half of all else."""
    total = 0
    for name, tensor in named_weights(model):
        if "norm" in name:
            total += tensor.nbytes
        elif len(tensor) == PADDED_VOCABULARY:
            total += tensor[: ROWS[rank]].nbytes
        else:
            total += tensor.nbytes // 2
    return total


def test_the_relay_of_each_node_brings_what_its_worker_needs(world: World, tmp_path: Path, bare_model: Path) -> None:
    torch.set_num_threads(1)
    for host in range(3):
        world.relay(host)
    start(world, tmp_path, bare_model)
    world.registers("wide")
    for version in (1, 2):
        model = make_tiny_qwen3(tmp_path / "expected", version, vocabulary=PADDED_VOCABULARY, weights=False)
        prompt = decisive_prompts(model, 1, TOKENS)[0]
        reference = reference_tokens(model, prompt, TOKENS)
        assert reference.gap > DECISIVE_GAP
        assert world.trainer.ask(train=[str(tmp_path / "train"), version]) is True
        sent = world.hosts[0].sent()
        received = [host.received() for host in world.hosts[1:]]
        report = world.trainer.ask(update={"version": version, "until": "held"})
        assert world.trainer.ask(spoil=True) is True
        assert report.get("held"), report
        for rank in (0, 1):
            relay, need = report["relays"][f"relay r{rank + 1}"], needed(model, rank)
            assert relay["replicas"] == ["wide"]
            assert need <= sum(relay["brought"].values()) <= 1.02 * need, (relay, need)
            assert world.hosts[rank + 1].received() - received[rank] < 1.02 * need + CONTROL
        world.serves("wide", version)
        assert world.tokens("wide", 1, prompt) == reference.tokens
        assert world.hosts[0].sent() - sent < 1.02 * (needed(model, 0) + needed(model, 1)) + CONTROL
