"""An engine of a version that no test has run is checked before its first update: by its agent, step by step.

The engine is the small one of these tests, whose weights are one number; real engines are checked in
tests/engines/test_engine_check.py.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest

from ckpt_engine.agent.engine import EngineFailedError
from ckpt_engine.core.check_verdict import ROUNDS, Score, failure
from ckpt_engine.v1 import manager_pb2
from tests.agent.plain_manager import PlainManager
from tests.agent.running_agent import Start, calls, install, prepare, ready, updated

UNTESTED = "Small 9.9 is not among the tested versions (1.x)"
LOADS = ["load 1 own", "load 2 ours", "load 2 own", "load 1 ours"]


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


async def _check_told(manager: PlainManager, words: str) -> None:
    beats = manager_pb2.ReplicaHeartbeat
    await manager.until(lambda: any(words in beat.engine_check for beat in manager.all(beats)))


async def test_an_untested_engine_is_checked_once_and_then_updated(manager: PlainManager, start: Start) -> None:
    agent = start("--untested", UNTESTED)
    await ready(manager)
    prepared = await prepare(manager, 1)
    assert not prepared.HasField("problem")
    asked = await calls(agent)
    assert [call for call in asked if call.startswith("load")] == LOADS
    assert asked.count("pause") == asked.count("resume") == len(LOADS)
    await _check_told(manager, f"{UNTESTED}; checked here in ")
    assert any(line.startswith(f"{UNTESTED}; checked here in ") for line in agent.lines)
    manager.send(install(manager, 1))
    outcome = await manager.next(manager_pb2.ReplicaOutcome)
    assert outcome.outcome == manager_pb2.OUTCOME_NEW_SERVING
    await prepare(manager, 2)
    assert [call for call in await calls(agent) if call.startswith("load")] == LOADS, "once for one start of the engine"


async def test_a_pass_is_kept_for_the_next_engine_of_its_kind(manager: PlainManager, start: Start) -> None:
    first = start("--untested", UNTESTED)
    await ready(manager)
    await prepare(manager, 1)
    await first.end()
    second = start("--untested", UNTESTED)
    await manager.until(lambda: manager.all(manager_pb2.ReplicaHeartbeat)[-1].engine_check == UNTESTED)
    prepared = await prepare(manager, 2)
    assert not prepared.HasField("problem")
    assert not [call for call in await calls(second) if call.startswith("load")]
    await _check_told(manager, "checked on this host before")


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        ("differs", "after ckpt-engine's install its log-probabilities differ by up to 0.1"),
        ("keeps", "after ckpt-engine's install its log-probabilities differ by up to 1"),
        ("refuses", "ckpt-engine's install did not load the check's weights: no such layer"),
    ],
)
async def test_an_engine_that_fails_its_check_is_refused_and_resumed(
    manager: PlainManager, start: Start, broken: str, words: str
) -> None:
    agent = start("--untested", UNTESTED, "--broken", broken)
    await ready(manager)
    prepared = await prepare(manager, 1)
    assert words in prepared.problem.message
    assert UNTESTED in prepared.problem.message
    asked = await calls(agent)
    assert asked.count("pause") == asked.count("resume"), "it is never left paused"
    await _check_told(manager, words)
    again = await prepare(manager, 2)
    assert words in again.problem.message, "a failure is not kept as a pass"


async def test_what_is_never_checked_says_so(manager: PlainManager, start: Start) -> None:
    agent = start("--untested", UNTESTED, check_engine="never")
    await ready(manager)
    prepared = await prepare(manager, 1)
    assert not prepared.HasField("problem")
    assert not [call for call in await calls(agent) if call.startswith("load")]
    await _check_told(manager, f"{UNTESTED}; not checked: --check-engine never")


@pytest.mark.parametrize(("asked", "loads"), [("auto", []), ("always", LOADS)])
async def test_a_tested_version_is_checked_only_if_asked_to(
    manager: PlainManager, start: Start, asked: Literal["auto", "always"], loads: list[str]
) -> None:
    agent = start(check_engine=asked)
    await ready(manager)
    await prepare(manager, 1)
    assert [call for call in await calls(agent) if call.startswith("load")] == loads


async def test_an_engine_that_serves_a_version_already_is_not_disturbed(manager: PlainManager, start: Start) -> None:
    agent = start("--untested", UNTESTED, check_engine="never")
    await ready(manager)
    await updated(manager, 1)
    machine = agent.agent._machine
    assert machine is not None
    machine.replica.check_engine = "auto"  # as an agent finds an engine that another one has brought up
    await prepare(manager, 2)
    assert not [call for call in await calls(agent) if call.startswith("load")]
    await _check_told(manager, "not checked: it serves a version already")


async def test_a_version_that_cannot_work_is_refused_before_it_is_launched(manager: PlainManager, start: Start) -> None:
    agent = start("--too-old")
    with pytest.raises(EngineFailedError, match="too old: it must be 1 or newer"):
        await agent.run
    assert not any("launched" in line for line in agent.lines)


def _scores() -> list[Score]:
    return [Score((-1.0 * each.seed,) * 3, (1, 2), (-1.0 * each.seed,) * 2) for each in ROUNDS]


def test_equal_scores_pass() -> None:
    assert failure(_scores()) == ""


@pytest.mark.parametrize("place", range(len(ROUNDS)))
def test_each_round_counts(place: int) -> None:
    """A score that differs in one place, in any round, fails."""
    scores = _scores()
    scores[place] = replace(scores[place], prompt=(*scores[place].prompt[:2], -9.0))
    assert "differ by up to" in failure(scores)
    scores = _scores()
    scores[place] = replace(scores[place], chosen=(scores[place].chosen[0], -9.0))
    assert "differ by up to" in failure(scores)


def test_what_cannot_tell_versions_apart_proves_nothing() -> None:
    same = Score((-1.0,), (1,), (-1.0,))
    assert "nothing is compared" in failure([same] * len(ROUNDS))
    none = Score((), (), ())
    assert "different numbers" in failure([none] * len(ROUNDS))
    scores = _scores()
    scores[1] = replace(scores[1], prompt=(float("nan"), -1.0, -1.0))
    assert "not numbers" in failure(scores)


def test_tokens_that_part_are_compared_up_to_there() -> None:
    """Two near values may be chosen differently by kernels that add in no fixed order; what follows says nothing."""
    scores = _scores()
    scores[3] = Score(scores[3].prompt, (7, 8), (scores[3].chosen[0] - 1e-4, -55.0))
    assert failure(scores) == ""
    scores[3] = Score(scores[3].prompt, (7, 8), (-2.0, -55.0))
    assert "differ by up to" in failure(scores)
