"""A trainer and three hosts with replicas: each byte leaves the trainer's host once, also where a relay is killed; and
who is slow passes nothing on by and by."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import eventually
from tests.end_to_end.conftest import PADDED_VOCABULARY
from tests.end_to_end.test_several_hosts import TOKENS, World
from tests.network.hosts import NetworkHost, hosts, ip, process_inside
from tests.tiny_model import decisive_prompts, make_tiny_qwen3, named_weights, reference_tokens

pytestmark = pytest.mark.slow

SHAPE = {"layers": 6, "intermediate": 8192}
"""40 MB, no tensor of which is larger than a chunk should be."""

FAR = (1, 2, 3)
"""Hosts with replicas."""


class Wide(World):
    """The trainer's host and those with a relay and a replica each."""

    def __init__(self, path: Path, model: Path, found: list[NetworkHost], stack: ExitStack) -> None:
        super().__init__(path, model, found, stack)
        self._expected: dict[int, Any] = {}

    def relay(self, host: int) -> Any:
        address = self.hosts[host].address
        process = self.start(
            *(f"relay-{host}", host, "relay", "--manager", self.address, "--name", f"r{host}", "--memory", "128MiB"),
            *("--listen", f"{address}:0", "--insecure"),
        )
        eventually(f"relay {host} registers", 120.0, lambda: f"r{host}" in self.status()["relays"])
        return process

    def model(self, version: int) -> Any:
        folder = self.path / "expected"
        return make_tiny_qwen3(folder, version, vocabulary=PADDED_VOCABULARY, weights=False, **SHAPE)

    def train(self, version: int) -> int:
        """Bytes of the weights."""
        assert self.trainer.ask(train=[str(self.path / "train"), version], shape=SHAPE) is True
        return sum(tensor.numel() * tensor.element_size() for _, tensor in named_weights(self.model(version)))

    def generates(self, version: int, names: dict[str, int]) -> None:
        """Replicas, by name and host, generate what a model with this version's weights does."""
        model = self.model(version)
        prompt = decisive_prompts(model, 1, TOKENS)[0]
        expected = reference_tokens(model, prompt, TOKENS).tokens
        for name, host in names.items():
            assert self.tokens(name, host, prompt) == expected, name


@pytest.fixture
def world(tmp_path: Path) -> Iterator[Wide]:
    if shutil.which("tc") is None:
        pytest.skip("`tc` is not installed")
    model = tmp_path / "bare"
    make_tiny_qwen3(model, vocabulary=PADDED_VOCABULARY, weights=False, **SHAPE)
    with ExitStack() as stack:
        yield Wide(tmp_path, model, stack.enter_context(hosts(4)), stack)


def test_three_hosts_cost_the_trainers_interface_one_model(world: Wide) -> None:
    relays = {host: world.relay(host) for host in (0, *FAR)}
    names = {f"far{host}": host for host in FAR}
    for name, host in names.items():
        world.replica(name, host)
    for name in names:
        world.registers(name)
    for version in (1, 2):
        size = world.train(version)
        before = world.hosts[0].sent()
        report = world.trainer.ask(update={"version": version})
        sent = world.hosts[0].sent() - before
        assert report["outcomes"] == dict.fromkeys(names, "new_serving"), report
        assert sent < 1.1 * size, f"{sent / size:.3f} models, and {report['relays']}"
        for host in FAR:
            brought = report["relays"][f"relay r{host}"]["brought"]
            assert sum(brought.values()) == size
            assert brought.keys() == {"relay r0", *(f"relay r{each}" for each in FAR if each != host)}
        world.generates(version, names)
    _kill_in_the_middle(world, relays[1], names, report["relays"])


def test_whose_interface_is_slow_passes_nothing_on_in_a_later_plan(world: Wide) -> None:
    for host in (0, *FAR):
        world.relay(host)
    names = {f"far{host}": host for host in FAR}
    for name, host in names.items():
        world.replica(name, host)
    for name in names:
        world.registers(name)
    _limit(world.hosts[1], "32mbit")
    for version in (1, 2, 3):
        size = world.train(version)
        before = [host.sent() for host in world.hosts]
        report = world.trainer.ask(update={"version": version})
        sent = [host.sent() - first for host, first in zip(world.hosts, before, strict=True)]
        assert report["outcomes"] == dict.fromkeys(names, "new_serving"), report
        assert sent[0] < 1.1 * size, f"{sent[0] / size:.3f} models, and {report['relays']}"
        sources = [set(report["relays"][f"relay r{host}"]["brought"]) for host in FAR]
        slow = "relay r1" not in set().union(*sources)
        assert slow == (version == 3), report
        assert ("but passes nothing on: it sent" in report["prefetch"]) == slow, report["prefetch"]
        if slow:
            assert sent[1] < 0.1 * size
            assert "relay r0" not in sources[0], "it reads from those who pass on"
    world.generates(3, names)


def _limit(host: NetworkHost, rate: str) -> None:
    """What it sends goes no faster."""
    limit = ("rate", rate, "burst", "256kb", "latency", "400ms")
    ip("netns", "exec", host.namespace, "tc", "qdisc", "add", "dev", host.device, "root", "tbf", *limit)


def _kill_in_the_middle(world: Wide, relay: Any, names: dict[str, int], whole: dict[str, Any]) -> None:
    """What the relay passes on goes slowly, so that there is a middle. whole: who read what when nobody was killed."""
    lost = world.hosts[1]
    size = world.train(3)
    _limit(lost, "24mbit")
    found: list[Any] = []
    before = lost.sent()
    updating = threading.Thread(target=lambda: found.append(world.trainer.ask(update={"version": 3})), daemon=True)
    updating.start()
    eventually("it passes on", 60.0, lambda: lost.sent() - before > size / 32)
    os.kill(process_inside(relay.pid), signal.SIGKILL)
    assert not found
    updating.join(120)
    (report,) = found
    for name, host in names.items():
        if host != 1:
            assert report["outcomes"][name] == "new_serving", report
            brought = report["relays"][f"relay r{host}"]["brought"]
            assert sum(brought.values()) == size
            assert brought.get("relay r1", 0) < whole[f"relay r{host}"]["brought"]["relay r1"], "it was the middle"
    assert report["outcomes"]["far1"] in ("old_serving", "not_reached"), report
    world.generates(3, {"far2": 2, "far3": 3})
    world.generates(2, {"far1": 1})
