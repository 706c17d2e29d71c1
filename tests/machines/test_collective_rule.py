"""Who is updated by a collective, and what is said of it."""

from __future__ import annotations

import pytest

from ckpt_engine.machines.manager.relay_or_collective import CollectiveCandidate, collective_decision

READS, BY_RELAY, CUT_OFF = (
    CollectiveCandidate(True, False),
    CollectiveCandidate(False, True),
    CollectiveCandidate(False, False),
)
CANNOT = CollectiveCandidate(False, False, "cannot use nccl")


def test_a_replica_that_has_no_other_way_is_updated_by_one() -> None:
    decision = collective_decision(False, False, False, {"a": READS, "b": BY_RELAY, "d": CUT_OFF, "c": CUT_OFF})
    assert decision.replicas == ("c", "d")
    assert decision.why == ("c and d are updated by a collective: nothing else brings weights there, and no relay")


def test_all_that_can_take_part_if_it_is_asked_for() -> None:
    decision = collective_decision(True, False, False, {"a": READS, "b": BY_RELAY, "c": CANNOT})
    assert decision.replicas == ("a", "b")
    assert decision.why.startswith("a and b are updated by a collective")
    assert decision.why.endswith("c cannot use nccl")


@pytest.mark.parametrize(
    ("collective_only", "until_held", "is_late", "candidates", "why"),
    [
        (True, False, True, {"a": CUT_OFF}, "a late replica is brought up without the others"),
        (True, True, False, {"a": CUT_OFF}, "the trainer goes on when relays hold the version"),
        (False, False, False, {"a": READS, "b": BY_RELAY}, "every replica reads the weights itself or has a relay"),
        (False, False, False, {"a": READS, "b": CANNOT}, "b cannot use nccl"),
        (True, False, False, {"b": CANNOT}, "b cannot use nccl"),
        (True, False, False, {}, "no replica lacks the version"),
    ],
)
def test_nobody(
    collective_only: bool, until_held: bool, is_late: bool, candidates: dict[str, CollectiveCandidate], why: str
) -> None:
    assert collective_decision(collective_only, until_held, is_late, candidates) == ((), f"no collective: {why}")
