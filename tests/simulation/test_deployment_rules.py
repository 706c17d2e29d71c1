"""The rules of staged deployments, taken out one by one: some seed must notice each."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from ckpt_engine.machines.manager import deploy, staging
from ckpt_engine.machines.manager.claims import Claim
from ckpt_engine.machines.manager.deploy import Deployment, Facts, Judgement
from ckpt_engine.machines.manager.deployments import Deployments
from ckpt_engine.machines.manager.versions import EVERYBODY, Versions
from tests.simulation.mistakes import Mistake, Patch, must_be_noticed, name_of
from tests.simulation.scenario import Slant, run_seed

STAGED = Slant(
    relays=True,
    staged=0.7,
    often=frozenset({"somebody_decides"}),
    without=frozenset({"copy_is_put_back", "ledger_is_lost"}),
)
"""Ledgers stay what they are: what a replica installs while an old copy is put back, no hello teaches the manager."""

GENTLE = dict.fromkeys(("task", "slow", "loss", "engine_no", "engine_hang", "worker_early", "worker_late"), 0.0)
"""Faults that would undo most deployments."""


def often(*actions: str) -> Slant:
    """Stories in which these happen, and most deployments go on for more than a wave."""
    return replace(STAGED, worse=GENTLE, often=frozenset(actions))


def a_wave_is_a_commit_for_its_names(patch: Patch) -> None:
    """It is for everybody, so that newcomers get what is undecided."""
    original = Versions.select

    def select(self: Versions, commit: object, selection: object, is_last: bool) -> None:
        original(self, commit, {*selection, EVERYBODY}, is_last)  # type: ignore[arg-type, misc]

    patch.setattr(Versions, "select", select)


def rolling_leaves_the_rest_serving(patch: Patch) -> None:
    """It does not look at what does not serve already."""
    rule = replace(deploy.STRATEGIES["rolling"], next_wave=lambda row, fleet: deploy._waiting(row, fleet)[:2])
    patch.setattr(deploy, "STRATEGIES", {**deploy.STRATEGIES, "rolling": rule})


def a_wave_waits_for_the_one_before(patch: Patch) -> None:
    """It begins when the one before is committed."""
    patch.setattr(deploy, "judge_wave", lambda row, fleet, seconds: deploy.MET)


def a_canary_waits_for_a_person(patch: Patch) -> None:
    """The rest follows when the canaries serve."""

    def person(value: float, facts: Facts) -> Judgement:
        return deploy.MET

    patch.setattr(deploy, "CONDITIONS", {**deploy.CONDITIONS, "person": person})


def a_condition_of_time_takes_its_time(patch: Patch) -> None:
    """It is met at once."""
    patch.setattr(deploy, "CONDITIONS", {**deploy.CONDITIONS, "time": lambda value, facts: deploy.MET})


def all_or_none_is_for_all(patch: Patch) -> None:
    """A replica that cannot take part is left out."""
    rule = replace(deploy.STRATEGIES["all_or_none"], needs_all=False)
    patch.setattr(deploy, "STRATEGIES", {**deploy.STRATEGIES, "all_or_none": rule})


def none_is_paused_before_all_are_ready(patch: Patch) -> None:
    """Each is paused when it is ready itself."""
    patch.setattr(deploy, "not_ready", lambda fleet: [])


def one_that_fails_brings_the_others_back(patch: Patch) -> None:
    """A replica that fails is left behind."""
    original = deploy.judge_wave

    def judge_wave(row: Deployment, fleet: deploy.Fleet, seconds: float) -> Judgement:
        judged = original(row, fleet, seconds)
        return deploy.MET if judged.verdict is deploy.Verdict.BROKEN else judged

    patch.setattr(deploy, "judge_wave", judge_wave)


def paused_no_wave_begins(patch: Patch) -> None:
    """A person's pause is not looked at."""
    original = deploy.next_step
    patch.setattr(deploy, "next_step", lambda row, fleet, facts: original(replace(row, paused=False), fleet, facts))


def what_is_newer_waits_until_it_is_decided(patch: Patch) -> None:
    """It begins beside it."""
    patch.setattr(Deployments, "lets", lambda self, goal: True)


def another_manager_goes_on_with_it(patch: Patch) -> None:
    """It does not read the row."""
    patch.setattr(Deployments, "take_up", lambda self, rows, now: None)


def without_a_way_back_it_is_refused(patch: Patch) -> None:
    """It begins although nothing holds the base."""
    patch.setattr(staging, "_cannot_go_back", lambda state, base, replicas: [])


def base_and_target_stay_where_they_are_held(patch: Patch) -> None:
    """Relays are filled for other pools meanwhile."""

    def pin(self: Deployments, row: Deployment) -> None:
        self.state.claims.granted[row.number] = Claim()

    patch.setattr(Deployments, "_pin", pin)


def an_undone_number_stays_used(patch: Patch) -> None:
    """Its trainer may call for it again."""
    original = Versions.check_rises

    def check_rises(self: Versions, lineage: str, version: int) -> None:
        self.undone.clear()
        original(self, lineage, version)

    patch.setattr(Versions, "check_rises", check_rises)


@pytest.mark.parametrize(
    "mistake",
    [
        a_wave_is_a_commit_for_its_names,
        a_wave_waits_for_the_one_before,
        what_is_newer_waits_until_it_is_decided,
        without_a_way_back_it_is_refused,
    ],
    ids=name_of,
)
def test_the_simulation_notices_without(mistake: Mistake, monkeypatch: pytest.MonkeyPatch) -> None:
    must_be_noticed(mistake, monkeypatch, STAGED)


SLANTS = {
    none_is_paused_before_all_are_ready: replace(STAGED, worse=GENTLE),
    one_that_fails_brings_the_others_back: STAGED,
    paused_no_wave_begins: often("somebody_decides"),
    rolling_leaves_the_rest_serving: often("engine_dies"),
    a_canary_waits_for_a_person: often("replica_joins"),
    a_condition_of_time_takes_its_time: replace(often("replica_joins"), staged=1.0),
    all_or_none_is_for_all: often("somebody_holds"),
    another_manager_goes_on_with_it: replace(often("manager_restarts", "replica_joins"), staged=1.0),
    base_and_target_stay_where_they_are_held: replace(STAGED, pools=True),
    an_undone_number_stays_used: replace(STAGED, repeats=0.5),
}


@pytest.mark.parametrize("mistake", SLANTS, ids=name_of)
def test_the_simulation_notices_without_it_where_it_matters(mistake: Mistake, monkeypatch: pytest.MonkeyPatch) -> None:
    must_be_noticed(mistake, monkeypatch, SLANTS[mistake])


@pytest.mark.parametrize("seeds", [range(3), pytest.param(range(3, 40), marks=pytest.mark.slow)], ids=("few", "many"))
def test_deployments_keep_their_promises(seeds: range) -> None:
    """In stories in which most updates are deployed in waves; some must begin, and end in both ways."""
    begun, states = 0, Counter[int]()
    for seed in seeds:
        scenario = run_seed(seed, crashes=bool(seed % 2), slant=replace(STAGED, pools=seed % 4 == 3))
        begun += scenario.invariants.waves.begun
        states.update(scenario.invariants.waves.decided)
    assert begun >= len(seeds) / 4
    assert len(seeds) < 10 or {deploy.DEPLOYED, deploy.UNDONE} <= states.keys()
