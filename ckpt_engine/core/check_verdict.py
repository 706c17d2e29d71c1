"""What the check of an engine's version asks, and when it has passed. Pure.

Two versions of made weights, A and B, are each brought by the engine's own loader and by an install of ours, in the
order of ROUNDS, so that each of ours comes over the other version: what an install leaves behind of the version before
(a derived tensor, a cache) shows. After each round the engine is asked for the log-probabilities of PROMPT and of the
tokens that it goes on with. Equal tokens alone would prove little: they repeat.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

PROMPT = tuple((37 * place + 11) % 89 + 5 for place in range(40))
"""Token ids that every vocabulary has."""

CONTINUED = 8
"""Tokens that the engine is asked to go on with, greedily."""

SHARE = 0.01
"""Of what tells A from B, the most by which two scores of one version may differ: kernels that add in no fixed order
give differences far below, a tensor with other values far above."""


@dataclass(frozen=True)
class Round:
    """One version brought in one way."""

    seed: int  # 1: version A, 2: version B
    by_engine: bool  # by the engine's own loader; else by an install of ours


ROUNDS = (Round(1, True), Round(2, False), Round(2, True), Round(1, False))


@dataclass(frozen=True)
class Score:
    """What an engine says of PROMPT. Natural logarithms of probabilities."""

    prompt: tuple[float, ...]  # of each token of the prompt but the first
    tokens: tuple[int, ...]  # that it went on with
    chosen: tuple[float, ...]  # of each of these


def failure(scores: Sequence[Score]) -> str:
    """Why the check has failed, for people; empty: it has passed. scores: one a round, in the order of ROUNDS."""
    if any(not math.isfinite(value) for score in scores for value in (*score.prompt, *score.chosen)):
        return "made weights give log-probabilities that are no numbers, so nothing can be compared"
    if (
        len({(len(score.prompt), len(score.tokens), len(score.chosen)) for score in scores}) != 1
        or not scores[0].prompt
    ):
        return "the engine told different numbers of log-probabilities for one prompt"
    by_engine = {each.seed: score for each, score in zip(ROUNDS, scores, strict=True) if each.by_engine}
    control = _difference(*by_engine.values())
    if control < 1e-3:
        return f"two versions of made weights give the same log-probabilities (to {control:.1e}): nothing is compared"
    for each, score in zip(ROUNDS, scores, strict=True):
        found = 0.0 if each.by_engine else _difference(score, by_engine[each.seed])
        if found > SHARE * control:
            return (
                f"after an install of ours its log-probabilities differ by up to {found:.3g} from those after its own "
                f"loader brought the same weights (two versions differ by {control:.3g})"
            )
    return ""


def _difference(one: Score, other: Score) -> float:
    """The largest difference of two scores, as far as both went on with the same tokens."""
    pairs = [*zip(one.prompt, other.prompt, strict=True)]
    for token, other_token, value, other_value in zip(one.tokens, other.tokens, one.chosen, other.chosen, strict=True):
        pairs.append((value, other_value))  # the first that parts has two near values, or it would not have parted
        if token != other_token:
            break
    return max(abs(first - second) for first, second in pairs)
