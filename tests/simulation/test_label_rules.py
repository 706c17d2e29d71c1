"""The rules of machines/agent/label.py, taken out one by one: some seed must notice.

A test's id is the rule.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ckpt_engine.core.sleeping import KV_CACHE
from ckpt_engine.machines.agent import install as agent_install
from ckpt_engine.machines.agent import label as agent_label
from ckpt_engine.machines.agent.machine import AgentMachine
from ckpt_engine.machines.agent.state import AgentReplica as AgentReplica
from ckpt_engine.machines.events import WakeEngine
from tests.simulation.mistakes import Mistake, Patch, must_be_noticed, name_of
from tests.simulation.scenario import Slant


def an_engine_is_told_its_version_before_it_resumes(patch: Patch) -> None:
    """It is told a moment later: the tokens until then are called by the version before."""
    label, conclude = agent_label.LabellingOperation.label, agent_install.Installing._conclude_serving

    def late(self: agent_install.Installing, now: float) -> None:
        if not label(self, self._reserve, max(0.1, self._end - now)):
            conclude(self, now)

    patch.setattr(agent_install.Installing, "label", lambda self, reserve, left: False)
    patch.setattr(agent_install.Installing, "_conclude_serving", late)


def an_engine_is_told_its_version_before_its_caches_wake(patch: Patch) -> None:
    """Caches are woken first, and some engines compute as soon as they are awake."""
    resume = agent_install.Installing._resume

    def caches_first(self: agent_install.Installing, now: float) -> None:
        if self.replica.sleeping and self._end > now:
            self.replica.paused = None
            self.run("rouse", WakeEngine((KV_CACHE,), self._end - now))
        else:
            resume(self, now)

    patch.setattr(agent_install.Installing, "_resume", caches_first)


def a_stamp_that_failed_is_no_stamp(patch: Patch) -> None:
    """Whatever became of it, the label is trusted."""
    original = agent_label.LabellingOperation.labelled

    def labelled(self: agent_label.LabellingOperation, done: Any, now: float) -> bool:
        return original(self, replace(done, problem=None), now)

    patch.setattr(agent_label.LabellingOperation, "labelled", labelled)


def a_label_is_tried_again(patch: Patch) -> None:
    """What an engine once refused it is not told again before its next install."""
    patch.setattr(
        AgentReplica, "label_again", property(lambda self: float("inf"), lambda self, value: None), raising=False
    )


def a_new_engine_has_been_told_nothing(patch: Patch) -> None:
    """What the engine before it agreed to counts for the next one."""
    original = AgentMachine._engine_ready

    def ready(self: AgentMachine, event: Any, now: float) -> None:
        labelled = self.replica.labelled
        original(self, event, now)
        self.replica.labelled = labelled

    patch.setattr(AgentMachine, "_engine_ready", ready)


RULES: dict[Mistake, Slant | None] = {
    an_engine_is_told_its_version_before_it_resumes: None,
    an_engine_is_told_its_version_before_its_caches_wake: Slant(
        often=frozenset({"sleep_or_wake"}), worse={"stamp_no": 0.3}
    ),
    a_stamp_that_failed_is_no_stamp: None,
    a_label_is_tried_again: None,
    a_new_engine_has_been_told_nothing: None,
}


@pytest.mark.parametrize("rule", RULES, ids=name_of)
def test_some_seed_notices_without(rule: Mistake, monkeypatch: pytest.MonkeyPatch) -> None:
    must_be_noticed(rule, monkeypatch, RULES[rule])
