"""Joins the legs of one sample: no token twice, none missing, each with the version that made it. Pure.

A leg is one request to one engine. Its events come here one by one, already parsed by the dialect; only events that
arrived whole count. When a leg ends too early, `remaining` says how many tokens to ask for next.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from ckpt_engine.gateway.single import Single
from ckpt_engine.gateway.versions import RECOMPUTED, GatewayVersion, Label, Span, joined, leg_spans

STOP, LENGTH, ABORT, ERROR = "stop", "length", "abort", "error"

WHOLE, ABORTED, BROKEN = "whole", "aborted", "broken"
"""How a leg ended."""


@dataclass(frozen=True, slots=True)
class Finish:
    """How an engine ended a sample."""

    # STOP, LENGTH, ABORT (interrupted: the rest can be requested again), ERROR (another engine would fail, too), or
    # another word of the engine, which ends the answer as it is.
    kind: str
    reason: Any  # the finish_reason, in the engine's form
    stop_reason: Any = None


@dataclass(slots=True)
class AnswerPiece:
    """What one event adds to a sample."""

    tokens: list[int] = field(default_factory=list)
    records: list[Any] = field(default_factory=list)  # one a token, in the dialect's form; empty: none were requested
    text: str = ""
    echo: list[int] = field(default_factory=list)  # tokens of the prompt, before `tokens`
    echo_records: list[Any] = field(default_factory=list)
    finish: Finish | None = None
    labels: list[Label] | None = None  # of all tokens of this leg so far
    about: dict[str, Any] = field(default_factory=dict)  # facts of the prompt (cached tokens, log-probabilities)
    scored: int = 0  # tokens at the end of the prompt that have log-probabilities

    def add(self, later: AnswerPiece) -> None:
        """Appends the next event's piece, for a caller that gets both at once."""
        self.tokens += later.tokens
        self.records += later.records
        self.text += later.text
        self.echo += later.echo
        self.echo_records += later.echo_records
        self.finish = later.finish

    @property
    def says(self) -> bool:
        """Whether it has anything for the caller."""
        return bool(self.tokens or self.echo or self.finish is not None)


def _itself(identity: GatewayVersion) -> GatewayVersion:
    return identity


def _recomputed(_number: int) -> str:
    return RECOMPUTED


def _unknown() -> tuple[GatewayVersion | None, GatewayVersion | None]:
    return None, None


@dataclass(slots=True)
class Leg:
    """One request to one engine."""

    replica: str
    offset: int  # tokens of the answer before it
    identify: Callable[[GatewayVersion], GatewayVersion] = _itself  # completes the version in a label of its engine
    # the lowest and highest version that the replica can have held meanwhile
    bounds: Callable[[], tuple[GatewayVersion | None, GatewayVersion | None]] = _unknown
    caches: Callable[[int], str] = _recomputed  # what became of them when the replica took a version
    entry: Callable[[int], str] = _recomputed  # what they were when a version made the first token
    outcome: str = ""  # how; empty while it runs
    count: int = 0
    labels: list[Label] | None = None
    text_before: int = 0  # characters of the answer before it

    def spans(self) -> list[Span]:
        """The spans of its tokens."""
        bounds = self.bounds()
        return leg_spans(self.offset, self.count, self.labels, self.identify, bounds, self.caches, self.entry)

    def span(self, first: int, count: int) -> Span:
        """A span of the version that made its first token, for something that is not a token of the answer."""
        origin = next(iter(self.spans()), None) or Span(0, 0, *self.bounds(), exact=False, caches=RECOMPUTED)
        return replace(origin, first=first, count=count)

    def to_dict(self) -> dict[str, Any]:
        """The leg as an answer tells it."""
        return {"replica": self.replica, "first": self.offset, "count": self.count, "ended": self.outcome}


class OverrunError(Exception):
    """An engine sent more tokens than were requested."""


class Stitch:
    """One sample's answer as it grows. `tokens`, `records` and `text` are of the output, without the echo."""

    def __init__(self, single: Single) -> None:
        self.single = single
        self.tokens: list[int] = []  # of the output, without the echo, as are `records` and `text`
        self.records: list[Any] = []
        self.text = ""
        self.echo: list[int] = []
        self.echo_records: list[Any] = []
        self.legs: list[Leg] = []
        self.adapter = ""  # the version of an adapter that the sample began with, as a `model`
        self.about: dict[str, Any] = {}
        self.scored: tuple[Leg, int] | None = None  # the leg that scored the prompt, and how many tokens of it
        self.finish: Finish | None = None

    @property
    def started(self) -> bool:
        """Whether anything has come that the caller may have seen."""
        return bool(self.tokens or self.echo)

    @property
    def remaining(self) -> int | None:
        """Tokens that may still come; None: as many as the model has room for."""
        return None if self.single.max_tokens is None else self.single.max_tokens - len(self.tokens)

    @property
    def leg(self) -> Leg:
        """The newest leg."""
        return self.legs[-1]

    def begin(self, replica: str) -> Leg:
        """Begins a leg, before its request is sent."""
        self.legs.append(Leg(replica, len(self.tokens), text_before=len(self.text)))
        return self.leg

    def take(self, piece: AnswerPiece) -> AnswerPiece:
        """Adds a piece of the running leg, and returns what the caller gets of it.

        Raises OverrunError for more tokens than were requested; nothing is added then.
        """
        remaining = self.remaining
        if remaining is not None and len(piece.tokens) > remaining:
            raise OverrunError(
                f"{self.leg.replica} sent {len(piece.tokens)} tokens where {remaining} were asked for at most"
            )
        self.tokens += piece.tokens
        self.records += piece.records
        self.text += piece.text
        self.echo += piece.echo
        self.echo_records += piece.echo_records
        self.leg.count += len(piece.tokens)
        if piece.labels is not None:
            self.leg.labels = piece.labels
        if len(self.legs) == 1 or not self.about:
            self.about |= piece.about
            if piece.scored:
                self.scored = self.leg, piece.scored
        if piece.finish is not None and piece.finish.kind not in (ABORT, ERROR):
            self.finish, self.leg.outcome = piece.finish, WHOLE
        return piece

    def broken(self, finishes: Callable[[str, Any], Finish]) -> bool:
        """Notes that a leg broke off. Returns whether all requested tokens had come, so that the sample is finished.

        finishes: makes the dialect's Finish of a kind (and the token that stopped it, or the number of tokens).
        """
        if self.finish is not None:
            return True
        stops = self.tokens and self.tokens[-1] in self.single.stop_token_ids
        if stops and len(self.tokens) > self.single.min_tokens:
            self.finish = finishes(STOP, self.tokens[-1])
        elif self.remaining == 0 and (self.echo or not self.single.echo):
            self.finish = finishes(LENGTH, len(self.tokens))
        return self.finish is not None

    def end(self, finish: Finish) -> None:
        """Finishes the sample within the running leg, for a reason that its engine does not know."""
        self.finish, self.leg.outcome = finish, WHOLE

    def cut(self, count: int) -> None:
        """Drops the tokens after the first `count`, which no caller has seen yet."""
        drop = len(self.tokens) - count
        if drop > 0:
            del self.tokens[count:]
            del self.records[count:]
            self.leg.count -= drop

    def spans(self) -> list[Span]:
        """The spans of all tokens, without a gap."""
        return joined([span for leg in self.legs for span in leg.spans()])

    def prompt_span(self) -> Span | None:
        """The span of the prompt's log-probabilities; None: there are none."""
        if self.scored is None:
            return None
        leg, count = self.scored
        return leg.span(len(self.single.prompt) - count, count)

    @property
    def resumes(self) -> int:
        """The number of legs after the first."""
        return max(0, len(self.legs) - 1)
