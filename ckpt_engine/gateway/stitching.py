"""Puts the legs of one sample together: no token twice, none left out, each under the version that made it. Pure.

A leg is one request to one engine. What it streams comes here event by event, already read by the dialect; only events
that arrived whole count. When a leg ends too early, `remaining` says what is left to ask for.
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
    """How an answer ended, as its engine reports it."""

    # STOP, LENGTH, ABORT (interrupted: the rest can be requested again), ERROR (another engine would fail, too), or
    # another word of the engine, which ends the answer as it is.
    kind: str
    said: Any  # the engine's own value, as an answer shows it
    stop_reason: Any = None


@dataclass(slots=True)
class AnswerPiece:
    """What one event of an engine's stream adds to an answer."""

    tokens: list[int] = field(default_factory=list)
    records: list[Any] = field(default_factory=list)  # one a token, in the dialect's form; empty: none were asked for
    text: str = ""
    echo: list[int] = field(default_factory=list)  # tokens of the prompt, which come before `tokens`
    echo_records: list[Any] = field(default_factory=list)  # theirs
    finish: Finish | None = None
    labels: list[Label] | None = None  # the versions of all tokens of this leg so far, as the engine reports them
    about: dict[str, Any] = field(default_factory=dict)  # facts of the prompt (usage, log-probabilities), by first leg
    scored: int = 0  # how many tokens at the end of the prompt have log-probabilities in it

    def add(self, later: AnswerPiece) -> None:
        """Appends the piece of the next event, so that both go to the caller in one event."""
        self.tokens += later.tokens
        self.records += later.records
        self.text += later.text
        self.echo += later.echo
        self.echo_records += later.echo_records
        self.finish = later.finish

    @property
    def says(self) -> bool:
        """Whether it has anything to send to the caller."""
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
    held: Callable[[], tuple[GatewayVersion | None, GatewayVersion | None]] = _unknown
    caches: Callable[[int], str] = _recomputed  # what became of the caches when the replica took this version
    ended: str = ""  # how it ended; empty while it runs
    count: int = 0  # its tokens so far
    labels: list[Label] | None = None  # see AnswerPiece
    text_before: int = 0  # characters of the answer before this leg

    def spans(self) -> list[Span]:
        """Spans of its tokens."""
        return leg_spans(self.offset, self.count, self.labels, self.identify, self.held(), self.caches)

    def span(self, first: int, count: int) -> Span:
        """A span for what came with the leg's first token but is not a token of the answer."""
        made = next(iter(self.spans()), None) or Span(0, 0, *self.held(), exact=False, caches=RECOMPUTED)
        return replace(made, first=first, count=count)


class OverrunError(Exception):
    """An engine sent more than was asked for."""


class Stitch:
    """The answer to one sample, while its legs add to it."""

    def __init__(self, single: Single) -> None:
        self.single = single
        self.tokens: list[int] = []  # of the output, without the echo, as are `records` and `text`
        self.records: list[Any] = []
        self.text = ""
        self.echo: list[int] = []
        self.echo_records: list[Any] = []
        self.legs: list[Leg] = []
        self.about: dict[str, Any] = {}
        self.scored: tuple[Leg, int] | None = None  # the leg that scored the prompt, and how many tokens of it
        self.finish: Finish | None = None

    @property
    def begun(self) -> bool:
        """Whether it has anything that the caller may have seen."""
        return bool(self.tokens or self.echo)

    @property
    def remaining(self) -> int | None:
        """The most tokens that may still be generated; None: as many as the model has room for."""
        return None if self.single.max_tokens is None else self.single.max_tokens - len(self.tokens)

    @property
    def leg(self) -> Leg:
        """The running leg, or else the last one."""
        return self.legs[-1]

    def begin(self, replica: str) -> Leg:
        """Begins the leg that is about to be requested."""
        self.legs.append(Leg(replica, len(self.tokens), text_before=len(self.text)))
        return self.leg

    def take(self, piece: AnswerPiece) -> AnswerPiece:
        """Adds the piece of an event of the running leg, and returns what the caller gets of it.

        Raises OverrunError, and adds nothing, if it has more tokens than the leg was asked for.
        """
        left = self.remaining
        if left is not None and len(piece.tokens) > left:
            raise OverrunError(
                f"{self.leg.replica} sent {len(piece.tokens)} tokens where {left} were asked for at most"
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
            self.finish, self.leg.ended = piece.finish, WHOLE
        return piece

    def broken(self, finishes: Callable[[str, Any], Finish]) -> bool:
        """Notes that a leg broke off. Returns whether the answer is complete all the same, and then finishes it.

        finishes: makes a Finish in the dialect's words, from a kind and the token that stopped it.
        """
        if self.finish is not None:
            return True
        stops = self.tokens and self.tokens[-1] in self.single.stop_token_ids
        if stops and len(self.tokens) > self.single.min_tokens:
            self.finish = finishes(STOP, self.tokens[-1])
        elif self.remaining == 0 and (self.echo or not self.single.echo):
            self.finish = finishes(LENGTH, len(self.tokens))
        return self.finish is not None

    def cut(self, count: int) -> None:
        """Removes tokens that no caller has seen yet, so that `count` are left."""
        drop = len(self.tokens) - count
        if drop > 0:
            del self.tokens[count:]
            del self.records[count:]
            self.leg.count -= drop

    def spans(self) -> list[Span]:
        """Which version generated which tokens, without gaps."""
        return joined([span for leg in self.legs for span in leg.spans()])

    def prompt_span(self) -> Span | None:
        """The version that computed the prompt's log-probabilities, and for which tokens; None: there are none."""
        if self.scored is None:
            return None
        leg, count = self.scored
        return leg.span(len(self.single.prompt) - count, count)

    @property
    def resumes(self) -> int:
        """How many legs there were after the first one."""
        return max(0, len(self.legs) - 1)
