"""Messages between members and the lead about a ballot, read from bytes that come from the network unchecked."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from ckpt_engine.core.arming import BallotAnswer, Word
from ckpt_engine.core.json_text import load_json

_VERBS = frozenset({"ask", "vote", "give up", "leave", "done"})


class BallotMessage(NamedTuple):
    """A member's message to the ballot of an epoch."""

    epoch: int
    verb: str  # one of _VERBS
    until: float  # of "vote": until when it holds, by the lead's clock
    why: str  # of "leave"
    blamed: tuple[str, ...]  # of "leave": members
    hold: float  # seconds for which the answer may be held back while nothing is decided


def read_ballot_message(data: bytes) -> BallotMessage:
    """Reads a member's message. Raises ValueError if it is malformed."""
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
    """Reads the lead's answer. Raises ValueError if it is malformed."""
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
