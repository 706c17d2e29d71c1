"""Probes as stories: figures are told with each outcome, and as a condition they bring a wave back, or let it go on."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from ckpt_engine.machines.manager import deploy
from ckpt_engine.v1 import manager_pb2
from tests.simulation.story import NEW, Problem, Story, outcomes, refused
from tests.simulation.test_deployment_stories import begun, serve
from tests.simulation.training import Group

Action = manager_pb2.SteerDeploymentRequest
Finding = manager_pb2.ProbeFinding
Row = manager_pb2.Deployment

SCORES = manager_pb2.ProbeScores(
    sequences=[manager_pb2.ProbeSequence(tokens=[1, 2, 3], log_probabilities=[0.0, 0.0])] * 2,
    bounds=manager_pb2.ProbeBounds(mean=0.1),
    clip=0.2,
    seconds=2.0,
)
CONDITION = [manager_pb2.DeployCondition(name="probe")]


@pytest.fixture
def story() -> Story:
    return Story()


def shift(story: Story, offset: float, names: Sequence[str] = ()) -> None:
    """These replicas, or all, compute with such an offset from now on."""
    for name, agent in story.agents.items():
        if name in names or not names:
            assert agent.engine is not None
            agent.engine.offset = offset


def canary(story: Story, group: Group, **wishes: object) -> list[object]:
    """A canary whose only condition is the probe."""
    group.train()
    wishes = {"strategy": "canary", "conditions": CONDITION, "timeout_seconds": 60.0, "probe": SCORES} | wishes
    return story.call(group.trainers[0], **wishes)


def report_of(story: Story, result: list[object]) -> manager_pb2.UpdateReport:
    """Of a call that ends in the next 20 seconds."""
    story.wait(20.0)
    (report,) = result
    assert isinstance(report, manager_pb2.UpdateReport)
    return report


def test_each_outcome_has_figures_and_the_report_the_cause(story: Story) -> None:
    group = begun(story, 3)
    report = story.trained(group, probe=SCORES)
    assert all(each.probe.engine.tokens == 4 for each in report.replicas)
    assert not report.probe
    shift(story, -0.5, ["replica-1"])
    (finding,) = story.trained(group, probe=SCORES).probe
    assert (finding.cause, list(finding.replicas)) == (Finding.CAUSE_REPLICA, ["replica-1"])
    shift(story, -0.5)
    (finding,) = story.trained(group, probe=SCORES).probe
    assert finding.cause == Finding.CAUSE_ALL
    report = story.trained(group)
    assert report.ok
    assert not any(each.HasField("probe") for each in report.replicas), "without a probe nothing is asked"


def test_a_bound_that_holds_lets_the_rest_follow(story: Story) -> None:
    group = begun(story)
    report = report_of(story, canary(story, group))
    assert report.ok
    assert set(outcomes(report).values()) == {NEW}
    assert all(each.HasField("probe") for each in report.replicas)
    assert serve(story) == [1] * 4


def test_a_bound_that_breaks_brings_the_wave_back(story: Story) -> None:
    group = begun(story)
    shift(story, -0.5)
    report = report_of(story, canary(story, group))
    assert serve(story) == [0] * 4
    assert report.deployment.state == Row.STATE_UNDONE
    assert "mean 0.5 above 0.1" in report.deployment.reason
    assert len(report.deployment.waves) == 1
    assert [each.cause for each in report.probe] == [Finding.CAUSE_UNKNOWN]


def test_a_bound_that_breaks_in_the_last_wave_brings_all_back(story: Story) -> None:
    group = begun(story)
    canary_name = sorted(story.agents)[0]
    shift(story, -0.5, [name for name in story.agents if name != canary_name])
    report = report_of(story, canary(story, group))
    assert serve(story) == [0] * 4
    assert report.deployment.state == Row.STATE_UNDONE
    assert [each.cause for each in report.probe] == [Finding.CAUSE_REPLICA]


def test_an_engine_that_does_not_answer_brings_the_wave_back_in_its_time(story: Story) -> None:
    group = begun(story)
    for agent in story.agents.values():
        assert agent.engine is not None
        agent.engine.mute = True
    report = report_of(story, canary(story, group))
    assert report.deployment.state == Row.STATE_UNDONE
    assert "did not answer the probe" in report.deployment.reason
    assert [each.cause for each in report.probe] == [Finding.CAUSE_SILENT]
    assert serve(story) == [0] * 4


@pytest.mark.parametrize("moment", [0.0, 0.05, 0.1, 0.3, 1.0, 5.0])
@pytest.mark.parametrize("offset", [0.0, -0.5])
def test_a_manager_that_is_killed_waits_for_a_person_or_has_the_answer(
    story: Story, moment: float, offset: float
) -> None:
    """The scores are lost with it. What was answered, agents tell again."""
    group = begun(story)
    shift(story, offset)
    canary(story, group, wave_replicas=1)
    story.until(lambda: 1 in serve(story) or story.deployments, 20.0)
    story.wait(moment)
    story.restart_manager()
    story.wait(20.0)
    rows = {each.state for each in story.ledger.deployments.values()}
    if rows == {Row.STATE_UNDECIDED}:
        (row,) = story.deployments
        for waves in range(len(row.waves), 3):  # the last wave has no answers either
            (row,) = story.deployments
            assert (row.state, len(row.waves)) == (Row.STATE_UNDECIDED, waves)
            assert "to the probe, or `ckpt-engine deploy approve`" in row.waits_for
            story.deploy(Action.ACTION_APPROVE)
            story.wait(10.0)
        (row,) = story.ledger.deployments.values()
        assert row.state == Row.STATE_DEPLOYED
        assert serve(story) == [1] * 4
    else:
        (row,) = story.ledger.deployments.values()
        assert row.state == (Row.STATE_UNDONE if offset else Row.STATE_DEPLOYED), row
        assert serve(story) == [0 if offset else 1] * 4


def test_a_call_that_joins_a_deployment_brings_its_scores_again(story: Story) -> None:
    group = begun(story)
    both = [*CONDITION, manager_pb2.DeployCondition(name="person")]
    wishes = {"strategy": "canary", "conditions": both, "version": 1, "timeout_seconds": 60.0}
    canary(story, group, **wishes)
    story.until(lambda: 1 in serve(story), 20.0)
    story.wait(5.0)
    story.restart_manager()
    (trainer,) = group.trainers
    result = story.call(trainer, probe=SCORES, sealed=trainer.machine._sealed_under, **wishes)
    story.wait(5.0)
    assert story.deploy(Action.ACTION_APPROVE).approved == 1
    story.wait(10.0)
    (report,) = result
    assert report.deployment.state == Row.STATE_DEPLOYED, "the last wave has answers, too"
    assert all(each.probe.engine.tokens for each in report.replicas)


def test_all_or_none_goes_back_if_one_breaks_a_bound(story: Story) -> None:
    group = begun(story)
    shift(story, -0.5, [sorted(story.agents)[2]])
    report = report_of(story, canary(story, group, strategy="all_or_none"))
    assert report.deployment.state == Row.STATE_UNDONE
    assert [each.cause for each in report.probe] == [Finding.CAUSE_REPLICA]
    assert serve(story) == [0] * 4


def test_the_condition_has_no_value(story: Story) -> None:
    group = begun(story, 2)
    for name, words in (("probe", "bounds are given to `Probe(...)`"), ("person", "has no value, and 0.3 was given")):
        result = canary(story, group, conditions=[manager_pb2.DeployCondition(name=name, value=0.3)])
        story.wait(5.0)
        refused(result[0], Problem.CODE_INVALID_ARGUMENT, words)


def test_the_condition_needs_a_probe(story: Story) -> None:
    group = begun(story, 2)
    result = canary(story, group, probe=None)
    story.wait(5.0)
    refused(result[0], Problem.CODE_INVALID_ARGUMENT, "needs a probe", "Trainer(probe=...)")
    assert serve(story) == [0, 0]


def test_a_replica_that_comes_late_is_probed_too(story: Story) -> None:
    group = begun(story, 2)
    assert story.trained(group, probe=SCORES, prefetch=manager_pb2.PREFETCH_ALWAYS).ok
    late = story.replica()
    story.wait(5.0)
    assert late.machine.replica.last_outcome is not None
    assert late.machine.replica.last_outcome.probe.engine.tokens == 4


def test_questions_that_were_cut_short_wait_for_a_person() -> None:
    """A sleep ended them, and not the engine."""
    cut = manager_pb2.ProbeAnswer(problem=Problem(code=Problem.CODE_ABORTED, message="a person wants it asleep"))
    late = manager_pb2.ProbeAnswer(problem=Problem(code=Problem.CODE_DEADLINE_EXCEEDED, message="too late"))
    judge = deploy.CONDITIONS["probe"]
    assert judge(0.0, deploy.Facts(1.0, False, {"a": cut})).verdict is deploy.Verdict.OPEN
    assert judge(0.0, deploy.Facts(1.0, True, {"a": cut})).verdict is deploy.Verdict.MET
    assert judge(0.0, deploy.Facts(1.0, True, {"a": cut, "b": late})).verdict is deploy.Verdict.BROKEN
