"""Real engines on other hosts than the trainer: weights reach them from relay to relay, over the network only. The same
with the reference engine: tests/end_to_end/test_several_hosts.py."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_engine.core.deadlines import ENVIRONMENT as DEADLINES
from ckpt_engine.host.relay_directory import DIRECTORY
from ckpt_engine.v1 import manager_pb2
from tests.cluster import Cluster, Replica
from tests.conformance.engines import ENGINES, Engine
from tests.conformance.server import check_serves
from tests.conformance.weights import Models
from tests.end_to_end.test_several_hosts import World
from tests.network.hosts import hosts
from tests.tiny_model import VOCABULARY, named_weights

pytestmark = [pytest.mark.engine, pytest.mark.slow]
pytestmark += [pytest.mark.timeout(900)]  # engines start slowly on a busy machine

ALONE = {"GLOO_SOCKET_IFNAME": "lo", "VLLM_HOST_IP": "127.0.0.1", "SGLANG_HOST_IP": "127.0.0.1"}
"""How an engine of one worker is told to talk to itself: the host's name leads to another network."""

LAST = 10
CONTROL = 1_000_000
"""Bytes that members may send for an update besides the weights."""


class Host(Cluster):
    """One host of a world, as far as an engine needs a cluster to start there."""

    def __init__(self, world: World, number: int) -> None:
        super().__init__(world.path, world.address)
        self._world, self._number = world, number
        self.before = world.inside[number]
        self.network = world.hosts[number]

    def status(self) -> manager_pb2.GetStatusResponse:
        """Asked by the trainer's process, which reaches the manager."""
        return manager_pb2.GetStatusResponse.FromString(bytes.fromhex(self._world.trainer.ask(members=True)))

    def replica(
        self,
        name: str,
        kind: str,
        model: Path,
        *arguments: str,
        options: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> Replica:
        told = {**ALONE, **(environment or {}), DIRECTORY: str(self._world.relays(self._number))}
        return super().replica(name, kind, model, *arguments, options=options, environment=told)


@contextmanager
def started(engine: Engine, host: Host, name: str, model: Path) -> Iterator[Replica]:
    """A server on that host; it has ended when the block has."""
    replica = engine.start(host, name, model, (), {})
    try:
        yield replica.registered(engine.start_seconds)
    finally:
        if replica.process.poll() is None:
            entered = replica.process.pid  # `nsenter`, which waits for the agent
            (agent,) = Path(f"/proc/{entered}/task/{entered}/children").read_text().split()
            os.kill(int(agent), signal.SIGTERM)
        replica.process.wait(120)


def read_from(replica: Replica) -> set[tuple[str, str]]:
    """The sources of what it serves, and over which transport."""
    status = replica.status
    assert status is not None
    return {(edge.source, edge.transport) for edge in status.last_outcome.edges}


@pytest.fixture(params=[pytest.param(each, id=each.kind) for each in ENGINES if each.kind != "reference"])
def engine(request: pytest.FixtureRequest) -> Engine:
    found: Engine = request.param
    if reason := found.why_not_here():
        pytest.skip(reason)
    return found


def test_an_engine_on_another_host_follows_ten_updates_and_one_comes_late_without_the_trainer(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DEADLINES, "lease=60")  # a crowded machine may silence an agent for longer than the usual one
    torch.set_num_threads(1)
    models = Models(tmp_path / "models")
    size = sum(tensor.nbytes for _, tensor in named_weights(models[1]))
    with ExitStack() as stack:
        world = World(tmp_path, models.bare, stack.enter_context(hosts(3)), stack)
        world.relay(0)
        world.relay(1)
        host = Host(world, 1)
        with started(engine, host, "far", models.bare) as far:
            before = world.hosts[0].sent()
            for version in range(1, LAST + 1):
                report = updated(world, tmp_path, version)
                assert report["relays"]["relay r0"]["brought"] == {"rank 0": size}
                assert report["relays"]["relay r1"]["brought"] == {"relay r0": size}
                far.serving(version)
                assert read_from(far) == {("relay r1", "relay_memory")}
                with host.network.on_network():
                    check_serves(engine, far, models, version, version)
            sent = world.hosts[0].sent() - before
            assert sent < LAST * (1.02 * size + CONTROL), "each byte once"
        world.trainer.ask(close=True)
        last = Host(world, 2)
        with started(engine, last, "late", models.bare) as late:
            world.relay(2)
            late.serving(LAST)
            assert read_from(late) == {("relay r2", "relay_memory")}
            with last.network.on_network():
                check_serves(engine, late, models, LAST, LAST)


def updated(world: World, path: Path, version: int) -> Any:
    """The trainer's report of weights that it spoils as soon as it may."""
    assert world.trainer.ask(train=[str(path / "train"), version], shape={"vocabulary": VOCABULARY}) is True
    until = "held" if version % 2 else "installed"
    report = world.trainer.ask(update={"version": version, "until": until, "prefetch": "always"})
    assert world.trainer.ask(spoil=True) is True
    assert "problem" not in report, report
    if until == "held":
        assert report["held"], report
    else:
        assert report["outcomes"] == {"far": "new_serving"}, report
    return report
