"""Rules of collectives, taken out one by one: without each of them some seed notices.

What the rules are for is argued in docs/arming.md. Replicas are on several hosts here, every run publishes for
collectives alone, and there are no relays.
"""

from __future__ import annotations

from typing import Any

import pytest

from ckpt_engine.core.arming import Ballot, BallotAnswer, Ballots, BallotStep, Participant, Word
from ckpt_engine.machines import events
from ckpt_engine.machines.agent.ready import Readying
from ckpt_engine.machines.manager import collective, relay_or_collective
from ckpt_engine.v1 import manager_pb2, worker_pb2
from tests.simulation import parts
from tests.simulation.collective import Part
from tests.simulation.engine import Engine, Worker
from tests.simulation.mistakes import Mistake, Patch, must_be_noticed, name_of
from tests.simulation.scenario import Machines, Slant, run_seed
from tests.simulation.world import Steps

GENTLE = frozenset({"task", "engine_no", "engine_hang", "engine_lies", "stamp_no", "worker_early"})
"""Faults without which more collectives come to their vote."""


def slant(*often: str, **worse: float) -> Slant:
    return Slant(without=GENTLE, often=frozenset(often), worse=worse, far=True, collective=1.0)


# ------------------------------------------------------------------------------------------------------- the ballot


def go_is_written_when_all_have_voted(patch: Patch) -> None:
    """It is written when the first one has."""
    patch.setattr(Ballot, "missing", property(lambda self: () if self._until else ("nobody",)))


def who_waits_waits_for_longer_than_its_vote_holds(patch: Patch) -> None:
    """It goes back soon after it has voted, and tells nobody."""
    took, original = Participant.took, Participant.step
    voted: dict[Participant, float] = {}

    def remember(
        self: Participant, answer: BallotAnswer | None, now: float, asked: BallotStep = BallotStep.ASK
    ) -> None:
        took(self, answer, now, asked)
        if answer is not None and answer.voted:
            voted.setdefault(self, now)

    def step(self: Participant, now: float) -> BallotStep:
        told = original(self, now)
        return BallotStep.BACK if told is BallotStep.ASK and now > voted.get(self, now) + 0.1 else told

    told = Part.tell

    def tell(self: Part, verb: str, *given: Any) -> Steps:
        return (yield from told(self, verb, *given)) if verb != "leave" else None

    patch.setattr(Participant, "took", remember)
    patch.setattr(Participant, "step", step)
    patch.setattr(Part, "tell", tell)


def what_is_decided_is_decided(patch: Patch) -> None:
    """Who gives up after *go* takes it back."""
    original = Ballot._write

    def write(self: Ballot, why: str, blamed: tuple[str, ...]) -> None:
        original(self, why, blamed)
        if self.aborted:
            self.word, self.aborted = Word.NO, False

    patch.setattr(Ballot, "_write", write)


def a_silent_member_ends_it(patch: Patch) -> None:
    """Nobody looks who is heard."""
    original = Ballots.open

    def opened(self: Ballots, epoch: int, members: Any) -> Ballot:
        ballot = original(self, epoch, members)
        ballot.silence = 1e9
        return ballot

    patch.setattr(Ballots, "open", opened)
    patch.setattr(Ballots, "lost", lambda self, member: None)


# ---------------------------------------------------------------------------------------------------------- members


def all_ask_while_they_run(patch: Patch) -> None:
    """Nobody hears of an abort."""

    def watch(self: Part, part: Participant) -> Steps:
        yield 0.0

    patch.setattr(Part, "_watch", watch)


def who_does_not_hear_the_lead_stops(patch: Patch) -> None:
    """A lead that is dead or stopped is waited for."""
    original = Participant._step_of_a_run

    def step(self: Participant, now: float) -> BallotStep:
        self._heard = now
        return original(self, now)

    patch.setattr(Participant, "_step_of_a_run", step)


class EagerEngine(Engine):
    def _check_fence(self, worker: Worker, order: worker_pb2.InstallOrder) -> None:
        super()._check_fence(worker, order)
        worker.state, worker.epoch = manager_pb2.WORKER_STATE_DIRTY, order.fence.epoch


def nobody_is_dirty_before_go(patch: Patch) -> Machines:
    """A worker marks itself when it is called, and votes then."""
    return Machines(engine=EagerEngine)


class VotingEarly(Engine):
    def _get_ready(self, worker: Worker, order: worker_pb2.ReadyOrder) -> Steps:
        yield from super()._get_ready(worker, order)
        if order.HasField("collective") and worker.communicator is not None:
            end = self.world.now + order.deadline_seconds
            part = parts._place(self, worker, order.collective, order.fence.epoch, end)
            self.world.spawn(part.arm(order.collective.arm_seconds))


def a_worker_votes_when_its_engine_is_paused(patch: Patch) -> Machines:
    """It votes as soon as it is ready."""
    return Machines(engine=VotingEarly)


def a_part_has_an_end(patch: Patch) -> None:
    """A rank is in its part for as long as that takes."""
    original = Participant.__init__

    def make(self: Participant, patience: float, silence: float, end: float, now: float) -> None:
        original(self, patience, 1e9, 1e9, now)

    patch.setattr(Participant, "__init__", make)


# ------------------------------------------------------------------------------------------------------ the manager


def a_communicator_is_made_anew_when_anybody_comes_or_goes(patch: Patch) -> None:
    """It is named by its members, whatever processes these are."""

    def named(self: collective.UpdateCollective, fence: Any, plan: events.CollectivePlan) -> bytes:
        self._communicator_entry = "", None, b""
        return "/".join(map(str, plan.members)).encode()

    patch.setattr(collective.UpdateCollective, "_communicator", named)


def workers_are_asked_for_the_communicator(patch: Patch) -> None:
    """Whose plan is ready is taken to be ready."""
    original = Readying.__init__

    def make(self: Readying, replica: Any, install: Any, unopened: Any) -> None:
        original(self, replica, install, unopened)
        self._install = manager_pb2.Install()

    patch.setattr(Readying, "__init__", make)


def late_replicas_never_use_one(patch: Patch) -> None:
    """They are brought up by a collective, too."""
    original = relay_or_collective.collective_decision

    def decision(
        collective_only: bool, until_held: bool, is_late: bool, candidates: Any
    ) -> relay_or_collective.WayDecision:
        return original(collective_only, until_held, False, candidates)

    patch.setattr(collective, "collective_decision", decision)


RULES: dict[Mistake, Slant] = {
    go_is_written_when_all_have_voted: slant(),
    who_waits_waits_for_longer_than_its_vote_holds: slant(),
    what_is_decided_is_decided: slant(worker_late=0.1),
    a_silent_member_ends_it: slant("worker_dies", read_late=0.1),
    all_ask_while_they_run: slant("worker_dies", worker_late=0.1),
    who_does_not_hear_the_lead_stops: slant("rank_restarts", read_late=0.1),
    nobody_is_dirty_before_go: slant(),
    a_worker_votes_when_its_engine_is_paused: slant(),
    a_part_has_an_end: slant("rank_restarts", read_late=0.1),
    a_communicator_is_made_anew_when_anybody_comes_or_goes: slant("engine_is_swapped"),
    workers_are_asked_for_the_communicator: slant(),
    late_replicas_never_use_one: slant("engine_is_swapped"),
}
"""With what makes it likely that a rule is needed."""


@pytest.mark.parametrize("rule", RULES, ids=name_of)
def test_some_seed_notices_without(rule: Mistake, monkeypatch: pytest.MonkeyPatch) -> None:
    must_be_noticed(rule, monkeypatch, RULES[rule])


def test_no_seed_complains() -> None:
    for seed in range(2):
        run_seed(seed, crashes=True, slant=slant())


SLANTS = {" ".join((*sorted(each.often), *each.worse)) or "nothing": each for each in RULES.values()}
"""Each once, by what it makes more likely."""


@pytest.mark.slow
@pytest.mark.parametrize("likely", SLANTS)
def test_no_seed_complains_with(likely: str) -> None:
    """What is made more likely is not what breaks the promise."""
    for seed in range(6):
        run_seed(seed, crashes=True, slant=SLANTS[likely])
