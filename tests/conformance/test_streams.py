"""The suite sees an answer that calls tokens those of a version which did not make them."""

from __future__ import annotations

import pytest

from ckpt_engine.v1 import manager_pb2
from tests.conformance.engines import Answer, Span
from tests.conformance.streams import Seen, breaks
from tests.conformance.weights import Models
from tests.tiny_model import reference_tokens

OLD, NEW, CUT, END = 2, 3, 40, 120
PROMPT = (1, 3, 5, 7)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[object]:
    models = Models(tmp_path_factory.mktemp("models"))
    return [models[0], models[1]]


@pytest.mark.parametrize(
    ("admitted", "spans", "right"),
    [
        (OLD, ((OLD, 0, CUT), (NEW, CUT, END)), True),
        (OLD, (), True),
        (OLD, ((OLD, 0, END),), False),
        (OLD, ((NEW, 0, END),), False),
        (OLD, ((OLD, 0, CUT - 5), (NEW, CUT - 5, END)), False),
        (OLD, ((OLD, 0, CUT), (NEW, CUT, END - 1)), False),
        (OLD, ((NEW, CUT, END),), False),
        (NEW, ((OLD, 0, CUT), (NEW, CUT, END)), False),
    ],
)
def test_what_the_body_says_is_compared_to_the_tokens(
    pair: list[object], admitted: int, spans: tuple[tuple[int, int, int], ...], right: bool
) -> None:
    begun = reference_tokens(pair[OLD % 2], list(PROMPT), CUT).tokens
    tokens = begun + reference_tokens(pair[NEW % 2], [*PROMPT, *begun], END - CUT).tokens
    answer = Answer(200, tuple(tokens), "length", tuple(Span(*each) for each in spans), str(admitted))
    assert (breaks(manager_pb2.PAUSE_MODE_KEEP, pair, Seen(PROMPT, answer, True)) == "") is right
