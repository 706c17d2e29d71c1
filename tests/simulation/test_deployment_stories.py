"""Staged deployments as stories: which replicas serve what in each wave, what a person decides, and what a manager that
was killed goes on with."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ckpt_engine import options
from ckpt_engine.commands import choices
from ckpt_engine.machines.manager import deploy
from ckpt_engine.v1 import manager_pb2
from tests.simulation.engine import Engine
from tests.simulation.members import AgentShell
from tests.simulation.story import NEW, OLD, Problem, Story, outcomes, refused
from tests.simulation.training import Group
from tests.simulation.world import Signal

Action = manager_pb2.SteerDeploymentRequest
Row = manager_pb2.Deployment

TIME_AND_ERRORS = [
    manager_pb2.DeployCondition(name="time", value=12.0),
    manager_pb2.DeployCondition(name="errors", value=0.1),
]


@pytest.fixture
def story() -> Story:
    return Story()


def begun(story: Story, replicas: int = 4) -> Group:
    """Ranks with relays that hold the version which so many replicas serve."""
    for _ in range(replicas):
        story.replica()
    story.relay()
    group = story.ranks()
    assert story.update(group, prefetch=manager_pb2.PREFETCH_ALWAYS).ok
    return group


def serve(story: Story) -> list[int]:
    """The number that each replica holds, by name."""
    held = (None if agent.engine is None else story.held_by(agent) for _, agent in sorted(story.agents.items()))
    return [-1 if identity is None else identity.version for identity in held]


def that_serves(story: Story, number: int) -> AgentShell:
    """The first replica by name of which `serve` says so."""
    return story.agents[sorted(story.agents)[serve(story).index(number)]]


def hold_up(monkeypatch: pytest.MonkeyPatch, agent: AgentShell | None = None) -> Signal:
    """Until this is set no engine gets ready, or only that of `agent` does not."""
    go, original = Signal(), Engine._get_ready

    def get_ready(self: Engine, *order: Any) -> Any:
        if agent is None or self is agent.engine:
            yield go
        yield from original(self, *order)

    monkeypatch.setattr(Engine, "_get_ready", get_ready)
    return go


def test_rolling_brings_one_wave_after_the_other(story: Story) -> None:
    group = begun(story)
    group.train()
    result = story.call(group.trainers[0], strategy="rolling", wave_replicas=2, timeout_seconds=60.0)
    while not result:
        story.wait(0.01)
        assert serve(story).count(-1) <= 2, "more than a wave does not serve"
    report = result[0]
    assert report.ok, report
    assert report.deployment.state == Row.STATE_DEPLOYED
    assert [len(wave.replicas) for wave in report.deployment.waves] == [2, 2]
    assert serve(story) == [1, 1, 1, 1]
    late = story.replica()
    story.wait(5.0)
    assert story.held_by(late) == report.identity, "a newcomer gets what was decided"


def test_a_canary_waits_for_a_person(story: Story) -> None:
    group = begun(story)
    group.train()
    result = story.call(group.trainers[0], strategy="canary", timeout_seconds=60.0)
    story.wait(10.0)
    assert not result
    assert sorted(serve(story)) == [0, 0, 0, 1]
    late = story.replica()
    story.wait(10.0)
    held = story.held_by(late)
    assert held is not None
    assert held.version == 0, "a newcomer outside of the wave gets the base"
    (row,) = story.deployments
    assert row.state == Row.STATE_UNDECIDED
    assert "deploy approve" in row.waits_for
    assert story.deploy(Action.ACTION_APPROVE).approved == 1
    story.wait(10.0)
    assert result[0].ok
    assert set(outcomes(result[0]).values()) == {NEW}
    assert serve(story) == [1] * 5


def test_a_person_undoes_a_canary(story: Story) -> None:
    group = begun(story)
    group.train()
    result = story.call(group.trainers[0], strategy="canary", wave_replicas=2)
    story.wait(10.0)
    assert sorted(serve(story)) == [0, 0, 1, 1]
    story.deploy(Action.ACTION_UNDO, reason="it babbles")
    story.wait(10.0)
    assert serve(story) == [0] * 4
    report = result[0]
    assert not report.ok
    assert report.deployment.state == Row.STATE_UNDONE
    assert "it babbles" in report.deployment.reason
    assert set(outcomes(report).values()) == {OLD}
    refused(
        story.deploy(Action.ACTION_APPROVE, report.deployment.number), Problem.CODE_FAILED_PRECONDITION, "it babbles"
    )
    assert story.trained(group).identity.version == 2, "an undone number stays used"


@pytest.mark.parametrize("moment", [0.0, 0.2, 0.5, 1.0, 5.0])
def test_a_manager_that_is_killed_goes_on_with_its_wave(story: Story, moment: float) -> None:
    group = begun(story)
    group.train()
    story.call(group.trainers[0], strategy="canary", wave_replicas=2)
    story.until(lambda: story.deployments, 20.0)
    story.wait(moment)
    story.restart_manager()
    story.wait(10.0)
    assert sorted(serve(story)) == [0, 0, 1, 1]
    (row,) = story.deployments
    assert row.state == Row.STATE_UNDECIDED
    story.deploy(Action.ACTION_APPROVE)
    story.restart_manager()
    story.wait(10.0)
    assert serve(story) == [1] * 4
    assert [each.state for each in story.ledger.deployments.values()] == [Row.STATE_DEPLOYED]


def test_a_condition_of_time(story: Story) -> None:
    group = begun(story)
    group.train()
    conditions = [manager_pb2.DeployCondition(name="time", value=8.0)]
    result = story.call(group.trainers[0], strategy="canary", conditions=conditions, timeout_seconds=60.0)
    story.until(lambda: 1 in serve(story), 20.0)
    story.wait(6.0)
    assert sorted(serve(story)) == [0, 0, 0, 1]
    story.restart_manager()
    story.wait(4.0)
    assert sorted(serve(story)) == [0, 0, 0, 1], "the time begins again with another manager"
    story.wait(8.0)
    assert serve(story) == [1] * 4
    assert isinstance(result[0], Problem), "the call ended with its manager"


def test_an_evicted_canary_stays_out_of_it(story: Story) -> None:
    group = begun(story)
    group.train()
    story.call(group.trainers[0], strategy="canary", wave_replicas=2, until=manager_pb2.UNTIL_FIRST_WAVE)
    story.wait(10.0)
    (row,) = story.deployments
    dead, lost = row.waves[0].replicas[0], next(name for name in row.participants if name not in row.waves[0].replicas)
    for name in (dead, lost):
        story.agents[name].crash()
    story.wait(10.0)
    story.evict(dead)
    story.restart_manager()
    (row,) = story.deployments
    assert (dead in row.participants, len(row.participants), row.min_replicas) == (False, 3, 3)
    story.evict(lost)  # which this manager knows as a participant only
    refused(story.retry(lost), Problem.CODE_NOT_FOUND)
    story.restart_manager()
    (row,) = story.deployments
    assert (lost in row.participants, len(row.participants), row.min_replicas) == (False, 2, 2)
    story.deploy(Action.ACTION_APPROVE)
    story.wait(10.0)
    (row,) = story.ledger.deployments.values()
    assert row.state == Row.STATE_DEPLOYED


def test_an_undone_number_is_refused(story: Story) -> None:
    group = begun(story)
    group.train()
    first = story.call(group.trainers[0], strategy="canary", version=1)
    story.wait(10.0)
    story.restart_manager()
    assert isinstance(first[0], Problem), "the call ended with its manager"
    again = story.call(group.trainers[0], strategy="canary", version=1, timeout_seconds=60.0)
    story.wait(5.0)
    assert not again, "it waits for the end of the deployment of the same version"
    story.deploy(Action.ACTION_UNDO, reason="it babbles")
    story.wait(10.0)
    (report,) = again
    assert report.deployment.state == Row.STATE_UNDONE
    assert (report.ok, "it babbles" in report.deployment.reason) == (False, True)
    for _ in range(2):
        for wishes in ({"strategy": "canary"}, {}):
            result = story.update(group, version=1, **wishes)
            words = ("version 1 of lineage 'run' was undone", "it babbles", "next")
            refused(result, Problem.CODE_FAILED_PRECONDITION, *words)
        assert serve(story) == [0] * 4
        assert [each.state for each in story.ledger.deployments.values()] == [Row.STATE_UNDONE]
        story.restart_manager()
    approval = story.deploy(Action.ACTION_APPROVE, report.deployment.number)
    refused(approval, Problem.CODE_FAILED_PRECONDITION, "it babbles")
    assert story.trained(group).identity.version == 2


@pytest.mark.parametrize("failing", [0, 1])
def test_a_canary_of_which_too_many_requests_fail_is_undone(story: Story, failing: int) -> None:
    group = begun(story)
    group.train()
    for agent in story.agents.values():
        assert agent.engine is not None
        agent.engine.requests = agent.engine.failed_requests = 1000  # of the version before
    result = story.call(group.trainers[0], strategy="canary", conditions=TIME_AND_ERRORS, timeout_seconds=90.0)
    story.until(lambda: 1 in serve(story), 20.0)
    canary = that_serves(story, 1)
    story.wait(15.0)
    assert "20 requests to its replicas (0 of 0 requests failed)" in story.deployments[-1].waits_for
    for number in range(40):
        answers(canary, 1, failed=failing and number % 4 == 0)
        if number == 10:
            canary.break_streams()  # its next hello tells of no requests
        story.wait(0.5)
    report = result[0]
    if failing:
        assert report.deployment.state == Row.STATE_UNDONE
        assert "requests failed since the wave's end, more than 0.1 of them" in report.deployment.reason
        assert serve(story) == [0] * 4
        assert report.deployment.failed_requests > report.deployment.requests * 0.1 > 0
    else:
        assert report.deployment.state == Row.STATE_DEPLOYED
        assert report.deployment.requests >= 20
        assert report.deployment.failed_requests == 0


def errors_and_time(story: Story, strategy: str) -> tuple[list[Any], AgentShell]:
    """A deployment whose first wave may fail a tenth of its requests for 12 s: its result, and the wave's agent."""
    group = begun(story)
    group.train()
    result = story.call(group.trainers[0], strategy=strategy, conditions=TIME_AND_ERRORS, timeout_seconds=90.0)
    story.until(lambda: 1 in serve(story), 20.0)
    story.wait(3.0)
    return result, that_serves(story, 1)


def answers(agent: AgentShell, requests: int, failed: int = 0) -> None:
    """Its engine answers so many requests."""
    assert agent.engine is not None
    agent.engine.requests += requests
    agent.engine.failed_requests += failed


def test_while_it_waits_it_is_judged_as_often_as_its_conditions_want(story: Story) -> None:
    """Paused, or for replicas that do not serve: heartbeats tell of requests, and are no news."""
    errors_and_time(story, "rolling")
    row = deploy.Deployment.of(story.deployments[-1])
    closed = dict.fromkeys(row.participants, deploy.Observed(connected=True))
    facts = deploy.Facts(60.0, False, requests=100)
    for waits in (replace(row, paused=True), row):
        step = deploy.next_step(waits, closed, facts)
        assert isinstance(step, deploy.Judgement)
        assert (step.verdict, step.seconds) == (deploy.Verdict.OPEN, deploy.COUNTED_SECONDS)
        step = deploy.next_step(waits, closed, replace(facts, failed=50))
        assert isinstance(step, deploy.Decide)
        assert step.state == deploy.UNDONE


def test_requests_that_fail_later_than_they_are_looked_at_undo_nothing(
    story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    result, canary = errors_and_time(story, "canary")
    answers(canary, 100)
    go = hold_up(monkeypatch)
    story.until(lambda: len(story.deployments[-1].waves) == 2, 20.0)
    answers(canary, 100, failed=100)
    story.wait(5.0)
    go.set()
    story.wait(10.0)
    assert result[0].deployment.state == Row.STATE_DEPLOYED
    assert serve(story) == [1] * 4


def test_a_canary_waits_for_a_person_although_all_others_are_held(story: Story) -> None:
    group = begun(story)
    group.train()
    result = story.call(group.trainers[0], strategy="canary", timeout_seconds=60.0)
    story.wait(10.0)
    (row,) = story.deployments
    for name in set(row.participants) - set(row.waves[0].replicas):
        story.hold(name)
    story.wait(10.0)
    (row,) = story.deployments
    assert row.state == Row.STATE_UNDECIDED
    assert "deploy approve" in row.waits_for
    story.deploy(Action.ACTION_APPROVE)
    story.wait(10.0)
    assert result[0].deployment.state == Row.STATE_DEPLOYED
    assert sorted(serve(story)) == [0, 0, 0, 1]


def test_paused_it_begins_no_wave(story: Story) -> None:
    group = begun(story)
    group.train()
    result = story.call(group.trainers[0], strategy="rolling", timeout_seconds=60.0)
    story.until(lambda: story.deployments)
    assert story.deploy(Action.ACTION_PAUSE).paused
    story.wait(5.0)
    served = serve(story)
    assert 0 in served
    story.restart_manager()
    assert serve(story) == served, "also with another manager"
    assert "a person has paused it" in story.deployments[0].waits_for
    story.deploy(Action.ACTION_RESUME)
    story.wait(10.0)
    assert serve(story) == [1] * 4
    assert isinstance(result[0], Problem)


def test_the_next_version_supersedes_it(story: Story) -> None:
    group = begun(story)
    group.train()
    first = story.call(group.trainers[0], strategy="canary", until=manager_pb2.UNTIL_FIRST_WAVE, timeout_seconds=60.0)
    story.wait(10.0)
    assert first[0].deployment.state == Row.STATE_UNDECIDED
    assert sorted(serve(story)) == [0, 0, 0, 1]
    report = story.trained(group, seconds=10.0)
    assert report.ok
    assert report.identity.version == 2
    assert serve(story) == [2] * 4
    assert [each.state for each in story.ledger.deployments.values()] == [Row.STATE_UNDONE]


def test_the_next_version_waits_if_that_is_wanted(story: Story) -> None:
    group = begun(story)
    group.train()
    story.call(
        group.trainers[0],
        strategy="canary",
        until=manager_pb2.UNTIL_FIRST_WAVE,
        newer=manager_pb2.NEWER_WAIT,
        timeout_seconds=60.0,
    )
    story.wait(10.0)
    group.train()
    refused(
        story.update(group, seconds=8.0, timeout_seconds=6.0),
        Problem.CODE_DEADLINE_EXCEEDED,
        f"it waited for deployment {story.deployments[0].number} to be decided (`ckpt-engine deploy status`)",
    )
    result = story.call(group.trainers[0])
    story.wait(5.0)
    assert not result
    story.deploy(Action.ACTION_APPROVE)
    story.wait(10.0)
    assert result[0].ok
    assert serve(story) == [2] * 4
    assert [each.state for each in story.ledger.deployments.values()] == [Row.STATE_DEPLOYED]


def test_without_a_way_back_it_is_refused(story: Story) -> None:
    for _ in range(2):
        story.replica()
    group = story.ranks()
    assert story.update(group).ok
    refused(
        story.trained(group, strategy="rolling"),
        Problem.CODE_FAILED_PRECONDITION,
        "must be able to bring replicas back",
    )
    assert serve(story) == [0, 0]


def test_a_first_version_is_brought_to_all_at_once(story: Story) -> None:
    for _ in range(2):
        story.replica()
    story.relay()
    group = story.ranks()
    report = story.update(group, strategy="canary")
    assert report.ok
    assert not report.HasField("deployment")
    assert story.trained(group, strategy="rolling", timeout_seconds=60.0).ok, "relays hold what is gone back to"


@pytest.mark.parametrize("strategy", ["rolling", "canary", "all_or_none"])
def test_an_engine_that_fails_brings_the_others_back(story: Story, strategy: str) -> None:
    group = begun(story)
    group.train()
    result = story.call(group.trainers[0], strategy=strategy, wave_replicas=0, timeout_seconds=30.0)
    story.until(lambda: -1 in serve(story), 20.0)
    agent = that_serves(story, -1)
    assert agent.engine is not None
    agent.engine.kill()
    agent.engine_died()
    story.wait(45.0)
    assert not result[0].ok
    assert result[0].deployment.state == Row.STATE_UNDONE
    assert set(serve(story)) <= {0, -1}
    story.start_engine(agent)
    story.wait(20.0)
    assert serve(story) == [0] * 4, "a restart gets the base"


def test_all_or_none_pauses_no_engine_before_all_are_ready(story: Story, monkeypatch: pytest.MonkeyPatch) -> None:
    group = begun(story)
    group.train()
    hold_up(monkeypatch, story.agents["replica-2"])  # for ever
    story.call(group.trainers[0], strategy="all_or_none", timeout_seconds=20.0)
    paused, said = 0, set[str]()
    for _ in range(300):
        story.wait(0.1)
        paused += any(agent.engine is None or agent.engine.paused for agent in story.agents.values())
        said.update(each.waits_for for each in story.deployments)
    assert "replica-2 to be ready: no engine is paused before all are" in said
    assert not paused
    (row,) = story.ledger.deployments.values()
    assert row.state == Row.STATE_UNDONE
    assert "replica-2" in row.reason
    assert serve(story) == [0] * 4


def test_all_or_none_waits_for_one_that_was_ready_and_is_lost(story: Story, monkeypatch: pytest.MonkeyPatch) -> None:
    group = begun(story)
    group.train()
    lost, go = story.agents["replica-1"], hold_up(monkeypatch, story.agents["replica-2"])
    story.call(group.trainers[0], strategy="all_or_none", timeout_seconds=60.0)
    story.wait(3.0)
    assert "replica-2 to be ready" in story.deployments[-1].waits_for
    story.restart_agent(lost, 1.5)
    go.set()
    for _ in range(12):
        story.wait(0.1)
        assert not any(agent.engine is None or agent.engine.paused for agent in story.agents.values())
    assert "replica-1 to be ready: no engine is paused before all are" in story.deployments[-1].waits_for
    story.wait(15.0)
    assert serve(story) == [1] * 4, story.deployments[-1]


@pytest.mark.parametrize("first", [True, False])
def test_as_many_may_fail_as_min_replicas_leaves_but_not_a_whole_first_wave(story: Story, first: bool) -> None:
    group = begun(story)
    group.train()
    result = story.call(group.trainers[0], strategy="rolling", min_replicas=3, timeout_seconds=60.0)
    story.until(lambda: -1 in serve(story) and (first or 1 in serve(story)), 20.0)
    agent = that_serves(story, -1)
    assert agent.engine is not None
    agent.engine.kill()
    agent.engine_died()
    story.wait(45.0)
    (row,) = story.ledger.deployments.values()
    if first:
        assert row.state == Row.STATE_UNDONE
        return
    report = result[0]
    assert report.deployment.state == Row.STATE_DEPLOYED
    assert report.ok
    assert sorted(serve(story)) == [-1, 1, 1, 1]
    story.start_engine(agent)
    story.wait(20.0)
    assert serve(story) == [1] * 4


def test_every_strategy_has_its_name_wherever_it_is_given() -> None:
    assert {*options.STRATEGIES} == {*choices.Strategy} == {"all", *deploy.STRATEGIES}
    assert {*options.NEWER} == {*choices.Newer}


def test_options_that_contradict_each_other_are_refused(story: Story) -> None:
    group = begun(story, 1)
    time = [manager_pb2.DeployCondition(name="time", value=1.0)]
    errors = [manager_pb2.DeployCondition(name="errors", value=0.1)]
    weather = [manager_pb2.DeployCondition(name="weather")]
    for wishes, words in (
        ({"wave_replicas": 2}, "give a strategy too"),
        ({"strategy": "all_or_none", "conditions": time}, "has one wave, so it has no condition"),
        ({"strategy": "slowly"}, "none of all, rolling, canary, all_or_none"),
        ({"strategy": "rolling", "wave_share": 1.5}, "a share of them between 0 and 1"),
        ({"strategy": "canary", "conditions": errors}, "give that one too, as 'time=300' or 'person'"),
        ({"strategy": "canary", "conditions": weather}, "condition 'weather' is none of time, person, probe, errors"),
    ):
        refused(story.trained(group, **wishes), Problem.CODE_INVALID_ARGUMENT, words)
    refused(story.deploy(Action.ACTION_UNDO), Problem.CODE_NOT_FOUND, "undecided are: none")
