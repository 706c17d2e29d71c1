"""The first bad of some versions, in as few questions as there can be."""

from __future__ import annotations

import math

import pytest

from ckpt_engine.core.halving import first_bad


@pytest.mark.parametrize("count", range(18))
def test_it_is_found_wherever_it_is_with_at_most_log2_questions(count: int) -> None:
    candidates = [3 * number + 1 for number in range(count)]
    for place in range(count + 1):
        asked: list[int] = []

        def is_bad(version: int, place: int = place, asked: list[int] = asked) -> bool:
            asked.append(version)
            return candidates.index(version) >= place

        assert first_bad(candidates, is_bad) == (candidates[place] if place < count else None)
        assert len(asked) == len(set(asked)) <= math.ceil(math.log2(count + 1))
