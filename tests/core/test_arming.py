"""The vote of a collective's members: each transition of the ballot and of who waits for it."""

from __future__ import annotations

import random

import pytest

from ckpt_engine.core.arming import NOT_OPEN, Ballot, BallotAnswer, Ballots, BallotStep, Participant, Word

A, B, C = "rank 0", "replica a, worker 0", "replica b, worker 0"


def ballot(silence: float = 2.0) -> Ballot:
    return Ballot(7, frozenset({A, B, C}), silence)


def gone(*members: str) -> Ballot:
    """A ballot of which *go* is written at moment 0."""
    made = ballot()
    for member in (A, B, C):
        assert made.word is Word.UNDECIDED
        made.vote(member, 10.0, 0.0)
    assert made.word is Word.GO
    for member in members:
        made.done(member, 0.0)
    return made


def test_go_is_written_with_the_last_vote_and_not_before() -> None:
    assert gone().missing == ()


def test_a_repeated_vote_is_one_vote_and_holds_no_longer() -> None:
    made = ballot(silence=100.0)
    made.vote(A, 10.0, 0.0)
    assert made.vote(A, 20.0, 0.0) == BallotAnswer(Word.UNDECIDED, 0.0, voted=True)
    assert made.missing == (B, C)
    made.look(10.0)
    assert made.word is Word.NO


def test_no_is_written_when_a_vote_has_run_out_and_names_who_had_not_voted() -> None:
    made = ballot(silence=100.0)
    made.vote(A, 10.0, 0.0)
    made.vote(B, 12.0, 9.0)
    assert made.vote(C, 30.0, 10.0).word is Word.NO, "its vote comes when that of A holds no longer"
    assert (made.blamed, made.why) == ((A, B, C), f"{A}, {B} and {C} had not voted in time")
    late = ballot(silence=100.0)
    late.vote(A, 10.0, 0.0)
    late.look(10.0)
    assert late.blamed == (B, C)
    assert f"{B} and {C} had not voted" in late.why


def test_a_vote_that_was_long_on_its_way_writes_no_go() -> None:
    """The lead was stopped: what had been sent it reads when its sender waits no more."""
    made = ballot(silence=100.0)
    made.vote(A, 50.0, 0.0)
    made.vote(B, 50.0, 0.0)
    assert made.vote(C, 10.0, 20.0).word is Word.NO


def test_no_stays_no_and_go_stays_go() -> None:
    made = ballot()
    made.leave(B, "has another plan", 0.0)
    for member in (A, B, C):
        assert made.vote(member, 10.0, 0.1).word is Word.NO
    assert made.why == f"{B} has another plan"
    went = gone()
    assert went.give_up(B, 1.0).word is Word.GO
    assert went.leave(C, "failed", 1.0) == BallotAnswer(Word.GO, 1.0, True, True, f"{C} failed")
    assert went.leave(B, "failed too", 1.0).why == f"{C} failed", "the first reason is kept"


@pytest.mark.parametrize("voted", [False, True])
def test_whoever_was_heard_and_is_silent_counts_as_gone(voted: bool) -> None:
    made = ballot()
    if voted:
        made.vote(B, 10.0, 0.0)
    else:
        made.ask(B, 0.0)
    for moment in (0.9, 1.5, 2.0):
        made.look(moment)
        assert made.word is Word.UNDECIDED
    made.look(2.1)
    assert (made.word, made.blamed) == (Word.NO, (B,))
    assert "was not heard for 2 s" in made.why


def test_after_go_who_is_silent_or_lost_aborts_unless_it_is_done() -> None:
    for member in (A, B, C):
        made = gone(member)
        made.lost(member)
        assert not made.aborted
        others = {A, B, C} - {member}
        for moment in (1.5, 3.0):
            for other in others:
                assert not made.ask(other, moment).aborted
        made.lost(min(others))
        assert made.aborted
        assert made.blamed == (min(others),)
    made = gone()
    for moment in (0.9, 1.5, 2.0):
        made.ask(A, moment)
        assert not made.ask(B, moment).aborted
    assert made.ask(A, 2.1).aborted
    assert made.blamed == (C,)


@pytest.mark.parametrize("went", [False, True])
def test_a_lead_that_was_away_takes_nobody_for_silent(went: bool) -> None:
    """Its process was stopped for longer than members may be silent: what they said waits to be read."""
    made = gone() if went else ballot()
    for member in (A, B):
        made.ask(member, 0.0)
    assert made.ask(A, 5.0) == BallotAnswer(made.word, 5.0, voted=went)
    assert made.ask(B, 5.1) == BallotAnswer(made.word, 5.1, voted=went)
    made.ask(A, 6.0)
    made.ask(A, 7.0)
    assert made.ask(A, 7.2).word is (Word.GO if went else Word.NO), "from then on they have to be heard"
    assert made.blamed == (B,)


def test_a_connection_that_ends_before_its_vote_or_after_all_is_over() -> None:
    made = ballot()
    made.lost(A)  # nothing was heard of it: it may connect again
    assert made.word is Word.UNDECIDED
    made.vote(A, 10.0, 0.0)
    made.lost(A)
    assert made.word is Word.NO
    assert gone(A).unfinished == (B, C)
    over = gone(A, B, C)
    over.lost(B)
    over.look(100.0)
    assert over.finished
    assert not over.aborted


def test_nobody_is_done_before_go() -> None:
    made = ballot()
    made.done(A, 0.0)
    made.vote(A, 10.0, 0.0)
    made.lost(A)
    assert made.word is Word.NO


def test_a_stranger_is_told_no_and_changes_nothing() -> None:
    made = ballot()
    for told in (made.vote("rank 9", 10.0, 0.0), made.leave("rank 9", "fails", 0.0), made.ask("rank 9", 0.0)):
        assert told.word is Word.NO
    made.lost("rank 9")
    assert made.word is Word.UNDECIDED


def test_a_later_epoch_ends_what_came_before() -> None:
    ballots = Ballots(2.0)
    first = ballots.open(7, [A, B])
    first.vote(A, 10.0, 0.0)
    second = ballots.open(9, [A, B])
    assert first.word is Word.NO
    assert "overtaken by epoch 9" in first.why
    assert ballots.open(9, [A]) is second
    assert ballots.open(8, [A, B]).word is Word.NO
    assert ballots.find(8) == BallotAnswer(Word.NO, why="epoch 8 was overtaken by 9")
    assert ballots.find(10) is NOT_OPEN
    second.vote(A, 10.0, 0.0)
    second.vote(B, 10.0, 0.0)
    ballots.open(11, [A, B])
    assert second.aborted
    for epoch in range(12, 20):
        ballots.open(epoch, [A])
    assert isinstance(ballots.find(9), BallotAnswer), "old ones are forgotten"


def test_who_leaves_before_the_ballot_is_open_is_remembered() -> None:
    ballots = Ballots(2.0)
    assert ballots.leave(7, B, "has no memory for its buffers", 0.0) is NOT_OPEN
    made = ballots.open(7, [A, B])
    assert made.word is Word.NO
    assert made.why == f"{B} has no memory for its buffers"
    assert ballots.open(8, [A, B]).word is Word.UNDECIDED
    assert ballots.leave(8, B, "fails", 0.0).word is Word.NO
    ballots.lost(A)
    ballots.look(100.0)


# ---------------------------------------------------------------------------------------------------------- members


def member(patience: float = 10.0) -> Participant:
    return Participant(patience, silence=2.0, end=60.0, now=0.0)


def test_a_member_asks_then_votes_then_asks_until_it_is_told() -> None:
    one = member()
    assert one.step(0.0) is BallotStep.ASK
    one.took(NOT_OPEN, 1.0)
    assert (one.step(1.0), one.until) == (BallotStep.ASK, None)
    one.took(BallotAnswer(Word.UNDECIDED, 500.0), 4.0)
    assert (one.step(4.0), one.until) == (BallotStep.VOTE, 506.0)
    one.took(BallotAnswer(Word.UNDECIDED, 501.0, voted=True), 5.0)
    assert (one.step(5.0), one.until) == (BallotStep.ASK, 506.0)
    one.took(BallotAnswer(Word.GO, 502.0, voted=True), 6.0)
    assert one.step(6.0) is BallotStep.GO
    assert one.went


def test_a_member_waits_for_longer_than_its_vote_holds() -> None:
    one = member()
    one.took(BallotAnswer(Word.UNDECIDED, 500.0), 4.0)
    one.took(BallotAnswer(Word.UNDECIDED, 500.5, voted=True), 4.5)
    assert one.step(10.5) is BallotStep.ASK, "its vote ends to hold at 10"
    assert one.step(10.7) is BallotStep.GIVE_UP
    one.took(BallotAnswer(Word.GO, 507.0, voted=True), 10.8)
    assert one.step(10.8) is BallotStep.GO, "it is too late to go back"


@pytest.mark.parametrize("answered", [False, True], ids=["nothing was heard", "its vote is there"])
def test_a_member_that_does_not_hear_the_lead_goes_back_before_its_part_must_be_over(answered: bool) -> None:
    """Its engine is paused meanwhile, and whoever paused it waits for no longer than that."""
    one = Participant(30.0, silence=5.0, end=4.0, now=0.0)
    if answered:
        one.took(BallotAnswer(Word.UNDECIDED, 500.0), 0.1)
        assert one.until == pytest.approx(501.9)
        one.took(BallotAnswer(Word.UNDECIDED, 500.2, voted=True), 0.2)
    assert one.step(1.9) is not BallotStep.BACK
    assert one.step(2.3) is BallotStep.GIVE_UP
    one.took(None, 2.4, BallotStep.GIVE_UP)
    assert one.step(3.2) is BallotStep.BACK


def test_a_member_that_was_stopped_for_long_asks_before_it_goes_back() -> None:
    one = member()
    one.took(BallotAnswer(Word.UNDECIDED, 500.0), 1.0)
    one.took(None, 60.0, BallotStep.VOTE)
    assert one.step(60.0) is BallotStep.GIVE_UP
    one.took(BallotAnswer(Word.GO, 560.0, voted=True), 59.0, BallotStep.GIVE_UP)
    assert one.step(59.0) is BallotStep.GO
    silent = member()
    assert silent.step(60.0) is BallotStep.GIVE_UP
    silent.took(NOT_OPEN, 60.1, BallotStep.GIVE_UP)
    assert silent.step(60.1) is BallotStep.BACK


def test_a_member_that_is_told_no_or_nothing_goes_back() -> None:
    one = member()
    one.took(BallotAnswer(Word.NO, 500.0, why="rank 1 failed"), 1.0)
    assert (one.step(1.0), one.why, one.went) == (BallotStep.BACK, "rank 1 failed", False)
    deaf = member()
    assert deaf.step(9.9) is BallotStep.ASK
    assert deaf.step(10.0) is BallotStep.GIVE_UP
    deaf.took(None, 11.0, BallotStep.GIVE_UP)
    assert deaf.step(11.9) is BallotStep.GIVE_UP
    assert deaf.step(12.0) is BallotStep.BACK
    assert "nothing was heard" in deaf.why


@pytest.mark.parametrize(
    ("answer", "heard", "now", "why"),
    [
        (BallotAnswer(Word.GO, 1.0, True, True, "rank 1 was killed"), 1.0, 1.0, "rank 1 was killed"),
        (BallotAnswer(Word.GO, 1.0, True), 1.0, 3.1, "the lead was not heard"),
        (BallotAnswer(Word.GO, 1.0, True), 60.0, 60.0, "its time was over"),
    ],
)
def test_a_member_that_went_stops_and_does_not_begin_again(
    answer: BallotAnswer, heard: float, now: float, why: str
) -> None:
    one = member()
    one.took(answer, heard)
    assert one.step(now) is BallotStep.STOP
    assert why in one.why
    one.took(BallotAnswer(Word.GO, 1.0, True), now)
    assert one.step(now) is BallotStep.STOP


@pytest.mark.parametrize("seed", range(40))
def test_nobody_goes_back_from_a_go_that_it_could_have_heard(seed: int) -> None:
    """Any order, any delay, lost messages, clocks that differ: one word, and nobody who reaches the lead leaves it."""
    dice = random.Random(seed)
    for _ in range(20):
        names = [A, B, C]
        made = Ballot(1, frozenset(names), silence=2.0)
        rate = {name: dice.uniform(0.96, 1.04) for name in names}
        began = {name: dice.uniform(0.0, dice.choice((0.1, 8.0))) for name in names}
        parts = {name: Participant(5.0, 2.0, 1e9, began[name] * rate[name]) for name in names}
        loss, slow = dice.choice((0.0, 0.3)), dice.choice((0.01, 0.5))
        words, back, now = {made.word}, set[str](), 0.0
        while now < 40.0 and (len(back) < 3 and not all(part.went for part in parts.values())):
            now += dice.uniform(0.0, 0.3)
            for name in dice.sample(names, 3):
                if now < began[name] or name in back or parts[name].went:
                    continue
                step = parts[name].step(now * rate[name])
                if step is BallotStep.BACK:
                    back.add(name)
                    continue
                if dice.random() < loss:
                    parts[name].took(None, now * rate[name], step)
                    continue
                until = parts[name].until
                arrives = now + dice.uniform(0.0, slow)
                match step:
                    case BallotStep.VOTE:
                        assert until is not None
                        answer = made.vote(name, until, arrives)
                    case BallotStep.GIVE_UP:
                        answer = made.give_up(name, arrives)
                    case _:
                        answer = made.ask(name, arrives)
                words.add(made.word)
                lost = dice.random() < loss
                parts[name].took(None if lost else answer, (arrives + dice.uniform(0.0, slow)) * rate[name], step)
        assert len(words - {Word.UNDECIDED}) <= 1
        if not loss:
            assert not (back and made.word is Word.GO), (seed, made)
