"""Rules of leading and following agents, taken out one by one, and what becomes of an engine on several nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from ckpt_engine.machines.events import TimerFired
from ckpt_engine.machines.nodes.far import FarWorkers
from ckpt_engine.machines.nodes.follower import LEASE, FollowerMachine
from ckpt_engine.machines.nodes.leader import LeaderMachine
from ckpt_engine.v1 import manager_pb2, worker_pb2
from tests.simulation.mistakes import Mistake, Patch, must_be_noticed, name_of
from tests.simulation.nodes import LeadingAgentShell, SpreadEngine
from tests.simulation.scenario import Slant
from tests.simulation.story import NEW, Story, outcomes

OFTEN = frozenset({"follower_restarts", "follower_stops", "follower_is_cut_off", "agent_restarts"})


def a_far_word_is_dirty_before_its_order_leaves(patch: Patch) -> None:
    """The leader learns that a far worker writes when its node tells of it."""
    patch.setattr(FarWorkers, "ordered", lambda self, rank, boot_id, epoch: True)


def words_from_before_an_order_count_no_more(patch: Patch) -> None:
    """What a node tells is believed, whenever it was read."""
    original = FarWorkers._take

    def take(self: FarWorkers, node: int, status: manager_pb2.WorkerStatus) -> None:
        for far in self._far.values():
            far.ordered = 0
        original(self, node, status)

    patch.setattr(FarWorkers, "_take", take)


def a_message_that_was_overtaken_is_dropped(patch: Patch) -> None:
    """What a node told earlier is taken when it comes late."""
    original = LeaderMachine._take_message

    def take_message(self: LeaderMachine, event: Any, now: float) -> None:
        node = self._nodes.get(event.message.node_rank)
        if node is not None:
            node.message.sequence = 0
        original(self, event, now)

    patch.setattr(LeaderMachine, "_take_message", take_message)


def an_engine_ends_without_one_of_its_nodes(patch: Patch) -> None:
    """Its gate closes, and it waits for what does not come back."""
    patch.setattr(LeaderMachine, "trouble", lambda self, now: "")


def who_is_not_heard_holds_nothing_and_ends_the_engine(patch: Patch) -> None:
    """The last that was heard of a node counts until it is heard again."""
    patch.setattr(LeaderMachine, "_is_heard", lambda self, node, now: True)


def an_agent_that_comes_later_has_no_part(patch: Patch) -> None:
    """It is told to run like the others."""
    original = LeaderMachine._command

    def command(self: LeaderMachine, node: Any) -> worker_pb2.NodeCommand:
        told = original(self, node)
        told.run = self._far is not None
        return told

    patch.setattr(LeaderMachine, "_command", command)


def a_follower_ends_its_part_without_its_leader(patch: Patch) -> None:
    """It waits until the leader is there again."""
    original = FollowerMachine.handle

    def handle(self: FollowerMachine, event: Any, now: float) -> Sequence[Any]:
        return [] if event == TimerFired(LEASE) else original(self, event, now)

    patch.setattr(FollowerMachine, "handle", handle)


def a_part_is_begun_once(patch: Patch) -> None:
    """One that has failed is started again by itself."""
    patch.setattr(FollowerMachine, "_is_part_due", lambda self: self._leads and self._command.run)


def a_part_is_of_one_generation(patch: Patch) -> None:
    """What runs goes on, whichever engine the leader wants."""
    patch.setattr(FollowerMachine, "_end_reason", lambda self: self._failed or self._stopped)


def a_part_begins_after_the_one_before_has_ended(patch: Patch) -> None:
    """The leader begins the next one whatever still runs, and the follower starts that beside it."""
    missing = LeaderMachine._missing

    def only_absent(self: LeaderMachine, now: float) -> str:
        found = missing(self, now)
        return found if "no agent of node" in found else ""

    patch.setattr(LeaderMachine, "_missing", only_absent)
    original = FollowerMachine._bring_about

    def bring_about(self: FollowerMachine) -> None:
        original(self)
        ours = self._command.session_id, self._command.generation
        none = type(self._part).NONE
        if self._part is not none and self._command.run and ours != self._ours:
            self._part = none
            original(self)

    patch.setattr(FollowerMachine, "_bring_about", bring_about)


RULES: list[Mistake] = [
    a_far_word_is_dirty_before_its_order_leaves,
    words_from_before_an_order_count_no_more,
    a_message_that_was_overtaken_is_dropped,
    an_engine_ends_without_one_of_its_nodes,
    who_is_not_heard_holds_nothing_and_ends_the_engine,
    an_agent_that_comes_later_has_no_part,
    a_follower_ends_its_part_without_its_leader,
    a_part_is_begun_once,
    a_part_is_of_one_generation,
    a_part_begins_after_the_one_before_has_ended,
]


@pytest.mark.parametrize("rule", RULES, ids=name_of)
def test_some_seed_notices_without(rule: Mistake, monkeypatch: pytest.MonkeyPatch) -> None:
    must_be_noticed(rule, monkeypatch, Slant(nodes=1.0, often=OFTEN))


# -------------------------------------------------------------------------------------------------------------- stories


@pytest.fixture
def spread() -> Story:
    """A good world whose replicas span nodes."""
    return Story(nodes=1.0)


def leading(story: Story) -> LeadingAgentShell:
    """A replica on several nodes, whose engine is ready."""
    story.join_replica(manager_pb2.MODE_STANDALONE)
    agent = list(story.agents.values())[-1]
    assert isinstance(agent, LeadingAgentShell)
    story.until(lambda: agent.engine is not None)
    return agent


def test_a_replica_on_several_nodes_is_updated_as_one(spread: Story) -> None:
    agent, group = leading(spread), spread.ranks()
    for _ in range(2):
        report = spread.trained(group)
        assert outcomes(report) == {agent.name: NEW}
        assert spread.held_by(agent) == report.identity
    assert isinstance(agent.engine, SpreadEngine)
    assert {agent.engine.node_of(worker) for worker in agent.engine.workers} == set(range(agent.site.nodes))


def test_a_replica_without_one_of_its_nodes_is_closed_with_a_reason_and_comes_back(spread: Story) -> None:
    agent, group = leading(spread), spread.ranks(kind="snapshot")
    assert spread.trained(group).ok
    before = agent.engine
    agent.site.restart_follower(1, 8.0)
    spread.until(lambda: agent.engine is None)
    assert agent.machine.closed_reason == "the agent of node 1 was not heard for 4 s"
    spread.until(lambda: all(follower.part is None for follower in agent.site.followers.values()))
    spread.until(lambda: agent.engine is not None and agent.engine.gate_open, 20.0)
    assert agent.engine is not before


def test_parts_end_without_their_leader_and_start_with_the_next_one(spread: Story) -> None:
    agent = leading(spread)
    spread.restart_agent(agent, 9.0)
    followers = agent.site.followers.values()
    spread.until(lambda: all(follower.part is None for follower in followers))
    spread.until(lambda: spread.agents[agent.name] is not agent)
    spread.until(lambda: spread.agents[agent.name].engine is not None, 20.0)
    assert all(follower.part is not None for follower in followers)


def test_a_link_that_is_cut_for_less_than_a_lease_costs_no_engine(spread: Story) -> None:
    agent, group = leading(spread), spread.ranks()
    assert spread.trained(group).ok
    before = agent.engine
    agent.site.cut_off(1, 2.0)
    spread.wait(3.0)
    assert spread.trained(group).ok
    assert agent.engine is before


def test_memory_is_discarded_only_once_far_workers_say_that_they_hold_nothing(spread: Story) -> None:
    """What the page says of them when the operation begins may be old: they are asked to look."""
    agent, group = leading(spread), spread.ranks()
    assert spread.trained(group).ok
    assert spread.cluster.manager is not None
    over = spread.cluster.manager.sleep_or_wake(False, [agent.name], level=2)
    spread.wait(4.0)
    assert isinstance(over.value, manager_pb2.SleepResponse)
    assert not over.value.results[0].HasField("problem")
