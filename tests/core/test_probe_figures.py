"""The figures of two lists of log-probabilities, bounds, and which cause they have."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_engine.core.check_verdict import Score
from ckpt_engine.core.probe import (
    against_trainer,
    answer_words,
    broken_bounds,
    check_scores,
    figures,
    findings,
    is_bad,
    over_cache,
    why_bad,
)
from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.v1 import manager_pb2, weights_pb2

Finding = manager_pb2.ProbeFinding
BOUNDS = manager_pb2.ProbeBounds(mean=0.1)
VALUE = st.floats(-40.0, 0.0)
PAIRS = st.lists(st.tuples(VALUE, VALUE), min_size=1, max_size=200)


@given(PAIRS)
def test_figures_are_ordered_and_have_the_sign_of_their_kind(pairs: list[tuple[float, float]]) -> None:
    ours, engine = zip(*pairs, strict=True)
    found = figures(ours, engine)
    assert found.tokens == len(pairs)
    assert 0 <= found.mean <= found.largest
    assert 0 <= found.p99 <= found.largest
    assert found.kl >= 0
    assert 0 <= found.clipped <= 1
    assert found.mean == pytest.approx(figures(engine, ours).mean), "sizes have no side"
    assert sum(abs(one - other) <= found.p99 for one, other in pairs) >= 0.99 * len(pairs)


@given(st.lists(VALUE, min_size=1, max_size=50))
def test_equal_lists_differ_in_nothing(values: list[float]) -> None:
    found = figures(values, values, [1] * len(values), [1] * len(values))
    assert (found.mean, found.p99, found.largest, found.kl, found.clipped, found.flips) == (0,) * 6
    assert not broken_bounds(found, manager_pb2.ProbeBounds(mean=0, p99=0, largest=0, kl=0, clipped=0, flips=0))


@given(PAIRS, st.randoms(use_true_random=False))
def test_the_order_of_tokens_says_nothing(pairs: list[tuple[float, float]], random: object) -> None:
    shuffled = sorted(pairs, key=lambda _: random.random())  # type: ignore[attr-defined]
    one = figures(*zip(*pairs, strict=True))
    assert one == figures(*zip(*shuffled, strict=True))


def test_each_figure_by_hand() -> None:
    ours, engine = [-1.0, -2.0, -3.0, -4.0], [-1.0, -2.5, -2.9, -4.0]
    found = figures(ours, engine, [1, 2, 3, 4], [1, 2, 9, 4], clip=0.2)
    assert found.mean == pytest.approx(0.15)
    assert found.p99 == found.largest == pytest.approx(0.5)
    assert found.kl == pytest.approx((math.exp(0.5) - 1 - 0.5 + math.exp(-0.1) - 1 + 0.1) / 4)
    assert found.clipped == 0.25, "exp(0.5) is 1.65, exp(-0.1) is 0.90"
    assert found.flips == 0.25
    assert not figures(ours, engine).HasField("flips"), "a side that tells no likeliest tokens counts none"
    assert broken_bounds(found, manager_pb2.ProbeBounds(mean=0.1, kl=1.0, flips=0.2)) == [
        "mean 0.15 above 0.1",
        "flips 0.25 above 0.2",
    ]
    assert not broken_bounds(figures(ours, engine), manager_pb2.ProbeBounds(flips=0.0))


def test_a_difference_beyond_all_measure_is_still_a_number() -> None:
    found = figures([0.0], [-1e6])
    assert math.isfinite(found.kl)
    assert found.clipped == 1
    assert figures([-1e6], [0.0]).kl == pytest.approx(1e6)


SCORES = manager_pb2.ProbeScores(
    sequences=[manager_pb2.ProbeSequence(tokens=[1, 2, 3], log_probabilities=[-1.0, -2.0], top=[2, 7])],
    bounds=BOUNDS,
    clip=0.2,
)
ANSWER = Score((-1.0, -2.0), (4, 5), (-0.5, -0.6), (2, 7))


def test_an_engine_that_computes_the_same_differs_in_nothing() -> None:
    check_scores(SCORES)
    found = against_trainer(SCORES, [ANSWER])
    assert (found.tokens, found.mean, found.flips) == (2, 0, 0)
    assert not against_trainer(SCORES, [replace(ANSWER, top=())]).HasField("flips")


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (replace(ANSWER, prompt=(-1.0,)), "1 log-probabilities of sequence 0, which has 2"),
        (replace(ANSWER, prompt=(-1.0, math.nan)), "it told the log-probability nan in sequence 0"),
        (replace(ANSWER, prompt=(-1.0, -math.inf)), "-inf"),
    ],
)
def test_an_answer_that_is_none_is_said_to_be_one(answer: Score, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        against_trainer(SCORES, [answer])


def test_a_trainer_whose_scores_are_no_numbers_is_blamed_itself() -> None:
    scores = manager_pb2.ProbeScores()
    scores.CopyFrom(SCORES)
    scores.sequences[0].log_probabilities[0] = math.nan
    with pytest.raises(ValueError, match="the trainer told the log-probability nan"):
        against_trainer(scores, [ANSWER])


@pytest.mark.parametrize(
    ("sequences", "words"),
    [
        ([], "1 to 256 sequences, not 0"),
        ([manager_pb2.ProbeSequence(tokens=[1])], "has 1 tokens: it needs two"),
        ([manager_pb2.ProbeSequence(tokens=[1, 2], log_probabilities=[-1, -1])], "give 1, one for each token but"),
        ([manager_pb2.ProbeSequence(tokens=[1, 2], log_probabilities=[-1], top=[1, 2])], "2 likeliest tokens: give 1"),
        ([manager_pb2.ProbeSequence(tokens=[1] * 70_000, log_probabilities=[-1] * 69_999)] * 2, "at most 131072"),
    ],
)
def test_scores_of_a_wrong_shape_are_refused(sequences: list[manager_pb2.ProbeSequence], words: str) -> None:
    with pytest.raises(CkptEngineError, match=words):
        check_scores(manager_pb2.ProbeScores(sequences=sequences))


def test_continuations_are_compared_as_far_as_they_have_the_same_beginning() -> None:
    other = Score((), (4, 9), (-0.5, -0.7))
    found = over_cache([ANSWER], [other], 0.2)
    assert (found.tokens, found.flips) == (2, 0.5)
    assert found.largest == pytest.approx(0.1)
    torn = over_cache([ANSWER], [Score((), (9, 9), (-3.5, -9.0))], 0.2)
    assert (torn.tokens, torn.largest) == (1, 3.0), "what follows another token is another text"
    with pytest.raises(ValueError, match="different numbers of tokens"):
        over_cache([ANSWER], [Score((), (4,), (-0.5,))], 0.2)


def answer(mean: float = 0.0, cached: float = 0.0, **rest: float) -> manager_pb2.ProbeAnswer:
    """Of an engine that lies so far from the trainer, and over its caches from itself."""
    found = manager_pb2.ProbeAnswer(
        engine=manager_pb2.ProbeFigures(mean=mean), cached=manager_pb2.ProbeFigures(mean=cached), **rest
    )
    found.broken.extend(broken_bounds(found.engine, BOUNDS))
    found.broken_cached.extend(broken_bounds(found.cached, BOUNDS))
    return found


SILENT = manager_pb2.ProbeAnswer(problem=weights_pb2.Problem(message="its engine said nothing for 30 s"))
FIT = answer(accepted_before=0.8, accepted=0.75)
STALE_DRAFT = answer(accepted_before=0.8, accepted=0.1)


@pytest.mark.parametrize(
    ("answers", "causes"),
    [
        ([answer(), answer(0.05)], []),
        ([FIT, FIT], []),
        ([answer(0.3), answer(0.4), answer(0.35)], [(Finding.CAUSE_ALL, "abc")]),
        ([answer(), answer(0.4), answer(0.01)], [(Finding.CAUSE_REPLICA, "b")]),
        ([answer(0.2), answer(2.0), answer(0.21)], [(Finding.CAUSE_ALL, "abc"), (Finding.CAUSE_REPLICA, "b")]),
        ([answer(0.2)], [(Finding.CAUSE_UNKNOWN, "a")]),
        ([answer(0.2), SILENT], [(Finding.CAUSE_UNKNOWN, "a"), (Finding.CAUSE_SILENT, "b")]),
        ([answer(), answer(0.0, 0.9)], [(Finding.CAUSE_CACHE, "b")]),
        ([answer(), answer(1.0, 0.9)], [(Finding.CAUSE_REPLICA, "b"), (Finding.CAUSE_CACHE, "b")]),
        ([STALE_DRAFT, FIT], [(Finding.CAUSE_DRAFT, "a")]),
        ([SILENT, SILENT], [(Finding.CAUSE_SILENT, "ab")]),
    ],
)
def test_each_cause_has_its_name(
    answers: list[manager_pb2.ProbeAnswer], causes: list[tuple[Finding.Cause, str]]
) -> None:
    found = findings(dict(zip("abc", answers, strict=False)))
    assert [(each.cause, "".join(each.replicas)) for each in found] == causes
    assert all(each.reason for each in found)


@given(st.lists(st.floats(0, 3), min_size=1, max_size=6))
def test_findings_name_all_that_is_bad_and_nothing_else(means: list[float]) -> None:
    answers = {str(number): answer(mean) for number, mean in enumerate(means)}
    named = {name for each in findings(answers) for name in each.replicas}
    assert named == {name for name, each in answers.items() if is_bad(each)}


def test_words_for_an_answer() -> None:
    assert why_bad(answer()) == ""
    assert why_bad(answer(0.3)) == "the probe's mean 0.3 above 0.1"
    assert "said nothing" in why_bad(SILENT)
    assert "over its caches" in why_bad(answer(0.0, 0.3))
    assert "mean 0.3" in answer_words(answer(0.3))
    assert answer_words(SILENT) == "no answer: its engine said nothing for 30 s"
