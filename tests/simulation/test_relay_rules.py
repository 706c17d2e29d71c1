"""The rules of updates by way of relays, taken out one by one: some seed must notice each."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import pytest

from ckpt_engine.core.relay_routes import Route
from ckpt_engine.machines.manager import prefetch
from ckpt_engine.machines.manager.course import Course
from ckpt_engine.machines.manager.prefetch import UpdatePrefetch
from ckpt_engine.machines.manager.recipients import Problem, Recipients
from ckpt_engine.machines.manager.relay_facts import KnownNeeds
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
        never: str,
    ) -> None:
        original(self, identity, planned, why, "")

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


def a_relay_waits_until_its_upstream_holds_the_version(patch: Patch) -> None:
    """It is told at once, with whatever lies there."""
    original = UpdatePrefetch._table_of

    def table_of(self: UpdatePrefetch, name: str) -> manager_pb2.BlobRef | None:
        held = getattr(self._state.members.holders.get(name), "held", ())
        return original(self, name) or next((each.table for each in held), None)

    patch.setattr(UpdatePrefetch, "_table_of", table_of)


def a_relay_is_told_to_read_only_what_it_reaches(patch: Patch) -> None:
    """The tables of all sources go to every relay."""
    original = prefetch.fill_command

    def fill_command(
        course: Course, known: KnownNeeds, identity: weights_pb2.Identity, name: str, route: Route, upstream: Any
    ) -> manager_pb2.FillRelay:
        everybody = tuple(source.source for source in course.goal.published.sources if source.source != name)
        return original(course, known, identity, name, replace(route, sources=everybody), upstream)

    patch.setattr(prefetch, "fill_command", fill_command)


FAR: list[Mistake] = [
    a_relay_waits_until_its_upstream_holds_the_version,
    a_relay_is_told_to_read_only_what_it_reaches,
]


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
