"""When a run is forgotten that does not end by itself, each rule in a small story."""

from __future__ import annotations

import pytest

from ckpt_engine.core.version import Version
from ckpt_engine.v1 import manager_pb2
from tests.simulation.manager import ManagerShell
from tests.simulation.members import AgentShell
from tests.simulation.story import NEW, Problem, Story, outcomes, refused


@pytest.fixture
def story() -> Story:
    return Story()


def manager_of(story: Story) -> ManagerShell:
    assert story.cluster.manager is not None
    return story.cluster.manager


def known(story: Story) -> set[str]:
    """Lineages of which the manager knows a rank."""
    return {trainer.lineage for trainer in manager_of(story).machine.status().trainers}


def kept(story: Story) -> set[str]:
    """Lineages for which something stays in the manager's store."""
    holdings = manager_of(story).machine.status().holdings
    return {each.owner.split("'")[1] for each in holdings if each.owner.startswith("lineage ")}


def lineage_of(agent: AgentShell) -> str:
    assert agent.engine is not None
    identity = agent.engine.words().identity
    return "nothing" if identity is None else identity.lineage


def test_a_run_that_was_killed_is_forgotten_after_a_while(story: Story) -> None:
    story.replica()
    group = story.ranks("killed", world_size=2, kind="snapshot")
    assert story.update(group).ok
    story.end_group(group, in_good_order=False)
    story.wait(story.deadlines.forget - 2.0)
    assert known(story) == kept(story) == {"killed"}
    story.wait(4.0)
    assert known(story) == kept(story) == set()
    again = story.ranks("killed", world_size=3)
    again.train()
    assert story.update(again).ok


def test_a_rank_that_comes_back_is_not_forgotten(story: Story) -> None:
    story.replica()
    group = story.ranks("run")
    for _ in range(3):
        group.trainers[0].break_streams()
        story.wait(story.deadlines.forget / 2)
    assert known(story) == {"run"}
    assert story.update(group).ok


def test_files_of_a_killed_run_stay_for_late_replicas_until_others_have_taken_over(story: Story) -> None:
    story.replica()
    files, other = story.ranks("files", kind="directory"), story.ranks("other")
    assert story.update(files).ok
    story.end_group(files, in_good_order=False)
    story.wait(story.deadlines.forget + 2.0)
    assert known(story) == {"other"}
    assert kept(story) == {"files", "other"}
    late = story.replica()
    story.wait(3.0)
    assert lineage_of(late) == "files"
    assert story.update(other, replicas=[late.name]).ok
    assert kept(story) == {"files", "other"}
    other.train()
    assert story.update(other).ok
    assert kept(story) == {"other"}


def test_a_killed_run_is_forgotten_when_others_have_taken_its_replicas_over(story: Story) -> None:
    first, second = story.replica(), story.replica()
    killed, other = story.ranks("killed", kind="snapshot"), story.ranks("other")
    for agent in (first, second):
        assert story.update(killed, replicas=[agent.name]).ok
        killed.train()
    story.end_group(killed, in_good_order=False)
    story.wait(1.0)
    assert story.update(other, 1.5, replicas=[first.name]).ok
    assert known(story) == {"killed", "other"}
    assert story.update(other, 1.5, version=1, replicas=[second.name]).ok
    assert known(story) == kept(story) == {"other"}


def test_a_version_that_only_a_replica_was_to_serve_goes_with_it(story: Story) -> None:
    """Else each name that an update has named would keep a record, for ever."""
    one, other = story.replica(), story.replica()
    group = story.ranks(kind="snapshot")
    first = story.update(group, replicas=[one.name]).identity
    group.train()
    assert story.update(group, replicas=[other.name]).ok
    assert story.cluster.manager is not None
    contents = story.cluster.manager.machine._state.versions.contents
    assert contents[Version.of(first)].record is not None
    story.evict(one.name)
    story.wait(1.0)
    contents = story.cluster.manager.machine._state.versions.contents
    assert [content.record is None for content in contents.values()] == [True, False]


def listed(story: Story) -> dict[str, manager_pb2.LineageStatus]:
    """All lineages that there are, by name."""
    return {each.lineage: each for each in manager_of(story).machine.status().lineages}


def take_out(story: Story, agent: AgentShell) -> None:
    """The agent ends for good, and its replica is no member any more."""
    agent.crash()
    story.wait(1.0)
    story.evict(agent.name)


def forget(story: Story, lineage: str, dry_run: bool = False) -> manager_pb2.ForgetLineageResponse | Problem:
    answer: manager_pb2.ForgetLineageResponse | Problem = story.forget(lineage, dry_run)
    return answer


def test_a_lineage_that_nothing_uses_is_forgotten_after_a_while_and_its_numbers_are_not(story: Story) -> None:
    agent, group = story.replica(), story.ranks("gone", kind="snapshot")
    assert story.update(group).ok
    story.end_group(group, in_good_order=True)
    story.wait(2 * story.deadlines.forget + 2.0)
    assert listed(story)["gone"].replicas == 1, "a replica serves it"
    take_out(story, agent)
    story.wait(1.0)
    assert listed(story)["gone"].latest.version == 0
    story.wait(2 * story.deadlines.forget + 2.0)
    assert listed(story) == {}
    story.restart_manager()
    story.wait(1.0)
    assert listed(story) == {}, "it is durable"
    newcomer = story.replica()
    story.wait(2.0)
    assert lineage_of(newcomer) == "nothing"
    again = story.ranks("gone")
    again.train()
    assert story.update(again).identity.version == 1, "the number 0 has another root"


def test_what_others_have_superseded_everywhere_is_listed_no_more_once_it_has_no_rank(story: Story) -> None:
    story.replica()
    for name in ("one", "two"):
        group = story.ranks(name, kind="snapshot")
        assert story.update(group).ok
        story.end_group(group, in_good_order=True)
    story.wait(2 * story.deadlines.forget + 2.0)
    assert set(listed(story)) == {"two"}


def test_files_are_there_to_read_for_replicas_that_come_once_all_have_gone(story: Story) -> None:
    agent, group = story.replica(), story.ranks("files", kind="directory")
    assert story.update(group).ok
    story.end_group(group, in_good_order=True)
    take_out(story, agent)
    story.wait(3 * story.deadlines.forget)
    assert listed(story)["files"].sources == 1
    newcomer = story.replica()
    story.wait(3.0)
    assert lineage_of(newcomer) == "files"


def test_what_a_relay_holds_is_a_lineage_that_is_not_forgotten(story: Story) -> None:
    agent, group = story.replica(), story.ranks("held")
    relay = story.relay()
    assert story.update(group, until=manager_pb2.UNTIL_HELD).held
    story.wait(5.0)
    story.end_group(group, in_good_order=True)
    take_out(story, agent)
    story.wait(3 * story.deadlines.forget)
    assert (listed(story)["held"].sources, listed(story)["held"].replicas) == (1, 0)
    answer = forget(story, "held")
    assert isinstance(answer, manager_pb2.ForgetLineageResponse)
    assert "relay" in answer.effects[-1]
    assert "is listed until then" in answer.effects[-1]
    assert not listed(story)["held"].HasField("latest"), "what is held is there still"
    assert relay is not None


def test_an_operator_forgets_a_lineage_that_nothing_uses(story: Story) -> None:
    agent, group = story.replica(), story.ranks("run", kind="snapshot")
    assert story.update(group).ok
    refused(forget(story, "run"), Problem.CODE_FAILED_PRECONDITION, "1 rank, 1 of them connected", "lineage evict run")
    story.end_group(group, in_good_order=True)
    story.wait(1.0)
    refused(forget(story, "run"), Problem.CODE_FAILED_PRECONDITION, agent.name, "replica evict")
    refused(forget(story, "rum"), Problem.CODE_NOT_FOUND, "'rum'", "run")
    take_out(story, agent)
    story.wait(1.0)
    foretold = forget(story, "run", dry_run=True)
    assert isinstance(foretold, manager_pb2.ForgetLineageResponse)
    assert "a replica that comes to the pool without a name is not brought to version 0 any more" in foretold.effects[0]
    assert set(listed(story)) == {"run"}
    assert forget(story, "run") == foretold
    assert listed(story) == {}
    refused(forget(story, "run"), Problem.CODE_NOT_FOUND, "none is known")


def test_an_evicted_run_ends_and_its_replicas_go_on(story: Story) -> None:
    agent, group = story.replica(), story.ranks("run", kind="snapshot")
    other = story.ranks("other")
    assert story.update(group).ok
    story.faults.delay = 0.001  # no message takes longer than the end of its stream: the rank hears why it is sent away
    answer = manager_of(story).operate(manager_pb2.EvictLineageRequest(lineage="run", reason="it is in the way")).value
    assert answer == manager_pb2.EvictLineageResponse(ranks=1, connected=1)
    story.wait(2.0)
    assert known(story) == kept(story) == {"other"}
    ended = group.trainers[0].ended
    assert ended is not None
    refused(ended, Problem.CODE_ABORTED, "was evicted by an operator: it is in the way")
    assert lineage_of(agent) == "run"
    assert agent.machine.replica.serving()
    assert outcomes(story.update(other)) == {agent.name: NEW}
    again = manager_of(story).operate(manager_pb2.EvictLineageRequest(lineage="run")).value
    refused(again, Problem.CODE_FAILED_PRECONDITION, "no rank of lineage 'run'", "lineage forget run")
