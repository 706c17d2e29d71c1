"""The rules of updates by way of relays, taken out one by one: some seed must notice each."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

import pytest

from ckpt_engine.machines.manager.placing import PlacedFilling, RelayPlacing
from ckpt_engine.machines.manager.recipients import Problem, Recipients
from ckpt_engine.machines.manager.update import CandidateJob, CommitJob, InstallJob, Job
from ckpt_engine.v1 import manager_pb2, weights_pb2
from tests.simulation.mistakes import Mistake, Patch, must_be_noticed, name_of
from tests.simulation.scenario import Slant


def the_next_intent_waits_for_every_outcome(patch: Patch) -> None:
    """It is recorded as soon as the next version is sealed."""
    original = CandidateJob.advance

    def advance(self: CandidateJob, now: float) -> Job | None:
        self.parts.before = None
        return original(self, now)

    patch.setattr(CandidateJob, "advance", advance)


def what_is_held_is_installed_from_relays_only(patch: Patch) -> None:
    """Replicas without a relay read the trainer all the same."""
    original = Recipients.take_ways

    def take_ways(
        self: Recipients,
        identity: weights_pb2.Identity,
        planned: Collection[str],
        why: Mapping[str, Problem],
        otherwise: str,
        never: str,
    ) -> None:
        original(self, identity, planned, why, otherwise, "")

    patch.setattr(Recipients, "take_ways", take_ways)


def callers_return_when_the_intent_is_durable(patch: Patch) -> None:
    """They return when it begins to be written."""
    original = CandidateJob.advance

    def advance(self: CandidateJob, now: float) -> Job | None:
        commit = original(self, now)
        if isinstance(commit, CommitJob) and self.parts.goal.until == manager_pb2.UNTIL_HELD:
            install = InstallJob(self.parts, self.version, commit.fence, now)
            self.parts.course.answer(install._report(now, held=True))
        return commit

    patch.setattr(CandidateJob, "advance", advance)


def a_relay_is_told_to_read_only_what_it_reaches(patch: Patch) -> None:
    """The tables of all sources go to every relay."""
    original = RelayPlacing._command

    def command(self: RelayPlacing, filling: PlacedFilling) -> manager_pb2.FillRelay:
        everybody = tuple(each.source for each in self._goal.published.sources if each.source != filling.relay)
        placement, filling.placement = filling.placement, replace(filling.placement, sources=everybody)
        try:
            return original(self, filling)
        finally:
            filling.placement = placement

    patch.setattr(RelayPlacing, "_command", command)


FAR: list[Mistake] = [a_relay_is_told_to_read_only_what_it_reaches]


RULES: list[Mistake] = [
    the_next_intent_waits_for_every_outcome,
    what_is_held_is_installed_from_relays_only,
    callers_return_when_the_intent_is_durable,
]


@pytest.mark.parametrize("rule", RULES, ids=name_of)
def test_some_seed_notices_without(rule: Mistake, monkeypatch: pytest.MonkeyPatch) -> None:
    must_be_noticed(rule, monkeypatch, Slant(relays=True, held=0.7))


@pytest.mark.parametrize("rule", FAR, ids=name_of)
def test_some_seed_of_several_hosts_notices_without(rule: Mistake, monkeypatch: pytest.MonkeyPatch) -> None:
    must_be_noticed(rule, monkeypatch, Slant(relays=True, far=True, held=0.5))
