"""The rules of "one mechanism" (DESIGN.md) that the code has already, taken out one by one: a story must notice each.

Stories of their own instead of seeds: most of these rules are needed in rare moments, and a search for them takes
minutes. What notices is in mechanism.py and invariants.py. README.md has the rules that the code does not have yet, and
`Today` what it does not promise; for these a story shows that it happens.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ckpt_engine.core.sleeping import Sleeping
from ckpt_engine.core.version import Version
from ckpt_engine.machines.events import Key, Stop
from ckpt_engine.machines.manager import holdings, reconcile
from ckpt_engine.machines.manager.absences import Ranks
from ckpt_engine.machines.manager.claims import Claims
from ckpt_engine.machines.manager.members import Replica, TrainerRank
from ckpt_engine.machines.manager.recipients import Recipients
from ckpt_engine.machines.manager.reconcile import Attempts, CatchUp, CatchUpRetry, LateReplicas
from ckpt_engine.machines.manager.sleep_wake import SleepWakeCall
from ckpt_engine.machines.manager.state import ManagerState
from ckpt_engine.machines.manager.update import InstallJob
from ckpt_engine.machines.manager.versions import EVERYBODY, Commit, Content, Versions
from ckpt_engine.v1 import manager_pb2
from tests.simulation.ledgers import LedgerFaults
from tests.simulation.mechanism import Today
from tests.simulation.mistakes import Mistake, Patch, name_of
from tests.simulation.story import OLD, Problem, Story, outcomes, refused
from tests.simulation.world import BrokenPromiseError

# ---------------------------------------------------------------------------------------------------------- live memory


def only_what_stays_sealed_is_read_outside_its_call(patch: Patch) -> None:
    """A late replica reads the trainer's own memory."""
    patch.setattr(holdings, "stays_sealed", lambda published: True)


def a_rank_that_leaves_its_call_is_not_read(patch: Patch) -> None:
    """The update goes on as if it waited still."""
    patch.setattr(Ranks, "caller_left", lambda self, rank: self._goal.calls.pop(rank))


def a_rank_that_leaves_after_the_intent_is_not_read(patch: Patch) -> None:
    """Replicas are told once more to read what it may be training on."""
    patch.setattr(InstallJob, "_changing", lambda self: set())


def a_rank_that_was_cut_off_in_its_call_is_not_read_when_it_is_back(patch: Patch) -> None:
    """One that was not there when it was looked whether it lives counts as dead for good."""
    original = Ranks.note_return

    def note_return(self: Ranks, trainer: TrainerRank) -> None:
        departed = set(self.departed)
        original(self, trainer)
        self.departed = departed

    patch.setattr(Ranks, "note_return", note_return)


# ------------------------------------------------------------------------------------------------- commits and attempts


def a_word_teaches_what_its_replica_is_to_serve(patch: Patch) -> None:
    """What one replica holds all are to serve."""
    original = Versions.learn

    def learn(self: Versions, name: str, identity: Version, epoch: int) -> None:
        original(self, name, identity, epoch)
        original(self, EVERYBODY, identity, epoch)

    patch.setattr(Versions, "learn", learn)


def no_attempt_goes_back_behind_a_word(patch: Patch) -> None:
    """What the ledger does not know of is not believed."""
    patch.setattr(Versions, "learn", lambda self, name, identity, epoch: None)


def a_replica_is_to_serve_the_newest_commit_for_it(patch: Patch) -> None:
    """What was for its whole pool counts, and what named it does not."""

    def commit_of(self: Versions, name: str) -> Commit | None:
        return self.desired.get(self._everybody_with(name))

    patch.setattr(Versions, "commit_of", commit_of)


def an_unanswered_intent_takes_its_number(patch: Patch) -> None:
    """The number is used again."""
    patch.setattr(Versions, "doubt", lambda self, epoch, identity, selection: None)


def an_unanswered_commit_is_read_again(patch: Patch) -> None:
    """What the ledger was silent about counts as not committed."""
    patch.setattr(Versions, "doubt", lambda self, epoch, identity, selection: self.take_number(identity))


# ----------------------------------------------------------------------------------------------------------------- seal


def ranks_seal_when_all_needs_are_known(patch: Patch) -> None:
    """They seal for those that have answered by then."""
    original = Recipients.unprepared
    patch.setattr(Recipients, "unprepared", lambda self: [] if self.prepared() else original(self))


def replicas_are_counted_before_the_commit(patch: Patch) -> None:
    """A version is committed for however few can be installed into."""
    patch.setattr(Recipients, "too_few", lambda self: None)


# ------------------------------------------------------------------------------------------------------------ claims


def what_is_over_lets_go_of_its_holders(patch: Patch) -> None:
    """It has them for ever."""
    original = Claims.end

    def end(self: Claims, number: int) -> None:
        claim = self.granted.get(number)
        original(self, number)
        if claim is not None:
            self.granted[number] = claim

    patch.setattr(Claims, "end", end)


def what_nobody_called_for_gives_way(patch: Patch) -> None:
    """An update waits until a late replica is brought up."""
    patch.setattr(LateReplicas, "give_way", lambda self, now: None)


def a_call_to_sleep_waits_for_installs(patch: Patch) -> None:
    """It is told to a replica into which an update installs."""
    patch.setattr(SleepWakeCall, "meets", lambda self, goal: False)


# -------------------------------------------------------------------------------------------------------------- backoff


def what_serves_is_tried_a_few_times(patch: Patch) -> None:
    """A replica that serves is tried, and perhaps paused, for ever."""
    patch.setattr(reconcile, "_given_up", lambda replica, attempts: False)


def a_next_try_has_its_time(patch: Patch) -> None:
    """It follows at once."""
    patch.setattr(Attempts, "due", lambda self, now: True)


def there_is_a_timer_for_the_next_try(patch: Patch) -> None:
    """Somebody else's event must bring it about."""
    original = ManagerState.set_timer

    def set_timer(self: ManagerState, key: Key, seconds: float) -> None:
        if not isinstance(key, CatchUpRetry):
            original(self, key, seconds)

    patch.setattr(ManagerState, "set_timer", set_timer)


def who_waits_is_told_why(patch: Patch) -> None:
    """Nobody hears that nothing can be read."""
    patch.setattr(CatchUp, "_say_no_source", lambda self, replica, content, attempts: None)


# ------------------------------------------------------------------------------------------------------- sleep and wake


def what_sleeps_is_not_brought_up(patch: Patch) -> None:
    """The manager does not look whether it sleeps."""

    original = CatchUp._hindrance

    def hindrance(self: CatchUp, replica: Replica, content: Content) -> str:
        asleep, replica.asleep = replica.asleep, False
        try:
            return original(self, replica, content)
        finally:
            replica.asleep = asleep

    patch.setattr(CatchUp, "_hindrance", hindrance)


def what_is_to_rest_says_so(patch: Patch) -> None:
    """An agent tells its manager that a sleeping engine may be brought up."""
    patch.setattr(Sleeping, "resting", False)


# -------------------------------------------------------------------------------------------------------------- stories


def cut_off(story: Story, name: str, cut: bool = True) -> None:
    cuts = {(name, True), (name, False)}
    story.faults.cuts = story.faults.cuts | cuts if cut else story.faults.cuts - cuts


def phase_is(story: Story, said: str) -> Callable[[], bool]:
    return lambda: said in story.phase


def a_replica_comes_late_to_live_memory(story: Story) -> None:
    story.replica()
    assert story.update(story.ranks()).ok
    story.replica()
    story.wait(5.0)


def a_rank_leaves_before_the_intent(story: Story) -> None:
    story.replica()
    trainer = story.ranks().trainers[0]
    results = story.call(trainer)
    story.until(phase_is(story, "preparing"))
    story.leave()
    story.wait(5.0)
    assert story.cluster.manager is not None
    assert not story.ledger.intents
    assert not results


def a_rank_calls_off(story: Story) -> None:
    """Its caller has pressed Ctrl-C."""
    story.leave()


def a_rank_is_cut_off(story: Story) -> None:
    """Its connection breaks, and with it its call; it dials again."""
    (rank,) = story.groups[0].trainers
    assert story.cluster.manager is not None
    (known,) = story.cluster.manager.machine._members.trainers.values()
    cut_off(story, rank.name)
    rank.break_streams()
    story.leave()
    assert known.peer is None
    cut_off(story, rank.name, False)
    members = story.cluster.manager.machine._members
    story.until(lambda: all(each.peer is not None for each in members.trainers.values()))


def a_rank_says_goodbye(story: Story) -> None:
    """Its caller has pressed Ctrl-C, and left the block that closes the trainer."""
    (rank,) = story.groups[0].trainers
    rank.feed(Stop("closed"))
    story.leave()


def a_rank_dies_and_another_process_is_that_rank(story: Story) -> None:
    assert story.cluster.manager is not None
    trainers = story.cluster.manager.machine._members.trainers
    before = {each.session_id for each in trainers.values()}
    story.restart_rank(story.groups[0], 0)
    story.leave()
    story.until(lambda: before.isdisjoint(each.session_id for each in trainers.values()))


def a_rank_leaves_after_the_intent(
    story: Story, name: str = "", how: Callable[[Story], None] = a_rank_calls_off
) -> None:
    """A replica has not heard of its install by then."""
    name = name or story.replica().name
    group = next(iter(story.groups), None) or story.ranks()
    group.train()
    story.call(group.trainers[0])
    story.until(phase_is(story, "recording"))
    cut_off(story, name)
    story.until(phase_is(story, "installing"))
    how(story)
    cut_off(story, name, False)
    story.until(phase_is(story, "idle"), 5.0)


def a_rank_is_cut_off_after_the_intent(story: Story) -> None:
    a_rank_leaves_after_the_intent(story, how=a_rank_is_cut_off)


def a_word_of_what_the_ledger_has_lost(story: Story) -> None:
    """One replica comes back, with a version of another run, to a manager that has the others."""
    taken, _ = story.replica(), story.replica()
    assert story.update(story.ranks()).ok
    ledger = LedgerFaults(story)
    assert story.update(story.ranks("another run"), replicas=[taken.name]).ok
    cut_off(story, taken.name)
    ledger.copy_is_put_back()
    story.wait(8.0)
    cut_off(story, taken.name, cut=False)
    story.wait(8.0)


def a_ledger_knows_an_older_version(story: Story) -> None:
    """And a holder has that one."""
    story.replica()
    group = story.ranks()
    older = story.update(group).identity
    ledger = LedgerFaults(story)
    assert story.trained(group).ok
    ledger.copy_is_put_back()
    story.join_holder().hold(older)
    story.wait(15.0)


def a_run_takes_a_replica_over(story: Story) -> None:
    """Whose engine starts again."""
    taken, _ = story.replica(), story.replica()
    assert story.update(story.ranks(kind="snapshot")).ok
    version = story.update(story.ranks("another run", kind="snapshot"), replicas=[taken.name]).identity
    story.engine_again(taken)
    story.wait(5.0)
    assert story.held_by(taken) == version


def a_disk_answers_too_late(story: Story) -> None:
    """The intent is there all the same, when the next update is called for."""
    story.replica()
    group = story.ranks()
    assert story.update(group).ok
    group.train()
    results = story.call(group.trainers[0])
    story.until(phase_is(story, "recording"))
    story.faults.slow = 1.0
    story.wait(4.0)
    story.faults.slow = 0.0
    story.wait(30.0)
    refused(results[0], Problem.CODE_DEADLINE_EXCEEDED)
    assert len(story.ledger.intents) == 2
    assert story.trained(group).ok


def a_replica_comes_back_after_a_disk_answered_too_late(story: Story) -> None:
    """It is brought to what the ledger has by then, and to nothing before that is known."""
    agent, group = story.replica(), story.ranks(kind="snapshot")
    holder = story.join_holder()
    first = story.update(group).identity
    holder.hold(first)
    group.train()
    results = story.call(group.trainers[0])
    story.until(phase_is(story, "recording"))
    story.faults.slow = 1.0
    story.until(lambda: bool(results), 10.0)
    refused(results[0], Problem.CODE_DEADLINE_EXCEEDED)
    story.faults.slow = 0.0
    story.until(lambda: len(story.ledger.intents) == 2, 40.0)
    story.engine_again(agent)
    story.until(lambda: story.held_by(agent) is not None, 40.0)
    assert story.held_by(agent) != first


def two_replicas_get_their_first_version(story: Story) -> None:
    both = [story.replica(), story.replica()]
    group = story.ranks()
    story.faults.delay = 0.5
    assert len(story.update(group, 15.0).replicas) == len(both)


def a_replica_has_another_model(story: Story) -> None:
    other, _ = story.replica(), story.replica()
    assert other.engine is not None
    other.engine.models = {"model B"}
    refused(story.update(story.ranks(), min_replicas=2), Problem.CODE_FAILED_PRECONDITION, "2 are required")


def an_update_by_way_of_a_relay(story: Story) -> None:
    story.replica()
    story.relay()
    assert story.update(story.ranks(), prefetch=manager_pb2.PREFETCH_ALWAYS).ok


def an_update_is_called_while_a_replica_is_brought_up(story: Story) -> None:
    story.replica()
    group = story.ranks(kind="snapshot")
    assert story.update(group).ok
    story.faults.read_late = 1.0
    story.join_replica(manager_pb2.MODE_STANDALONE)
    story.until(phase_is(story, "bringing up"))
    assert story.cluster.manager is not None
    group.train()
    results = story.call(group.trainers[0])
    story.wait(0.5)
    story.faults.read_late = 0.0
    story.wait(20.0)
    assert len(results) == 1


def sleep_is_called_for_in_an_install(story: Story) -> None:
    agent, group = story.replica(), story.ranks()
    story.call(group.trainers[0])
    story.until(phase_is(story, "installing"))
    assert story.cluster.manager is not None
    asked = story.cluster.manager.sleep_or_wake(False, [agent.name])
    story.wait(5.0)
    refused(asked.value, Problem.CODE_ABORTED, "in use")


def tries_fail(story: Story) -> None:
    """Of a replica that was away when the version came that it is to serve, and serves the one before."""
    away, _ = story.replica(), story.replica()
    group = story.ranks(kind="snapshot")
    before = story.update(group).identity
    cut_off(story, away.name)
    group.train()
    story.update(group, 25.0, min_replicas=1)
    story.faults.worker_early = 1.0
    cut_off(story, away.name, cut=False)
    story.wait(60.0)
    assert story.held_by(away) == before


def nothing_can_be_read(story: Story) -> None:
    story.replica()
    group = story.ranks()
    assert story.update(group).ok
    late = story.replica()
    story.wait(2.0)
    assert story.held_by(late) is None


def a_replica_sleeps(story: Story) -> None:
    """With its weights discarded, and a source at hand."""
    agent, group = story.replica(manager_pb2.MODE_HYBRID), story.ranks(kind="snapshot")
    assert story.update(group).ok
    assert story.cluster.manager is not None
    asked = story.cluster.manager.sleep_or_wake(False, [agent.name], level=2)
    story.wait(5.0)
    assert isinstance(asked.value, manager_pb2.SleepResponse)
    assert story.held_by(agent) is None


RULES: dict[Mistake, Callable[[Story], None]] = {
    only_what_stays_sealed_is_read_outside_its_call: a_replica_comes_late_to_live_memory,
    a_rank_that_leaves_its_call_is_not_read: a_rank_leaves_before_the_intent,
    a_rank_that_leaves_after_the_intent_is_not_read: a_rank_leaves_after_the_intent,
    a_rank_that_was_cut_off_in_its_call_is_not_read_when_it_is_back: a_rank_is_cut_off_after_the_intent,
    a_word_teaches_what_its_replica_is_to_serve: a_word_of_what_the_ledger_has_lost,
    no_attempt_goes_back_behind_a_word: a_ledger_knows_an_older_version,
    a_replica_is_to_serve_the_newest_commit_for_it: a_run_takes_a_replica_over,
    an_unanswered_intent_takes_its_number: a_disk_answers_too_late,
    an_unanswered_commit_is_read_again: a_replica_comes_back_after_a_disk_answered_too_late,
    ranks_seal_when_all_needs_are_known: two_replicas_get_their_first_version,
    replicas_are_counted_before_the_commit: a_replica_has_another_model,
    what_is_over_lets_go_of_its_holders: an_update_by_way_of_a_relay,
    what_nobody_called_for_gives_way: an_update_is_called_while_a_replica_is_brought_up,
    a_call_to_sleep_waits_for_installs: sleep_is_called_for_in_an_install,
    what_serves_is_tried_a_few_times: tries_fail,
    a_next_try_has_its_time: tries_fail,
    there_is_a_timer_for_the_next_try: tries_fail,
    who_waits_is_told_why: nothing_can_be_read,
    what_sleeps_is_not_brought_up: a_replica_sleeps,
    what_is_to_rest_says_so: a_replica_sleeps,
}


@pytest.mark.parametrize("rule", RULES, ids=name_of)
def test_a_story_notices_without(rule: Mistake, monkeypatch: pytest.MonkeyPatch) -> None:
    RULES[rule](Story())
    rule(monkeypatch)
    with pytest.raises(BrokenPromiseError):
        RULES[rule](Story())


# ----------------------------------------------------------------------------------- what today's code does not promise


def test_a_call_ends_today_while_a_lost_replica_reads() -> None:
    story = Story()
    agent, group = story.replica(), story.ranks()
    story.faults.read_late = 1.0
    results = story.call(group.trainers[0])
    story.until(lambda: agent.engine is not None and agent.engine.paused)
    cut_off(story, agent.name)
    story.until(lambda: results, 19.0)
    assert story.invariants.mechanism.excused[Today.LOST_READER]


@pytest.mark.parametrize("how", [a_rank_calls_off, a_rank_is_cut_off, a_rank_says_goodbye], ids=name_of)
def test_what_has_not_begun_keeps_what_it_serves_when_a_rank_leaves_after_the_intent_and_lives(
    how: Callable[[Story], None],
) -> None:
    story = Story()
    agent, group = story.replica(), story.ranks()
    assert story.trained(group).ok
    before = story.held_by(agent)
    a_rank_leaves_after_the_intent(story, agent.name, how)
    assert story.held_by(agent) == before
    assert outcomes(story.last_report()) == {agent.name: OLD}
    assert "rank 0 left its call" in story.last_report().replicas[0].problem.message
    if how is not a_rank_says_goodbye:
        assert story.trained(group).ok


def test_another_process_of_a_rank_that_died_after_the_intent_turns_nothing_back() -> None:
    """Memory of the dead does not change. (Here it is gone, so that its reader says so.)"""
    story = Story()
    agent, group = story.replica(), story.ranks()
    assert story.trained(group).ok
    a_rank_leaves_after_the_intent(story, agent.name, a_rank_dies_and_another_process_is_that_rank)
    assert "rank 0 of run is gone" in story.last_report().replicas[0].problem.message


def test_a_word_of_what_the_ledger_has_lost_decides_what_its_replica_is_to_serve_and_no_other() -> None:
    story = Story()
    knows, other = story.replica(), story.replica()
    group = story.ranks()
    assert story.update(group).ok
    ledger = LedgerFaults(story)
    cut_off(story, other.name)
    group.train()
    assert story.update(group, 25.0, min_replicas=1).ok
    cut_off(story, other.name, cut=False)
    cut_off(story, knows.name)
    ledger.copy_is_put_back()
    story.wait(8.0)
    cut_off(story, knows.name, cut=False)
    story.wait(8.0)
    assert story.cluster.manager is not None
    versions = story.cluster.manager.machine._state.versions
    desired = {agent: content.identity.number for agent in (knows, other) if (content := versions.of(agent.name))}
    assert desired == {knows: 1, other: 0}


def test_a_replica_that_was_moved_is_brought_back_today_to_the_older_commit_of_its_pool() -> None:
    story = Story()
    moved, _ = story.replica(), story.replica(pool="judge")
    assert story.update(story.ranks(kind="snapshot"), pool="judge").ok
    assert story.update(story.ranks("another run", kind="snapshot")).ok
    story.restart_agent(moved, 0.1, "judge")
    story.wait(8.0)
    assert story.invariants.mechanism.excused[Today.OTHER_POOL]
