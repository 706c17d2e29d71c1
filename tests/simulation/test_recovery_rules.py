"""Single rules of recovery, each in a small story: ledgers, older checkpoints, and who may come back as whom."""

from __future__ import annotations

import pytest

from ckpt_engine.core.problems import not_found
from ckpt_engine.machines import events
from ckpt_engine.machines.manager.ledger_recovery import MOST_SKIPPED, LedgerRecovery
from tests.simulation.manager import Ledger, ManagerShell
from tests.simulation.story import NEW, Problem, Story, outcomes, refused


def manager_of(story: Story) -> ManagerShell:
    assert story.cluster.manager is not None
    return story.cluster.manager


def warnings(story: Story) -> str:
    return "\n".join(manager_of(story).machine.status().warnings)


def replace_ledger(story: Story, ledger: Ledger) -> None:
    manager_of(story).crash()
    ledger.generation = story.ledger.generation
    story.ledger = ledger
    story.ledgers_replaced += 1
    story.start_manager()
    story.wait(6.0)


def test_a_ledger_that_was_rolled_back_goes_on_above_its_members(story: Story) -> None:
    agent, group = story.replica(), story.ranks()
    copy = story.ledger.copied()
    for _ in range(4):
        before = story.update(group)
        assert before.ok
        group.train()
    replace_ledger(story, copy)
    assert "rolled back" in warnings(story)
    report = story.update(group)
    assert outcomes(report) == {agent.name: NEW}
    assert report.fence.epoch > before.fence.epoch
    assert report.identity.version == before.identity.version + 1


def test_what_members_hold_is_not_given_out_again(story: Story) -> None:
    story.replica()
    group, copy = story.ranks(), story.ledger.copied()
    assert story.update(group, version=5).ok
    replace_ledger(story, copy)
    group.train()
    refused(story.update(group, version=4), Problem.CODE_FAILED_PRECONDITION, "backwards")
    refused(story.update(group, version=5), Problem.CODE_FAILED_PRECONDITION, "root")
    assert story.update(group, version=6).ok


def test_a_lost_ledger_is_reported_and_its_members_wait(story: Story) -> None:
    agent, group = story.replica(), story.ranks()
    before = story.update(group).identity
    group.train()
    replace_ledger(story, Ledger("cluster-2"))
    assert agent.ended is None
    assert agent.machine.replica.serving()
    assert agent.refusal is not None
    assert "manager --cluster cluster-1" in agent.refusal.message
    for word in (agent.name, "rank 0", "manager --cluster cluster-1"):
        assert word in warnings(story)
    replace_ledger(story, Ledger("cluster-1"))
    assert not any("cluster-2" in line for line in manager_of(story).machine.status().warnings)
    report = story.update(group)
    assert outcomes(report) == {agent.name: NEW}
    assert report.identity.version == before.version + 1


def test_an_engine_moves_to_another_cluster_with_its_agent_alone(story: Story) -> None:
    agent, group = story.replica(), story.ranks()
    for _ in range(3):
        assert story.update(group).ok
        group.train()
    engine = agent.engine
    replace_ledger(story, Ledger("cluster-2"))
    story.end_group(group, in_good_order=True)
    story.restart_agent(agent, 0.1)
    story.wait(6.0)
    assert outcomes(story.update(story.ranks("another run"))) == {agent.name: NEW}
    assert story.agents[agent.name].engine is engine


def test_nothing_begins_while_the_ledger_cannot_be_written(story: Story) -> None:
    agent, group = story.replica(), story.ranks()
    assert story.update(group).ok
    group.train()
    story.ledger.refuses = "the disk is full"
    first = story.update(group)  # its epoch was spent before, so that it gets as far as its intent
    refused(first, Problem.CODE_FAILED_PRECONDITION, "the disk is full")
    results = story.call(group.trainers[0])
    story.wait(0.2)
    refused(results[0], Problem.CODE_FAILED_PRECONDITION, "no replica was touched", "the disk is full")
    assert "the disk is full" in warnings(story)
    slept = manager_of(story).sleep_or_wake(False, [])
    story.wait(0.2)
    refused(slept.value, Problem.CODE_FAILED_PRECONDITION, "the disk is full")
    assert agent.outcome() == NEW
    assert agent.machine.replica.serving()
    story.ledger.refuses = ""
    story.wait(2.0)
    assert not warnings(story)
    assert story.update(group).ok


def test_a_manager_that_lost_its_lock_begins_nothing(story: Story) -> None:
    story.replica()
    group, first = story.ranks(), manager_of(story)
    story.start_manager(although_one_lives=True)
    story.update(group)  # this one spends the next epoch, which fails
    refused(story.update(group), Problem.CODE_FAILED_PRECONDITION, "another manager has taken this ledger over")
    first.crash()
    story.wait(6.0)
    assert story.update(group).ok


def test_a_run_goes_on_from_an_older_checkpoint_as_a_new_lineage(story: Story) -> None:
    story.replica()
    group = story.ranks(world_size=2)
    assert story.update(group, version=7).ok
    story.end_group(group, in_good_order=False)
    story.wait(6.0)
    again = story.ranks(world_size=3)
    refused(story.update(again, version=5), Problem.CODE_FAILED_PRECONDITION, "backwards", "new lineage")
    again.train()
    refused(story.update(again, version=7), Problem.CODE_FAILED_PRECONDITION, "root", "new lineage")
    assert story.update(story.ranks("the run, again", world_size=3), version=5).ok


def test_a_second_agent_for_an_engine_ends(story: Story) -> None:
    agent = story.replica()
    story.start_second_agent(agent)
    story.wait(10.0)
    assert story.agents[agent.name] is agent
    assert agent.ended is None
    assert story.update(story.ranks()).ok


def test_needs_that_another_manager_stored_are_stored_again(story: Story) -> None:
    agent, group = story.replica(), story.ranks()
    assert story.update(group).ok
    group.train()
    blobs = manager_of(story).blobs
    for prepared in agent.machine.replica.prepared.values():
        blobs.forget(prepared.needs)
    assert story.update(group).ok


def test_needs_that_are_stored_again_in_vain_refuse_the_update(story: Story, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once more, and not until the deadline."""
    story.replica()
    group, tried = story.ranks(), []

    def compile(task: events.CompilePlans) -> events.Compiled:
        tried.append(task)
        raise not_found("these needs are not here")

    monkeypatch.setattr(manager_of(story), "_compile", compile)
    refused(story.update(group), Problem.CODE_NOT_FOUND, "these needs are not here")
    assert len(tried) == 2
    monkeypatch.undo()
    assert story.update(group).ok


def test_a_table_that_another_manager_stored_is_stored_again(story: Story, monkeypatch: pytest.MonkeyPatch) -> None:
    story.replica()
    group = story.ranks()
    trainer = group.trainers[0]
    original = trainer.put
    lost = [True]

    def put(blobs: tuple[bytes, ...]) -> object:
        refs = yield from original(blobs)
        if lost.pop() if lost else False:
            manager_of(story).blobs.forget(refs[0])
        return refs

    monkeypatch.setattr(trainer, "put", put)
    manager_of(story).crash()
    story.start_manager()
    story.wait(8.0)
    assert not lost
    assert story.update(group).ok


def test_a_hello_with_an_epoch_that_cannot_be_spoils_nothing(story: Story) -> None:
    """It is named, and nobody ends: not its sender, and after a restart of the manager nobody else."""
    good, liar = story.replica(), story.replica()
    group = story.ranks()
    honest, liar.machine._filled = liar.machine._filled, 1 << 62
    liar.break_streams()
    story.wait(3.0)
    for word in (liar.name, str(1 << 62), "not believed"):
        assert word in warnings(story)
    assert manager_of(story).machine.status().fence.epoch < 10
    assert outcomes(story.update(group, replicas=[good.name])) == {good.name: NEW}
    story.restart_manager()
    assert good.ended is None
    assert liar.ended is None
    group.train()
    assert outcomes(story.update(group, replicas=[good.name])) == {good.name: NEW}
    liar.machine._filled = honest
    story.wait(3.0)
    assert not warnings(story)
    group.train()
    assert outcomes(story.update(group)) == {good.name: NEW, liar.name: NEW}


def test_a_rank_that_says_an_epoch_that_cannot_be_is_not_let_in(story: Story) -> None:
    agent, group = story.replica(), story.ranks()
    trainer = group.trainers[0]
    trainer.machine._epoch = 1 << 62  # type: ignore[attr-defined]
    trainer.break_streams()
    story.wait(3.0)
    assert "rank 0 of lineage 'run': not believed" in warnings(story)
    story.restart_manager()
    assert agent.ended is None
    assert manager_of(story).machine.status().fence.epoch < 10
    assert story.update(story.ranks("another run")).ok


def test_the_word_of_an_engine_that_comes_later_is_bounded_too(story: Story, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = story.replica()
    assert agent.engine is not None
    agent.engine.workers[0].epoch = 1 << 62
    story.wait(3.0)
    assert f"{agent.name!r}: not believed" in warnings(story)
    assert agent.ended is None
    assert manager_of(story).machine.status().fence.epoch < 10
    monkeypatch.setattr(LedgerRecovery, "_believed", lambda self, epoch, name: True)
    story.wait(3.0)
    assert manager_of(story).machine.status().fence.epoch >= 1 << 62


def test_a_ledger_may_have_forgotten_very_many_epochs(story: Story) -> None:
    agent, group = story.replica(), story.ranks()
    agent.machine._filled = MOST_SKIPPED
    agent.break_streams()
    story.wait(3.0)
    report = story.update(group)
    assert outcomes(report) == {agent.name: NEW}
    assert report.fence.epoch > MOST_SKIPPED
