"""What a trainer gives to have each version probed: fixed sequences of token ids, and a function that scores them.

It checks what is given and makes the message. It scores nothing itself, asks no engine, and touches neither weights nor
loss: a function for models of transformers is in `integrations/scoring.py`, what figures mean is in `core/probe.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from ckpt_engine.core.arguments import whole
from ckpt_engine.core.deadlines import check_seconds
from ckpt_engine.core.probe import BOUNDS, check_scores
from ckpt_engine.core.problems import invalid
from ckpt_engine.v1 import manager_pb2

MOST_TOKEN = 1 << 32


class TokenScores(NamedTuple):
    """The scores of one sequence."""

    log_probabilities: Sequence[float]  # natural, of each token but the first, given those before it
    top: Sequence[int] = ()  # the likeliest token at each of these places; empty: not told, so no flips are counted


Score: TypeAlias = Callable[[Sequence[Sequence[int]]], Sequence[Sequence[float] | TokenScores]]
"""Scores sequences under the weights as they are now: one TokenScores each, or only its log-probabilities."""


@dataclass(frozen=True)
class Probe:
    """A probe of each version (docs/probe.md). What a figure may be at most is None where it has no bound."""

    sequences: Sequence[Sequence[int]]  # of token ids, two or more each; longer than a block of the engines' caches
    score: Score  # every rank calls it, at each update, on the thread that trains; the lowest rank's result counts
    mean: float | None = 0.1  # of the mean difference of log-probabilities, nats
    p99: float | None = None  # of the difference that 99 of 100 tokens do not exceed, nats
    largest: float | None = None  # of the largest difference, nats
    kl: float | None = 0.05  # of the k3 estimate of the divergence, nats
    clipped: float | None = None  # of the share of tokens with a ratio of probabilities outside of the clip
    flips: float | None = None  # of the share of places where another token is the likeliest
    clip: float = 0.2  # ratios from 1 - clip to 1 + clip are inside
    seconds: float = 30.0  # for all questions to one replica together, after its pause

    def __post_init__(self) -> None:
        if not callable(self.score):
            raise invalid(f"the probe's score must be a function of the sequences, not {self.score!r}")
        for name in BOUNDS:
            bound = getattr(self, name)
            if bound is not None and not (_number(bound) and 0 <= bound < float("inf")):
                raise invalid(f"the probe's {name} {bound!r} must be a number from 0 on, or None")
        if not (_number(self.clip) and 0 < self.clip < 1):
            raise invalid(f"the probe's clip {self.clip!r} must be above 0 and below 1")
        check_seconds("the probe's seconds", self.seconds)
        for number, sequence in enumerate(self.sequences):
            if isinstance(sequence, str) or not isinstance(sequence, Iterable):
                raise invalid(
                    f"sequence {number} of the probe must be token ids, and has {sequence!r}: give a list of them"
                )
            wrong = [token for token in sequence if not (whole(token) and 0 <= token < MOST_TOKEN)]
            if wrong:
                raise invalid(f"sequence {number} of the probe must be token ids, and has {wrong[0]!r}")
        zeros = [TokenScores((0.0,) * (len(each) - 1)) for each in self.sequences]
        check_scores(self._message(zeros))

    def scores(self) -> manager_pb2.ProbeScores:
        """Scores the sequences now. Raises INVALID_ARGUMENT, naming the sequence, if the result does not fit them."""
        results = list(self.score(self.sequences))
        if len(results) != len(self.sequences):
            raise invalid(f"the probe's score returned {len(results)} results for {len(self.sequences)} sequences")
        scores = self._message([each if isinstance(each, TokenScores) else TokenScores(each) for each in results])
        check_scores(scores)
        return scores

    def _message(self, results: Sequence[TokenScores]) -> manager_pb2.ProbeScores:
        message = manager_pb2.ProbeScores(clip=self.clip, seconds=self.seconds)
        for name in BOUNDS:
            if (bound := getattr(self, name)) is not None:
                setattr(message.bounds, name, bound)
        for number, (tokens, result) in enumerate(zip(self.sequences, results, strict=True)):
            try:
                values, top = list(map(float, result.log_probabilities)), list(map(int, result.top))
            except (TypeError, ValueError) as error:
                raise invalid(f"the probe's score of sequence {number} must be numbers: {error}") from error
            message.sequences.add(tokens=list(map(int, tokens)), log_probabilities=values, top=top)
        return message


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
