"""Manager, trainer, agent and reference engine, all real, while one of them after the other is killed.

One world for all tests here (starting an engine takes seconds); each leaves it serving the trainer's weights.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from ckpt_engine import Trainer
from ckpt_engine.agent.launcher import descendants
from ckpt_engine.channel import ManagerStub
from ckpt_engine.report import UpdateReport
from ckpt_engine.v1 import manager_pb2
from tests.ports import free_port
from tests.tiny_model import decisive_prompts, make_tiny_qwen3, named_weights, reference_tokens
from tests.waiting import alive, eventually

REPOSITORY = Path(__file__).parents[2]
SECONDS = 180.0
TOKENS = 16
NAME = "replica-1"


class Command:
    """`ckpt-engine ...` as a user starts it, with what it printed so far."""

    def __init__(self, runtime: Path, *arguments: str) -> None:
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "adapters")]),
            "XDG_RUNTIME_DIR": str(runtime),
            "OMP_NUM_THREADS": "1",
        }
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            [sys.executable, "-m", "ckpt_engine", *arguments],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)

    def said(self, text: str) -> bool:
        return any(text in line for line in self.lines)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def end(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(60)
        finally:
            self.kill()


class World:
    """A model, a manager that can go and come back, a trainer, an agent."""

    def __init__(self, folder: Path) -> None:
        (folder / "run").mkdir(mode=0o700)
        self.folder = folder
        self.model: Any = make_tiny_qwen3(folder / "model", weights=False)
        self.weights = dict(named_weights(self.model))
        self.manager_address = f"127.0.0.1:{free_port()}"
        self.engine_port = free_port()
        self.url = f"http://127.0.0.1:{self.engine_port}"
        self.version = 0
        self.manager: Command | None = None
        self.agent: Command | None = None
        self.trainer: Trainer | None = None

    def start_manager(self) -> None:
        ledger = self.folder / "ledger.sqlite3"
        where = ("--listen", self.manager_address, "--http", "", "--ledger", str(ledger))
        self.manager = Command(self.folder / "run", "manager", *where)

    def start_agent(self) -> Command:
        """The engine's own command stands behind --, and tells its kind."""
        where = ("--name", NAME, "--port", str(self.engine_port))
        engine = (sys.executable, "-m", "ckpt_engine_adapters.reference.server", "--model", str(self.folder / "model"))
        typed = ("--manager", self.manager_address, "agent", *where, "--", *engine, "--tensor-parallel", "1")
        self.agent = Command(self.folder / "run", *typed)
        return self.agent

    def start_trainer(self) -> None:
        self.trainer = Trainer(self.manager_address, lineage="run")
        self.trainer.publish(self.weights, snapshot=True)

    def train(self) -> None:
        """Other weights, that differ in every tensor."""
        donor = make_tiny_qwen3(self.folder / "donor", seed=self.version + 1, weights=False)
        for name, tensor in named_weights(donor):
            self.weights[name].copy_(tensor)

    def update(self) -> UpdateReport:
        assert self.trainer is not None
        report = self.trainer.update_weights(timeout=60)
        assert report.ok, str(report)
        self.version = report.message.identity.version
        return report

    def status(self) -> manager_pb2.ReplicaStatus | None:
        with grpc.insecure_channel(self.manager_address) as channel:
            stub = ManagerStub(channel)  # type: ignore[no-untyped-call]
            try:
                answer = stub.GetStatus(manager_pb2.GetStatusRequest(), timeout=60)
            except grpc.RpcError:
                return None
        return next((replica for replica in answer.replicas if replica.name == NAME), None)

    def registered(self) -> bool:
        status = self.status()
        return status is not None and status.connected and bool(status.workers)

    def serving(self) -> bool:
        status = self.status()
        return status is not None and status.serving and status.identity.version == self.version

    def generate(self, prompt: list[int]) -> httpx.Response | None:
        try:
            return httpx.post(f"{self.url}/generate", json={"input_ids": prompt, "max_tokens": TOKENS}, timeout=60)
        except httpx.HTTPError:
            return None

    def check_tokens(self) -> None:
        """The engine answers what transformers does with the trainer's weights, under their version."""
        prompt = decisive_prompts(self.model, 1, TOKENS)[0]
        answer = self.generate(prompt)
        assert answer is not None
        assert answer.status_code == 200, answer.text
        assert answer.json()["output_ids"] == reference_tokens(self.model, prompt, TOKENS).tokens
        assert answer.headers["x-ckpt-engine-admitted-version"] == str(self.version)

    def close(self) -> None:
        if self.trainer is not None:
            self.trainer.close()
        for command in (self.agent, self.manager):
            if command is not None:
                command.end()


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    world = World(tmp_path_factory.mktemp("e2e"))
    try:
        world.start_manager()
        world.start_agent()
        world.start_trainer()
        eventually("the agent registers", SECONDS, world.registered)
        world.update()
        eventually("the replica serves", SECONDS, world.serving)
        yield world
    finally:
        world.close()


def engine_of(agent: Command) -> int:
    """The first process of its engine."""
    line = [line for line in agent.lines if "engine launched: pid " in line][-1]
    return int(line.partition("engine launched: pid ")[2].partition(",")[0])


def test_an_update_reaches_the_engine(world: World) -> None:
    world.check_tokens()
    world.train()
    report = world.update()
    assert report.message.verified
    world.check_tokens()
    assert world.agent is not None
    epoch = report.message.fence.epoch
    assert world.agent.said(f"update of epoch {epoch}: new weights, serving (version {world.version})")


@pytest.mark.slow
@pytest.mark.hours
def test_a_killed_engine_comes_back_closed_and_is_caught_up(world: World) -> None:
    """The conformance suite kills the server of an engine that is idle and in each stage of an update, and
    `tests/reference` looks whether its workers go with it."""
    assert world.agent is not None
    engine = engine_of(world.agent)
    tree = [engine, *descendants(engine)]
    assert len(tree) > 1, "the engine has a worker"
    os.kill(engine, signal.SIGKILL)
    eventually("nothing of the old engine is left", SECONDS, lambda: not any(alive(pid) for pid in tree))

    codes = set()

    def serves_again() -> bool:
        answer = world.generate([1, 2, 3])
        if answer is not None:
            codes.add(answer.status_code)
            if answer.status_code == 200:
                assert answer.headers["x-ckpt-engine-admitted-version"] == str(world.version)
        return answer is not None and answer.status_code == 200

    eventually("the engine is restarted and caught up", SECONDS, serves_again)
    assert codes <= {503, 200}, "closed until it holds the weights or keeps requests for them, open afterwards"
    assert engine_of(world.agent) != engine
    world.check_tokens()
    eventually("the manager knows", SECONDS, world.serving)


def test_a_killed_manager_stops_nobody(world: World) -> None:
    assert world.manager is not None
    assert world.agent is not None
    world.manager.kill()
    eventually("the agent notices", SECONDS, lambda: world.agent and world.agent.said("no session with the manager"))
    world.check_tokens()
    assert world.agent.process.poll() is None
    world.start_manager()
    eventually("the agent registers again, serving what it held", SECONDS, world.serving)
    world.train()
    world.update()
    world.check_tokens()


def test_an_engine_dies_with_its_agent_and_a_new_agent_takes_its_place(world: World) -> None:
    assert world.agent is not None
    engine = engine_of(world.agent)
    tree = [engine, *descendants(engine)]
    world.agent.kill()
    eventually("the engine dies with its agent", SECONDS, lambda: not any(alive(pid) for pid in tree))
    agent = world.start_agent()
    eventually("the new agent's engine is caught up", SECONDS, world.serving)
    world.check_tokens()

    # Asked nicely, it takes its engine and its directory with it.
    tree = [engine_of(agent), *descendants(engine_of(agent))]
    agent.process.send_signal(signal.SIGTERM)
    assert agent.process.wait(60) == 0
    assert not any(alive(pid) for pid in tree)
    left = [path.name for path in (world.folder / "run" / "ckpt-engine").iterdir() if (path / "page").exists()]
    assert len(left) == 1, "only the killed agent could not remove its directory"
    eventually("the manager forgets it", SECONDS, lambda: world.status() is None)
