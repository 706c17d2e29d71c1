"""What members and the lead tell each other of a ballot, read from bytes that anybody on the network may have sent."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from ckpt_engine.core.arming import BallotAnswer, Word
from ckpt_engine.core.json_text import load_json

_VERBS = frozenset({"ask", "vote", "give up", "leave", "done"})


class BallotMessage(NamedTuple):
    """What a member says to the ballot of an epoch. until: of "vote". why, blamed: of "leave". hold: seconds for which
    the answer may be kept back until there is something to tell."""

    epoch: int
    verb: str
    until: float
    why: str
    blamed: tuple[str, ...]
    hold: float


def read_ballot_message(data: bytes) -> BallotMessage:
    """Raises ValueError for what no member of ours would say."""
    try:
        fields = load_json(data)
        found = BallotMessage(
            int(fields["epoch"]),
            str(fields["verb"]),
            float(fields.get("until", 0.0)),
            str(fields.get("why", "")),
            tuple(map(str, fields.get("blamed", ()))),
            float(fields.get("hold", 0.0)),
        )
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
        raise ValueError(f"nothing that is said to a ballot: {error}") from error
    if found.verb not in _VERBS or not (math.isfinite(found.until) and math.isfinite(found.hold)):
        raise ValueError(
            f"nothing that is said to a ballot: {found.verb!r} until {found.until}, held for {found.hold} s"
        )
    return found


def answer_of(fields: Mapping[str, Any]) -> BallotAnswer:
    """What the lead answers. Raises ValueError for what no lead of ours would."""
    try:
        clock = None if fields["clock"] is None else float(fields["clock"])
        answer = BallotAnswer(
            Word(fields["word"]), clock, bool(fields["voted"]), bool(fields["aborted"]), str(fields["why"])
        )
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"no answer of a ballot: {error}") from error
    if clock is not None and not math.isfinite(clock):
        raise ValueError(f"no answer of a ballot: its clock says {clock}")
    return answer
