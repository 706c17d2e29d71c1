"""What the check of an engine's version asks, and when it passes. Pure.

Two versions of made-up weights, A and B, are each loaded by the engine's own loader and by ckpt-engine's install, in
the order of ROUNDS. So each install of ours replaces the other version, and whatever it leaves of that (a derived
tensor, a cache) shows. After each round the engine is asked for the log-probabilities of PROMPT and of the tokens that
it continues with. Equal tokens alone would prove little: they repeat."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

PROMPT = tuple((37 * place + 11) % 89 + 5 for place in range(40))
"""Token ids that every vocabulary has."""

CONTINUED = 8
"""Tokens that the engine is asked to continue with, greedily."""

SHARE = 0.01
"""The most by which two scores of one version may differ, as a share of the difference between A and B. Kernels that
add in no fixed order give far smaller differences; a tensor with wrong values gives far larger ones."""


@dataclass(frozen=True)
class Round:
    """One version, loaded in one way."""

    seed: int  # 1: version A, 2: version B
    by_engine: bool  # by the engine's own loader; else by ckpt-engine's install


ROUNDS = (Round(1, True), Round(2, False), Round(2, True), Round(1, False))


@dataclass(frozen=True)
class Score:
    """An engine's answer to a sequence of token ids, as natural logarithms of probabilities."""

    prompt: tuple[float, ...]  # of each token of the sequence but the first; empty if they were not asked for
    tokens: tuple[int, ...]  # its continuation
    chosen: tuple[float, ...]  # of each of these tokens
    top: tuple[int, ...] = ()  # the likeliest token at each place of `prompt`; empty: the engine does not tell


def failure(scores: Sequence[Score]) -> str:
    """Why the check failed, for people; empty: it passed. scores: one a round, in the order of ROUNDS."""
    if any(not math.isfinite(value) for score in scores for value in (*score.prompt, *score.chosen)):
        return "made-up weights give log-probabilities that are not numbers, so nothing can be compared"
    if (
        len({(len(score.prompt), len(score.tokens), len(score.chosen)) for score in scores}) != 1
        or not scores[0].prompt
    ):
        return "the engine told different numbers of log-probabilities for one prompt"
    by_engine = {each.seed: score for each, score in zip(ROUNDS, scores, strict=True) if each.by_engine}
    control = _difference(*by_engine.values())
    if control < 1e-3:
        return (
            f"two versions of made-up weights give the same log-probabilities (to {control:.1e}): nothing is compared"
        )
    for each, score in zip(ROUNDS, scores, strict=True):
        found = 0.0 if each.by_engine else _difference(score, by_engine[each.seed])
        if found > SHARE * control:
            return (
                f"after ckpt-engine's install its log-probabilities differ by up to {found:.3g} from "
                f"those after its own loader brought the same weights (two versions differ by {control:.3g})"
            )
    return ""


def _difference(one: Score, other: Score) -> float:
    """The largest difference of two scores, as far as both continue with the same tokens."""
    pairs = [*zip(one.prompt, other.prompt, strict=True)]
    for token, other_token, value, other_value in zip(one.tokens, other.tokens, one.chosen, other.chosen, strict=True):
        pairs.append((value, other_value))  # the first token that differs has two near values, or it would not differ
        if token != other_token:
            break
    return max(abs(first - second) for first, second in pairs)
