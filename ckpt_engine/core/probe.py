"""Compares log-probabilities of the same tokens, and names the cause of what a version's probe has found. Pure.

It asks nothing and decides nothing about a deployment: agents compare what their engines answer (`machines/agent`), the
manager names the cause from what all of them found, and a bound that is broken is a deployment's to judge
(`machines/manager/deploy.py`).

A difference is the trainer's value minus the engine's, in nats. What was installed is proved to be what was sealed. So
a difference says how they compute, or what an engine has cached, and never that bytes were lost on the way.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ckpt_engine.core.check_verdict import Score
from ckpt_engine.core.enums import enum_word
from ckpt_engine.core.names import some
from ckpt_engine.core.problems import invalid
from ckpt_engine.v1 import manager_pb2, weights_pb2

MOST_SEQUENCES = 256
"""Sequences of one probe, at most."""

MOST_TOKENS = 1 << 17
"""Tokens of one probe, at most, of all sequences together."""

CONTINUED = 8
"""Tokens that an engine is asked to continue each sequence with, to see what its caches do."""

BOUNDS = ("mean", "p99", "largest", "kl", "clipped", "flips")
"""The figures that may have a bound."""

APART = 3.0
"""So many times the smallest mean difference of all replicas, and a replica's own is not the same as theirs."""

FEWEST_GUESSES = 64
"""Guesses of a draft from which their accepted share says something."""

DRAFT_SHARE = 0.5
"""The share of the acceptance before, below which a draft does not fit its target any more."""

_MOST_EXPONENT = 60.0  # exp of more says nothing further, and overflows in the end

Finding = manager_pb2.ProbeFinding


@dataclass(frozen=True)
class EngineScores:
    """An engine's answer to a probe under one version."""

    sequences: tuple[tuple[int, ...], ...]  # token ids that it was asked for
    scores: tuple[Score, ...]  # one a sequence, without caches


@dataclass(frozen=True)
class ProbeFinding:
    """A cause of what a version's probe has found (docs/probe.md)."""

    cause: str  # "all", "replica", "cache", "draft", "unknown" (one replica answered: "all" or "replica") or "silent"
    replicas: tuple[str, ...]  # on which, by name
    reason: str  # in words, with the figures

    @classmethod
    def of(cls, message: manager_pb2.ProbeFinding) -> ProbeFinding:
        """Reads it from a message."""
        return cls(enum_word(manager_pb2.ProbeFinding.Cause, message.cause), tuple(message.replicas), message.reason)

    def __str__(self) -> str:
        return f"probe ({self.cause}): {some(self.replicas)}: {self.reason}"


def check_scores(scores: manager_pb2.ProbeScores) -> None:
    """Raises INVALID_ARGUMENT, naming the sequence, for scores of which the shape is wrong."""
    if not 1 <= len(scores.sequences) <= MOST_SEQUENCES:
        raise invalid(f"a probe has 1 to {MOST_SEQUENCES} sequences, not {len(scores.sequences)}")
    if (tokens := sum(len(each.tokens) for each in scores.sequences)) > MOST_TOKENS:
        raise invalid(f"the sequences of a probe have at most {MOST_TOKENS} tokens together, not {tokens}")
    for number, each in enumerate(scores.sequences):
        places = len(each.tokens) - 1
        if places < 1:
            raise invalid(f"sequence {number} of the probe has {len(each.tokens)} tokens: it needs two or more")
        if len(each.log_probabilities) != places:
            raise invalid(
                f"sequence {number} of the probe has {len(each.tokens)} tokens and {len(each.log_probabilities)} "
                f"log-probabilities: give {places}, one for each token but the first"
            )
        if each.top and len(each.top) != places:
            raise invalid(
                f"sequence {number} of the probe names {len(each.top)} likeliest tokens: give {places}, or none"
            )


def figures(
    ours: Sequence[float],
    engine: Sequence[float],
    our_top: Sequence[int] = (),
    engine_top: Sequence[int] = (),
    clip: float = 0.2,
) -> manager_pb2.ProbeFigures:
    """The figures of two lists of log-probabilities, in the same order. ours, engine: finite. our_top, engine_top: the
    likeliest tokens at these places; empty: not known.

    Raises ValueError if lists that are to be compared have different lengths, or are empty.
    """
    differences = [one - other for one, other in zip(ours, engine, strict=True)]
    if not differences:
        raise ValueError("no log-probabilities are compared")
    sizes = sorted(map(abs, differences))
    count = len(sizes)
    found = manager_pb2.ProbeFigures(
        tokens=count,
        mean=min(math.fsum(sizes) / count, sizes[-1]),  # which rounding could pass
        p99=sizes[math.ceil(0.99 * count) - 1],
        largest=sizes[-1],
        kl=math.fsum(map(_k3, differences)) / count,
        clipped=sum(not 1 - clip <= math.exp(min(each, _MOST_EXPONENT)) <= 1 + clip for each in differences) / count,
    )
    if our_top and engine_top:
        found.flips = sum(one != other for one, other in zip(our_top, engine_top, strict=True)) / len(our_top)
    return found


def _k3(difference: float) -> float:
    """exp(d) - 1 - d, which is 0 at 0 and positive elsewhere."""
    return max(0.0, math.expm1(min(difference, _MOST_EXPONENT)) - difference)


def against_trainer(scores: manager_pb2.ProbeScores, answers: Sequence[Score]) -> manager_pb2.ProbeFigures:
    """The figures of an engine's answers, one a sequence. Raises ValueError, saying what is wrong with an answer."""
    ours: list[float] = []
    engine: list[float] = []
    our_top: list[int] = []
    engine_top: list[int] = []
    has_top = all(each.top for each in scores.sequences) and all(each.top for each in answers)
    for number, (sequence, answer) in enumerate(zip(scores.sequences, answers, strict=True)):
        if len(answer.prompt) != len(sequence.log_probabilities):
            raise ValueError(
                f"it told {len(answer.prompt)} log-probabilities of sequence {number}, which has "
                f"{len(sequence.log_probabilities)} tokens after the first"
            )
        _check_numbers("the trainer", number, sequence.log_probabilities)
        _check_numbers("it", number, answer.prompt)
        ours += sequence.log_probabilities
        engine += answer.prompt
        if has_top:
            our_top += sequence.top
            engine_top += answer.top
    return figures(ours, engine, our_top, engine_top, scores.clip)


def over_cache(fresh: Sequence[Score], cached: Sequence[Score], clip: float) -> manager_pb2.ProbeFigures:
    """The figures of an engine's continuations over what it has cached, against those without. They are compared as far
    as both have the same beginning. Raises ValueError, saying what is wrong with an answer."""
    pairs: list[tuple[float, float]] = []
    flips = 0
    for number, (one, other) in enumerate(zip(fresh, cached, strict=True)):
        if not len(one.tokens) == len(one.chosen) == len(other.tokens) == len(other.chosen) or not one.tokens:
            raise ValueError(f"it continued sequence {number} with different numbers of tokens")
        _check_numbers("it", number, (*one.chosen, *other.chosen))
        for token, other_token, value, other_value in zip(
            one.tokens, other.tokens, one.chosen, other.chosen, strict=True
        ):
            pairs.append((value, other_value))
            if token != other_token:
                flips += 1
                break
    found = figures([one for one, _ in pairs], [other for _, other in pairs], clip=clip)
    found.flips = flips / len(pairs)
    return found


def _check_numbers(what: str, number: int, values: Sequence[float]) -> None:
    """what: the source of the values, for people."""
    wrong = [value for value in values if not math.isfinite(value)]
    if wrong:
        raise ValueError(f"{what} told the log-probability {wrong[0]} in sequence {number}, which is not finite")


def known_figures(found: manager_pb2.ProbeFigures) -> dict[str, float]:
    """The figures that may have a bound, by name: all but the flips, which are only known if both sides tell them."""
    return {name: getattr(found, name) for name in BOUNDS if name != "flips" or found.HasField("flips")}


def broken_bounds(found: manager_pb2.ProbeFigures, bounds: manager_pb2.ProbeBounds) -> list[str]:
    """The bounds that figures break, for people. A figure that is not known breaks none."""
    limits = {name: getattr(bounds, name) for name in BOUNDS if bounds.HasField(name)}
    values = {name: value for name, value in known_figures(found).items() if name in limits}
    return [f"{name} {value:.3g} above {limits[name]:.3g}" for name, value in values.items() if value > limits[name]]


def accepted_share(guesses: manager_pb2.Guesses | None) -> float | None:
    """The share of a draft's guesses that were accepted; None: there is no draft, or it has guessed too little."""
    if guesses is None or guesses.guessed < FEWEST_GUESSES:
        return None
    return guesses.accepted / guesses.guessed


def is_bad(answer: manager_pb2.ProbeAnswer) -> bool:
    """Whether an answer breaks a bound, or is none."""
    return bool(answer.broken or answer.broken_cached or answer.HasField("problem"))


def excuses_engine(answer: manager_pb2.ProbeAnswer) -> bool:
    """Whether there is no answer since questions were not asked, or were cut short: that is no fault of the engine."""
    return answer.problem.code == weights_pb2.Problem.CODE_ABORTED


def why_bad(answer: manager_pb2.ProbeAnswer) -> str:
    """What is wrong with an answer, for people; empty: nothing."""
    if excuses_engine(answer):
        return f"its engine was not asked to the end: {answer.problem.message}"
    if answer.HasField("problem"):
        return f"its engine did not answer the probe: {answer.problem.message}"
    if answer.broken:
        return f"the probe's {'; '.join(answer.broken)}"
    return f"over its caches the probe's {'; '.join(answer.broken_cached)}" if answer.broken_cached else ""


def answer_words(answer: manager_pb2.ProbeAnswer) -> str:
    """An answer in one line, for people: its figures, those under the version before, and what is wrong with it."""
    if answer.HasField("problem"):
        return f"no answer: {answer.problem.message}"
    words = f"{_figure_words(answer.engine)}, over caches {_figure_words(answer.cached)}"
    if answer.HasField("before"):
        words += f", under the version before {_figure_words(answer.before)}"
    if answer.HasField("accepted"):
        words += f", {answer.accepted:.0%} of the draft's guesses accepted"
    wrong = [*answer.broken, *(f"over caches {each}" for each in answer.broken_cached)]
    return f"{words}; {', '.join(wrong)}" if wrong else words


def _figure_words(found: manager_pb2.ProbeFigures) -> str:
    flips = f", {found.flips:.1%} flips" if found.HasField("flips") else ""
    return f"mean {found.mean:.2g} (p99 {found.p99:.2g}, largest {found.largest:.2g}, KL {found.kl:.2g}{flips})"


def findings(answers: Mapping[str, manager_pb2.ProbeAnswer]) -> list[Finding]:
    """The causes of what replicas answered, by name. None: everything is within the bounds."""
    found = []
    replies = {name: answer for name, answer in answers.items() if not answer.HasField("problem")}
    bad = sorted(name for name, answer in replies.items() if answer.broken)
    if bad:
        found += _where(replies, bad)
    if stale := sorted(name for name, answer in replies.items() if answer.broken_cached):
        figures_of_first = ", ".join(replies[stale[0]].broken_cached)
        reason = f"beginnings of requests of older weights: over its caches {figures_of_first} away from itself without"
        found.append(_finding(Finding.CAUSE_CACHE, stale, reason))
    if misfits := sorted(name for name, answer in replies.items() if name not in bad and _draft_misfits(answer)):
        answer = replies[misfits[0]]
        shares = f"{answer.accepted:.0%} of its guesses are accepted, {answer.accepted_before:.0%} before"
        found.append(_finding(Finding.CAUSE_DRAFT, misfits, f"its draft does not fit this version: {shares}"))
    if silent := sorted(answers.keys() - replies.keys()):
        found.append(_finding(Finding.CAUSE_SILENT, silent, answers[silent[0]].problem.message))
    return found


def _where(replies: Mapping[str, manager_pb2.ProbeAnswer], bad: Sequence[str]) -> list[Finding]:
    """Whether differences are the same on all replicas or lie with some of them."""
    broken = {name: ", ".join(replies[name].broken) for name in bad}
    if len(replies) == 1:
        why = "one replica answered, so what all replicas compute and what this one does cannot be told apart"
        return [_finding(Finding.CAUSE_UNKNOWN, bad, f"{broken[bad[0]]}; {why}")]
    place = "a kernel, a device or weights in memory"
    if len(bad) < len(replies):
        fine = some(sorted(replies.keys() - broken.keys()))
        return [_finding(Finding.CAUSE_REPLICA, bad, f"{place}: {broken[bad[0]]}; within the bounds: {fine}")]
    smallest = min(replies[name].engine.mean for name in bad)
    apart = [name for name in bad if replies[name].engine.mean > APART * smallest]
    alike = [name for name in bad if name not in apart]
    reason = f"numerics, such as dtype, quantisation or kernels of the engine: {broken[alike[0]]}"
    found = [_finding(Finding.CAUSE_ALL, bad, reason)]
    if apart:
        found.append(_finding(Finding.CAUSE_REPLICA, apart, f"{place}: {broken[apart[0]]}; far less: {some(alike)}"))
    return found


def _draft_misfits(answer: manager_pb2.ProbeAnswer) -> bool:
    known = answer.HasField("accepted") and answer.HasField("accepted_before")
    return known and answer.accepted < DRAFT_SHARE * answer.accepted_before


def _finding(cause: Finding.Cause, replicas: Sequence[str], reason: str) -> Finding:
    return Finding(cause=cause, replicas=replicas, reason=reason)
