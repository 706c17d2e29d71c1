"""Which requests are let in, kept and refused, by a clock of ours."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from ckpt_engine.core.sleeping import Sleeping
from ckpt_engine.gate.holding import BATCH, DecisionKind, GateDecision, Queue, RequestTicket, decide
from ckpt_engine.gate.page import (
    CLEAN,
    DIRTY,
    NONE,
    Admission,
    EngineMark,
    EnginePage,
    HoldLimits,
    RequestHold,
    WorkerWord,
)
from ckpt_engine.v1 import weights_pb2

IDENTITY = weights_pb2.Identity(lineage="run", version=3, root=bytes(32))
CLEAN_WORD = WorkerWord(0, b"boot", 1, True, CLEAN, 4, IDENTITY)
DIRTY_WORD = WorkerWord(0, b"boot", 1, True, DIRTY, 5, None)
NONE_WORD = WorkerWord(0, b"boot", 1, True, NONE, 0, None)
ASLEEP = EngineMark(sleeping=Sleeping(2, frozenset({"weights", "kv_cache"})))
LIMITS = HoldLimits(30.0, 4, 100)

ADMIT = GateDecision(DecisionKind.ADMIT, "", "", 0.0, Admission(True, "", IDENTITY))
HELD = GateDecision(
    DecisionKind.HOLD, "updating", "its weights are being updated (epoch 5)", 200.0, Admission(False, "", None)
)
CLOSED = GateDecision(DecisionKind.REFUSE, "quarantined", "torn", 0.0, Admission(False, "torn", None))


@pytest.mark.parametrize(
    ("words", "mark", "hold", "kind", "reason"),
    [
        ([CLEAN_WORD], EngineMark(), RequestHold(), DecisionKind.ADMIT, ""),
        ([CLEAN_WORD], EngineMark(), RequestHold(5, 101.0), DecisionKind.HOLD, "updating"),
        ([DIRTY_WORD], EngineMark(), RequestHold(5, 101.0), DecisionKind.HOLD, "updating"),
        ([NONE_WORD], EngineMark(), RequestHold(5, 101.0), DecisionKind.HOLD, "updating"),
        ([], EngineMark(), RequestHold(5, 101.0), DecisionKind.HOLD, "updating"),
        ([NONE_WORD], ASLEEP, RequestHold(5, 101.0), DecisionKind.HOLD, "updating"),
        ([DIRTY_WORD], EngineMark(), RequestHold(5, 100.0), DecisionKind.REFUSE, "quarantined"),
        ([CLEAN_WORD], EngineMark(), RequestHold(5, 100.0), DecisionKind.ADMIT, ""),
        ([CLEAN_WORD], EngineMark(), RequestHold(5, 100.0, True), DecisionKind.REFUSE, "quarantined"),
        ([CLEAN_WORD], EngineMark(), RequestHold(5, 500.0, True), DecisionKind.REFUSE, "quarantined"),
        ([DIRTY_WORD], EngineMark(), RequestHold(5, 500.0, True), DecisionKind.REFUSE, "quarantined"),
        ([DIRTY_WORD], EngineMark(), RequestHold(), DecisionKind.REFUSE, "quarantined"),
        ([CLEAN_WORD], ASLEEP, RequestHold(), DecisionKind.REFUSE, "asleep"),
        ([NONE_WORD], EngineMark(), RequestHold(), DecisionKind.REFUSE, "no_weights"),
        ([], EngineMark(), RequestHold(), DecisionKind.REFUSE, "no_weights"),
        ([replace(DIRTY_WORD, alive=False)], EngineMark(), RequestHold(5, 101.0), DecisionKind.REFUSE, "dead_worker"),
        (
            [CLEAN_WORD, replace(CLEAN_WORD, rank=1, identity=None)],
            EngineMark(),
            RequestHold(),
            DecisionKind.REFUSE,
            "quarantined",
        ),
        ([NONE_WORD], EngineMark(own_weights=True), RequestHold(), DecisionKind.ADMIT, ""),
    ],
)
def test_what_the_page_says_decides(
    words: list[WorkerWord], mark: EngineMark, hold: RequestHold, kind: DecisionKind, reason: str
) -> None:
    decision = decide(words, mark, hold, 100.0)
    assert (decision.kind, decision.reason) == (kind, reason)
    assert (decision.detail == "") == (kind is DecisionKind.ADMIT)
    assert (decision.until == hold.until) == (kind is DecisionKind.HOLD) or hold.until == 0.0


def test_who_was_first_goes_first_and_nobody_overtakes() -> None:
    queue, limits = Queue(), HoldLimits(30.0, 1000, 100)
    waiting = [queue.arrive(HELD, 0, 100.0, limits) for _ in range(3 * BATCH)]
    assert queue.turn(HELD, 101.0, limits) == []
    first = queue.turn(ADMIT, 102.0, limits)
    late = queue.arrive(ADMIT, 0, 102.0, limits)
    assert isinstance(late, RequestTicket), "the gate is open, and others are before it"
    told = [*first]
    while queue:
        told += queue.turn(ADMIT, 102.0, limits)
    assert [ticket for ticket, _ in told] == [*waiting, late]
    assert len(first) == BATCH
    assert all(decision is ADMIT for _, decision in told)
    for ticket, _ in told:
        assert not queue.empty, "one that has been called is still on its way in"
        queue.leave(ticket)
    assert queue.arrive(ADMIT, 10**9, 103.0, limits) is ADMIT, "nobody waits, so nothing is bounded"


def test_when_it_closes_again_the_rest_goes_on_waiting() -> None:
    queue, limits = Queue(), HoldLimits(30.0, 1000, 100)
    for _ in range(BATCH + 1):
        queue.arrive(HELD, 0, 100.0, limits)
    assert len(queue.turn(ADMIT, 101.0, limits)) == BATCH
    assert queue.turn(HELD, 101.0, limits) == []
    assert len(queue) == 1


def test_nobody_waits_longer_than_he_may() -> None:
    queue = Queue()
    queue.arrive(HELD, 0, 100.0, LIMITS)
    queue.arrive(HELD, 0, 110.0, LIMITS)
    assert queue.turn(HELD, 129.9, LIMITS) == []
    ((_, decision),) = queue.turn(HELD, 130.0, LIMITS)
    assert (decision.kind, decision.reason, decision.until) == (DecisionKind.REFUSE, "updating", 200.0)
    assert "has waited 30 s" in decision.detail
    assert len(queue) == 1


def test_all_are_refused_at_once_when_there_is_nothing_to_wait_for() -> None:
    queue, limits = Queue(), HoldLimits(30.0, 1000, 100)
    waiting = [queue.arrive(HELD, 0, 100.0, limits) for _ in range(3 * BATCH)]
    told = queue.turn(CLOSED, 101.0, limits)
    assert [ticket for ticket, _ in told] == waiting
    assert all(decision is CLOSED for _, decision in told)


def test_number_and_bytes_are_bounded_and_who_leaves_frees_his_place() -> None:
    queue = Queue()
    tickets = [queue.arrive(HELD, 20, 100.0, LIMITS) for _ in range(4)]
    full = queue.arrive(HELD, 0, 100.0, LIMITS)
    assert isinstance(full, GateDecision)
    assert (full.kind, full.reason, full.until) == (DecisionKind.REFUSE, "hold_full", 200.0)
    assert queue.full(LIMITS)
    assert isinstance(tickets[0], RequestTicket)
    queue.leave(tickets[0])
    queue.leave(tickets[0])
    assert queue.bytes == 60
    large = queue.arrive(HELD, 41, 100.0, LIMITS)
    assert isinstance(large, GateDecision)
    assert "100 bytes" in large.detail
    fits = queue.arrive(HELD, 30, 100.0, LIMITS)
    assert isinstance(fits, RequestTicket)
    assert queue.grow(fits, 30, HELD, LIMITS) is None, "as announced"
    assert queue.grow(fits, 40, HELD, LIMITS) is None
    assert queue.bytes == 100
    grown = queue.grow(fits, 41, HELD, LIMITS)
    assert isinstance(grown, GateDecision)
    assert grown.reason == "hold_full"


def test_without_seconds_nobody_waits() -> None:
    refused = Queue().arrive(HELD, 0, 100.0, HoldLimits(0.0, 10, 10))
    assert isinstance(refused, GateDecision)
    assert (refused.kind, refused.reason, refused.until) == (DecisionKind.REFUSE, "updating", 200.0)


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_the_bounds_hold_and_nobody_is_lost(seed: int) -> None:
    dice, queue, now = random.Random(seed), Queue(), 100.0
    waiting: list[RequestTicket] = []
    for _ in range(500):
        now += dice.random()
        decision = dice.choice((ADMIT, HELD, HELD, HELD, CLOSED)) if dice.random() < 0.3 else HELD
        match dice.randrange(4):
            case 0 | 1:
                answer = queue.arrive(decision, dice.randrange(50), now, LIMITS)
                if isinstance(answer, RequestTicket):
                    waiting.append(answer)
            case 2 if waiting:
                gone = waiting.pop(dice.randrange(len(waiting)))
                queue.leave(gone)
            case _:
                told = [ticket for ticket, _ in queue.turn(decision, now, LIMITS)]
                assert told == waiting[: len(told)]
                waiting = waiting[len(told) :]
                assert all(now < ticket.arrived + LIMITS.seconds for ticket in waiting)
        assert len(queue) == len(waiting) <= LIMITS.requests
        assert queue.bytes == sum(ticket.size for ticket in waiting) <= LIMITS.bytes


def test_the_page_keeps_the_hold_and_half_a_record_is_none(tmp_path) -> None:
    page = EnginePage(tmp_path / "page")
    assert page.held() == (RequestHold(), HoldLimits())
    hold, limits = RequestHold(7, 123.5, True), HoldLimits(12.5, 3, 2**40)
    page.hold(hold, limits)
    before = page.raw()
    page.claim(0, 1)
    assert EnginePage(tmp_path / "page").held() == (hold, limits)
    page.mark(EngineMark(own_weights=True))
    assert page.held() == (hold, limits)
    page.hold(RequestHold(8, 124.5), limits)
    assert page.raw() != before, "who compares the page sees it"
    with open(tmp_path / "page", "r+b") as file:
        file.seek(130)
        file.write(b"\x77")
    assert page.held() == (RequestHold(), HoldLimits())
