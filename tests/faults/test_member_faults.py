"""Engines, agents and trainers that come back otherwise than they went: real processes, an engine beside its agent."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from ckpt_engine.v1 import manager_pb2
from tests.faults.members import start_attached_agent
from tests.faults.prober import SEEDS, Expected
from tests.faults.world import World

pytestmark = pytest.mark.timeout(900)  # engines start slowly on a busy machine

SECONDS = 120.0


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory, models: tuple[Path, Path, Expected]) -> Iterator[World]:
    with World(tmp_path_factory.mktemp("members"), *models, {"one": 1}, attached=True) as world:
        yield world


@pytest.fixture
def world(running: World) -> Iterator[World]:
    """Everybody there and serving; nobody has seen what must not be."""
    assert not running.update_all()
    yield running
    assert running.take_violations() == []


def url(world: World) -> str:
    return f"http://127.0.0.1:{world.replicas['one'].port}"


def serves(world: World, version: int) -> bool:
    return world.replicas["one"].prober.answered(version, time.monotonic(), SECONDS)


def info(world: World) -> dict[str, object] | None:
    """What the engine says of itself; None while it does not answer."""
    try:
        answer: dict[str, object] = httpx.get(f"{url(world)}/info", timeout=60).json()
    except httpx.HTTPError:
        return None
    return answer


def why_closed(world: World) -> str:
    """What the gate says; empty if it is open."""
    answer = httpx.get(f"{url(world)}/ckpt_engine/ready", timeout=60)
    return "" if answer.status_code == 200 else str(answer.json()["detail"])


def test_an_engine_restarted_between_two_heartbeats_answers_nothing_until_it_is_updated(world: World) -> None:
    """Its agent stands still meanwhile, so nobody of ours has seen that it was away."""
    agent = world.replicas["one"].agent.pid
    os.kill(agent, signal.SIGSTOP)
    try:
        world.restart_engine("one")
        world.until("the new engine answers", SECONDS, lambda: info(world))
        refused = httpx.post(f"{url(world)}/generate", json={"input_ids": [1], "max_tokens": 1}, timeout=60)
        assert refused.status_code == 503
    finally:
        os.kill(agent, signal.SIGCONT)
    assert not world.update_all()


def test_a_second_agent_for_one_engine_is_turned_away(world: World, tmp_path: Path) -> None:
    rollout = world.replicas["one"]
    second = start_attached_agent(tmp_path, "second", rollout.proxy.address, rollout.port, {})
    try:
        assert second.process.wait(SECONDS) == 1, second.tail()
        assert "already has an agent" in second.tail()
    finally:
        second.end()
    assert serves(world, world.version)
    assert not world.update_all()


def test_an_agent_that_dies_while_its_engine_is_paused_is_followed_by_one_that_resumes_it(world: World) -> None:
    version, agent = world.version, world.replicas["one"].agent.pid
    with world.listener.holding("agent.does.InstallEngine.begin", lambda pid: pid == agent) as held:
        world.ask(20)
        assert held.wait(SECONDS)
        paused = info(world)
        assert paused is not None
        assert paused["paused"] is not None
        world.kill("agent", "one")
    answer = world.answer(20)
    assert answer is not None
    assert not answer.get("ok")
    world.restart_agent("one")
    assert serves(world, version), "nothing was touched, so the old version goes on"
    assert not world.update_all()


@pytest.mark.slow
def test_an_engine_beside_its_agent_closes_without_it_if_that_was_asked_for(world: World) -> None:
    """Killed, and stopped: after a lease nobody is let in; with an agent that was not asked to, all are again."""
    rollout = world.replicas["one"]
    assert why_closed(world) == ""
    world.kill("agent", "one")
    environment = {"CKPT_ENGINE_DEADLINES": "heartbeat=0.2 lease=1.5"}
    rollout.agent = start_attached_agent(
        world.path, "one", rollout.proxy.address, rollout.port, environment, "--close-when-alone"
    )
    world.until("the new agent is there", SECONDS, lambda: (now := world.replica("one")) and now.serving)
    assert serves(world, world.version)
    os.kill(rollout.agent.pid, signal.SIGSTOP)
    world.until("it closes", SECONDS, lambda: "--close-when-alone" in why_closed(world))
    os.kill(rollout.agent.pid, signal.SIGCONT)
    world.until("it opens", SECONDS, lambda: not why_closed(world))
    world.kill("agent", "one")
    world.until("it closes", SECONDS, lambda: "--close-when-alone" in why_closed(world))
    world.restart_agent("one")
    assert serves(world, world.version)
    assert not world.update_all()


@pytest.mark.slow
def test_an_agent_that_dies_while_its_engine_sleeps_is_followed_by_one_that_knows(world: World) -> None:
    slept = world.stub.Sleep(manager_pb2.SleepRequest(level=1, timeout_seconds=30), timeout=60)
    assert [result.HasField("problem") for result in slept.results] == [False], slept
    world.kill("agent", "one")
    world.restart_agent("one")
    world.until(
        "the new agent says that it sleeps",
        SECONDS,
        lambda: (now := world.replica("one")) and now.connected and now.asleep and not now.serving,
    )
    woken = world.stub.Wake(manager_pb2.WakeRequest(timeout_seconds=30), timeout=60)
    assert [result.HasField("problem") for result in woken.results] == [False], woken
    assert serves(world, world.version)
    assert not world.update_all()


@pytest.mark.slow
def test_a_trainer_that_goes_back_to_an_older_checkpoint_needs_a_new_lineage(world: World) -> None:
    version, lineage = world.version, world.trainer.lineage
    world.restart_trainer(lineage=lineage)
    world.trainer.ask(version - 1, (version - 1) % SEEDS, 30)
    answer = world.trainer.answer(SECONDS) or {}
    assert str(answer.get("error")).startswith("FAILED_PRECONDITION"), answer
    assert lineage in str(answer["error"])
    assert serves(world, version)
    assert not world.update_all(), "the same lineage goes on with higher versions"
    world.restart_trainer()
    assert not world.update_all(), "and a new lineage from anywhere"


@pytest.mark.slow
def test_a_run_that_comes_back_with_another_world_size(world: World) -> None:
    lineage = world.trainer.lineage
    world.trainer.end()
    ranks = [world.new_trainer(lineage, f"{rank}/2") for rank in range(2)]
    try:
        for rank in ranks:
            rank.ready()
        world.version += 1
        for rank in ranks:
            rank.ask(world.version, world.version % SEEDS, 60)
        answers = [rank.answer(SECONDS) or {} for rank in ranks]
        assert all(answer.get("ok") for answer in answers), answers
        assert serves(world, world.version)
    finally:
        for rank in ranks:
            rank.end()
    assert not world.update_all()
