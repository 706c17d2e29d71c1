"""The prober sees answers that no replica may give, also those that name a version which did not make their tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.faults.prober import TOKENS, Expected, wrong
from tests.tiny_model import reference_tokens

CUT = 3
"""Tokens of an answer over an update that are of the version before."""

HIGHEST = 7


def span(version: int, start: int, end: int) -> dict[str, int]:
    return {"version": version, "start": start, "end": end}


def headers(version: int, root: str = "") -> dict[str, str]:
    named = {"x-ckpt-engine-admitted-version": str(version)}
    return {**named, "x-ckpt-engine-admitted-root": root or f"root of {version}"}


def over_an_update(expected: Expected, old: int, new: int) -> list[int]:
    """The first tokens of `old`, and then those that `new` makes after them."""
    begun = expected.tokens[old % 3][:CUT]
    return begun + reference_tokens(expected.models[new % 3], expected.prompt + begun, TOKENS - CUT).tokens


@pytest.fixture
def expected(models: tuple[Path, Path, Expected]) -> Expected:
    return models[2]


def judge(expected: Expected, tokens: list[int], spans: list[dict[str, int]], said: dict[str, str]) -> list[str]:
    answer: dict[str, Any] = {"output_ids": tokens, "weight_versions": spans}
    return wrong(expected, HIGHEST, answer, said, {0: "root of 6", 1: "root of 4"})


def test_right_answers_are_let_pass(expected: Expected) -> None:
    whole, mixed = expected.tokens[1], over_an_update(expected, 4, 5)
    assert judge(expected, whole, [span(4, 0, TOKENS)], headers(4)) == []
    assert judge(expected, whole[:CUT], [span(4, 0, CUT)], headers(4)) == [], "cut short by a pause"
    assert judge(expected, mixed, [span(4, 0, CUT), span(5, CUT, TOKENS)], headers(4)) == []
    late = judge(expected, whole, [span(4, 0, TOKENS)], headers(3, "root of 6"))
    assert late == [], "let in under 3, and computed after the update to 4"


def test_tokens_under_another_version_than_made_them_are_seen(expected: Expected) -> None:
    whole, mixed = expected.tokens[1], over_an_update(expected, 4, 5)
    for tokens, spans in (
        (whole, [span(5, 0, TOKENS)]),
        (whole, [span(3, 0, CUT), span(4, CUT, TOKENS)]),
        (whole, [span(4, 0, CUT), span(5, CUT, TOKENS)]),
        (mixed, [span(4, 0, TOKENS)]),
        (mixed, [span(4, 0, CUT - 1), span(5, CUT - 1, TOKENS)]),
        (mixed, [span(4, 0, CUT), span(6, CUT, TOKENS)]),
    ):
        found = judge(expected, tokens, spans, headers(3, "root of 6"))
        assert found, spans
        assert all("which they are not" in each for each in found)


def test_tokens_without_a_version_and_versions_that_nobody_has_published_are_seen(expected: Expected) -> None:
    whole = expected.tokens[1]
    assert "does not say" in judge(expected, whole, [span(4, 0, CUT)], headers(4))[0]
    assert "does not say" in judge(expected, whole, [span(4, CUT, TOKENS)], headers(4))[0]
    assert "is the highest" in judge(expected, whole, [span(10, 0, TOKENS)], headers(4))[0]


def test_headers_that_cannot_be_true_are_seen(expected: Expected) -> None:
    whole = expected.tokens[1]
    assert "under version 7" in judge(expected, whole, [span(4, 0, TOKENS)], headers(7, "root of 4"))[0]
    assert "two roots" in judge(expected, whole, [span(4, 0, TOKENS)], headers(4, "root of 5"))[0]
