"""What an engine is told to call its tokens by, and what is said when it does not take it."""

from __future__ import annotations

import pytest

from ckpt_engine.core.deadlines import ENVIRONMENT
from ckpt_engine.v1 import manager_pb2
from tests.agent.plain_manager import PlainManager
from tests.agent.running_agent import QUICK, SECONDS, Beside, Start, calls, ready, updated


async def test_a_stamp_that_fails_is_repeated_before_the_engine_resumes(manager: PlainManager, start: Start) -> None:
    agent = start("--refused-stamps", "2")
    await ready(manager)
    outcome = await updated(manager, 1)
    assert (outcome.outcome, outcome.label_problem) == (manager_pb2.OUTCOME_NEW_SERVING, "")
    assert (await calls(agent))[-4:] == [*["stamp 3:00010203:run"] * 3, "resume"]


async def test_a_label_that_an_engine_does_not_take_is_told_and_tried_again(
    manager: PlainManager, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENVIRONMENT, f"{QUICK} resume=6")
    agent = start("--refused-stamps", "4")
    await ready(manager)
    outcome = await updated(manager, 1)
    assert outcome.outcome == manager_pb2.OUTCOME_NEW_SERVING
    assert "do not trust the version that the engine itself names" in outcome.label_problem
    assert "version 3 of run" in outcome.label_problem
    assert "no label today" in outcome.label_problem
    assert any(line.startswith("update of epoch 1: ") and "do not trust" in line for line in agent.lines)
    beats = manager_pb2.ReplicaHeartbeat
    await manager.until(lambda: bool(manager.all(beats)[-1].label_problem))
    assert manager.all(beats)[-1].serving
    await manager.until(lambda: not manager.all(beats)[-1].label_problem)
    asked, stamp = await calls(agent), "stamp 3:00010203:run"
    assert asked.count(stamp) == 5, "four are refused"
    assert asked[-1] == stamp, "also after it was resumed"


async def test_an_agent_tells_an_engine_whose_agent_died_its_version_before_it_resumes_it(
    manager: PlainManager, start: Start, beside: Beside
) -> None:
    """What the first agent may have told it, or not, the second one does not know."""
    url, _ = await beside()
    first = start(url=url)
    await ready(manager)
    await updated(manager, 1)
    driver = first.agent.host.adapter
    assert driver is not None
    await driver.pause(manager_pb2.PAUSE_MODE_KEEP, SECONDS)
    await first.end()
    beats = len(manager.all(manager_pb2.ReplicaHeartbeat))
    second = start(url=url)
    await manager.until(lambda: any(beat.serving for beat in manager.all(manager_pb2.ReplicaHeartbeat)[beats:]))
    asked = await calls(second)
    assert asked[asked.index("resume") + 1 :] == ["pause", "pause", "install", "stamp 3:00010203:run", "resume"]
