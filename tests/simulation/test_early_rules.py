"""Rules of what is brought before a pause, taken out one by one: some seed must notice. A test's id is the rule."""

from __future__ import annotations

from typing import Any

import pytest

from ckpt_engine.machines.agent.ready import Readying
from ckpt_engine.v1 import worker_pb2
from tests.simulation import early
from tests.simulation.mistakes import Mistake, Patch, must_be_noticed, name_of
from tests.simulation.scenario import Slant


def an_engine_pauses_once_nothing_is_brought_any_more(patch: Patch) -> None:
    """It pauses as soon as its workers have their plans ready."""
    patch.setattr(Readying, "bringing", frozenset())


def a_worker_that_cannot_bring_leads_back(patch: Patch) -> None:
    """What it tells of a problem is taken for its end."""
    original = Readying.reply_to

    def reply_to(self: Readying, request: worker_pb2.WorkerRequest, *rest: Any) -> worker_pb2.AgentReply | None:
        if request.early.HasField("problem"):
            request.early.ClearField("problem")
            request.early.verified = True
        return original(self, request, *rest)

    patch.setattr(Readying, "reply_to", reply_to)


def a_worker_is_asked_for_each_install(patch: Patch) -> None:
    """One whose plan is ready is not asked to bring another version by it."""
    original = Readying.unready

    def unready(self: Readying) -> list[int]:
        self._respondents = {worker.rank for worker in self._install.workers}
        return original(self)

    patch.setattr(Readying, "unready", unready)


def what_lies_in_stage_memory_is_known_by_what_it_hashes_to(patch: Patch) -> None:
    """By its plan alone, which many versions share."""
    patch.setattr(early, "key_of", lambda plan, expected: (b"", b""))
    patch.setattr("tests.simulation.engine.key_of", lambda plan, expected: (b"", b""))


RULES: dict[Mistake, Slant | None] = {
    an_engine_pauses_once_nothing_is_brought_any_more: Slant(early=True),
    a_worker_that_cannot_bring_leads_back: Slant(early=True, worse={"worker_early": 0.3}),
    a_worker_is_asked_for_each_install: Slant(early=True),
    what_lies_in_stage_memory_is_known_by_what_it_hashes_to: Slant(early=True),
}


@pytest.mark.parametrize("rule", RULES, ids=name_of)
def test_some_seed_notices_without(rule: Mistake, monkeypatch: pytest.MonkeyPatch) -> None:
    must_be_noticed(rule, monkeypatch, RULES[rule])
