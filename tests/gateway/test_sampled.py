"""Samples of interrupted requests are distributed as those of others: temperature 1, n = 4, by two tests.

All seeds are fixed, so each test comes out alike every time. The engine draws as the reference engine does, of logits
that depend on every token before; a stand-in, since thousands of answers are needed.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from ckpt_engine.gateway import single
from ckpt_engine.gateway.stitching import Stitch
from ckpt_engine_adapters.reference.sampling import choose
from ckpt_engine_adapters.vllm import fields
from ckpt_engine_adapters.vllm.completions import Completions

SAMPLES, TOKENS, REQUESTS, VOCABULARY = 4, 3, 200, 4
Answer = tuple[tuple[int, ...], ...]
"""The tokens of each sample of one request."""
SEEDS = range(0, 1000 * REQUESTS, 1000)
OTHER_SEEDS = range(500, 1000 * REQUESTS, 1000)
"""Far from each other: sample number k has its request's seed plus k, as in vLLM; equal seeds draw equal samples."""


@functools.cache
def logits(context: tuple[int, ...]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(int.from_bytes(bytes(context), "big"))
    return torch.randn(VOCABULARY, generator=generator)


def answers(seeds: Sequence[int], cuts: Callable[[int], Sequence[int]]) -> list[Answer]:
    """One request for each seed. cuts: how many tokens each leg of sample number k brings before it breaks off."""
    found = []
    for seed in seeds:
        body = {"prompt": [1], "max_tokens": TOKENS, "temperature": 1.0, "n": SAMPLES, "seed": seed}
        asked = Completions.read({**body, "return_token_ids": True})
        assert asked is not None
        dialect = Completions(asked, "id", 0)
        stitches = [Stitch(single) for single in asked.singles]
        for number, stitch in enumerate(stitches):
            for cut in [*cuts(seed + number), TOKENS]:
                if stitch.finish is None:
                    leg(dialect, stitch, cut)
        found.append(tuple(tuple(stitch.tokens) for stitch in stitches))
    return found


def leg(dialect: Completions, stitch: Stitch, cut: int) -> None:
    """So many tokens of one, by the body that the gateway makes for it."""
    stitch.begin("replica")
    body = dialect.leg_body(stitch, "leg")
    context = list(body["prompt"])
    for index in range(min(cut, body["max_tokens"])):
        drawn = choose(logits(tuple(context)), body["temperature"], body["seed"], index)
        assert drawn is not None
        context.append(drawn[0])
        choice: dict[str, Any] = {"token_ids": [drawn[0]], "finish_reason": None}
        stitch.take(dialect.piece(stitch, {"choices": [choice]}, False))
    stitch.broken(dialect.finish)


def apart(one: Sequence[Answer], other: Sequence[Answer]) -> tuple[float, int]:
    """The chi-squared distance between two sets of answers, and its degrees of freedom. Counted are the outputs, the
    pairs of first tokens of neighbouring samples, and those of last tokens."""
    found = []
    for answers in (one, other):
        counts: Counter[Any] = Counter()
        for answer in answers:
            counts.update(("output", sample) for sample in answer)
            for place in (0, -1):
                pairs = itertools.pairwise(answer)
                counts.update((place, first[place], second[place]) for first, second in pairs)
        found.append(counts)
    keys = found[0].keys() | found[1].keys()
    return sum((found[0][key] - found[1][key]) ** 2 / (found[0][key] + found[1][key]) for key in keys), len(keys) - 3


def everywhere(number: int) -> list[int]:
    """Cuts at places that differ from sample to sample, also before the first token."""
    drawn = random.Random(number)
    return [drawn.randrange(TOKENS) for _ in range(drawn.randrange(3))] or [1]


def rank(one: Sequence[Answer], other: Sequence[Answer], times: int = 40) -> float:
    """The permutation test: the part of `times` shuffles of all answers that are as far apart as these or farther."""
    distance, together, drawn = apart(one, other)[0], [*one, *other], random.Random(1)
    farther = 0
    for _ in range(times):
        drawn.shuffle(together)
        farther += apart(together[: len(one)], together[len(one) :])[0] >= distance
    return farther / times


def test_interrupted_and_uninterrupted_samples_are_told_apart_by_no_test() -> None:
    whole, cut = answers(SEEDS, lambda _: ()), answers(OTHER_SEEDS, everywhere)
    distance, freedom = apart(whole, cut)
    assert distance < freedom + 4 * (2 * freedom) ** 0.5
    assert rank(whole, cut) > 0.02


def test_seeds_that_are_used_again_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """So the tests above can fail."""
    whole = answers(SEEDS, lambda _: ())
    monkeypatch.setattr(fields, "leg_seed", lambda seed, _offset: seed)
    cut = answers(OTHER_SEEDS, lambda _: (1, 1))
    distance, freedom = apart(whole, cut)
    assert distance > freedom + 4 * (2 * freedom) ** 0.5
    assert rank(whole, cut) == 0


def test_equal_requests_are_cut_alike_and_come_out_alike() -> None:
    assert answers(range(5), everywhere) == answers(range(5), everywhere)
    assert single.leg_seed(7, 0) == 7
