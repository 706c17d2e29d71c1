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
    """How an engine says that it has ended. kind: STOP, LENGTH, ABORT (interrupted: what is missing can be asked for
    again), ERROR (it will not be better elsewhere), or a word of the engine's own, which ends the answer as it is.
    said: in the engine's words, as it stands in an answer."""

    kind: str
    reason: Any
    stop_reason: Any = None


@dataclass(slots=True)
class AnswerPiece:
    """What one event adds. records: one for each token, as the dialect has them; none: nobody asked for any. echo:
    tokens of the prompt in front of them, with their records. labels: what the engine has said so far of the versions
    of all tokens of this leg. about: facts of the prompt (usage, log-probabilities), which the first leg tells.
    scored: tokens at the end of the prompt of which it has log-probabilities."""

    tokens: list[int] = field(default_factory=list)
    records: list[Any] = field(default_factory=list)
    text: str = ""
    echo: list[int] = field(default_factory=list)
    echo_records: list[Any] = field(default_factory=list)
    finish: Finish | None = None
    labels: list[Label] | None = None
    about: dict[str, Any] = field(default_factory=dict)
    scored: int = 0

    def add(self, later: AnswerPiece) -> None:
        """Adds what the next event brought, for a caller who gets both at once."""
        self.tokens += later.tokens
        self.records += later.records
        self.text += later.text
        self.echo += later.echo
        self.echo_records += later.echo_records
        self.finish = later.finish

    @property
    def says(self) -> bool:
        """Whether it is worth an event."""
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
    identify: Callable[[GatewayVersion], GatewayVersion] = _itself  # the whole of what its engine's labels say
    # the lowest and highest version that the replica can have held meanwhile
    held: Callable[[], tuple[GatewayVersion | None, GatewayVersion | None]] = _unknown
    caches: Callable[[int], str] = _recomputed  # what became of them when the replica took a version
    ended: str = ""  # how; empty while it runs
    count: int = 0
    labels: list[Label] | None = None
    text_before: int = 0  # characters of the answer before it

    def spans(self) -> list[Span]:
        """Spans of its tokens."""
        return leg_spans(self.offset, self.count, self.labels, self.identify, self.held(), self.caches)

    def span(self, first: int, count: int) -> Span:
        """The span of what came with its first token, and is no token of the answer."""
        origin = next(iter(self.spans()), None) or Span(0, 0, *self.held(), exact=False, caches=RECOMPUTED)
        return replace(origin, first=first, count=count)


class OverrunError(Exception):
    """An engine sent more than was asked for."""


class Stitch:
    """One sample's answer as it grows. tokens, records, text: of the output, without the echo."""

    def __init__(self, single: Single) -> None:
        self.single = single
        self.tokens: list[int] = []
        self.records: list[Any] = []
        self.text = ""
        self.echo: list[int] = []
        self.echo_records: list[Any] = []
        self.legs: list[Leg] = []
        self.about: dict[str, Any] = {}
        self.scored: tuple[Leg, int] | None = None  # the leg that scored the prompt, and how many tokens of it
        self.finish: Finish | None = None

    @property
    def started(self) -> bool:
        """Whether anything has come that the caller may have seen."""
        return bool(self.tokens or self.echo)

    @property
    def remaining(self) -> int | None:
        """Tokens that are still to be made at most; None: as many as the model has room for."""
        return None if self.single.max_tokens is None else self.single.max_tokens - len(self.tokens)

    @property
    def leg(self) -> Leg:
        """The leg that runs, or ran last."""
        return self.legs[-1]

    def begin(self, replica: str) -> Leg:
        """Begins a leg, which is about to be asked for."""
        self.legs.append(Leg(replica, len(self.tokens), text_before=len(self.text)))
        return self.leg

    def take(self, piece: AnswerPiece) -> AnswerPiece:
        """Adds what an event of the running leg brought; the piece is what the caller gets of it.

        Raises OverrunError for more tokens than the leg was asked for: nothing of them is kept.
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
            self.finish, self.leg.ended = piece.finish, WHOLE
        return piece

    def broken(self, finishes: Callable[[str, Any], Finish]) -> bool:
        """Notes that a leg ended without its end. Whether all that was asked for has come all the same: then it is
        finished.

        finishes: makes the dialect's words for a kind of end (and the token that stopped it).
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
        """Takes tokens back that no caller has seen yet, so that `count` are left."""
        drop = len(self.tokens) - count
        if drop > 0:
            del self.tokens[count:]
            del self.records[count:]
            self.leg.count -= drop

    def spans(self) -> list[Span]:
        """Which version made which tokens, without a hole."""
        return joined([span for leg in self.legs for span in leg.spans()])

    def prompt_span(self) -> Span | None:
        """Which version made the log-probabilities of the prompt, by its tokens; None: there are none."""
        if self.scored is None:
            return None
        leg, count = self.scored
        return leg.span(len(self.single.prompt) - count, count)

    @property
    def resumes(self) -> int:
        """Legs after the first that added something, or tried to."""
        return max(0, len(self.legs) - 1)
