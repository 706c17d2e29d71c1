"""Which version made which token of an answer: spans, built from the labels of each leg's engine. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ckpt_engine.core.labels import label_of

RECOMPUTED, KEPT, UNKNOWN = "recomputed", "kept", "unknown"
"""What happened to the caches of the tokens before a span: recomputed by its version, or kept from the one before."""


@dataclass(frozen=True, slots=True)
class GatewayVersion:
    """A version of weights, as far as the gateway knows it."""

    version: int
    lineage: str = ""  # empty: unknown
    root: str = ""  # hexadecimal; empty: unknown


@dataclass(frozen=True, slots=True)
class Label:
    """An engine's claim that a version made output tokens [start, end) of this leg."""

    start: int
    end: int
    made_by: GatewayVersion | None  # None: the engine's own weights. The root may be its first digits only, or empty.


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens [first, first + count) of the answer and the version that made them."""

    first: int
    count: int
    lowest: GatewayVersion | None  # that the replica can have held, by the news that the gateway had
    highest: GatewayVersion | None  # likewise; if the span is exact, the same as `lowest`, and not None
    exact: bool
    caches: str  # RECOMPUTED, KEPT or UNKNOWN: what became of those of earlier tokens

    def to_dict(self) -> dict[str, Any]:
        """The span as a dictionary for JSON."""
        one = self.lowest if self.lowest == self.highest else None
        either = self.lowest or self.highest
        return {
            "first": self.first,
            "count": self.count,
            "lineage": (either.lineage or None) if either else None,
            "version": one.version if one else None,
            "root": (one.root or None) if one else None,
            "min_version": self.lowest.version if self.lowest else None,
            "max_version": self.highest.version if self.highest else None,
            "exact": self.exact,
            "caches": self.caches,
        }


def leg_spans(
    first: int,
    count: int,
    labels: Sequence[Label] | None,
    identify: Callable[[GatewayVersion], GatewayVersion],
    bounds: tuple[GatewayVersion | None, GatewayVersion | None],
    caches: Callable[[int], str],
    entry: Callable[[int], str] = lambda _: RECOMPUTED,
) -> list[Span]:
    """Spans of one leg's `count` tokens, which begin at `first` of the answer.

    labels: of the leg's tokens, by the engine; used only if they cover all tokens without a gap. The chunks of a stream
    prove nothing: an engine may put tokens of two versions into one. identify: completes a label with lineage and root.
    bounds: the lowest and highest version that the replica can have held meanwhile. caches: what happened to them when
    the replica installed the version of a number. entry: what they were when a version made the first token.
    """
    if count == 0:
        return []
    if labels is None or not _cover(labels, count):
        return [Span(first, count, *bounds, exact=False, caches=RECOMPUTED)]
    spans: list[Span] = []
    for label in labels:
        end = min(label.end, count)
        if end <= label.start:
            continue
        identity = None if label.made_by is None else identify(label.made_by)
        became, without = (caches, UNKNOWN) if spans else (entry, RECOMPUTED)
        before = without if identity is None else became(identity.version)
        spans.append(Span(first + label.start, end - label.start, identity, identity, identity is not None, before))
    return spans


def joined(spans: Sequence[Span]) -> list[Span]:
    """Joins neighbouring spans of one version: a leg that continues under the same version leaves no seam."""
    result: list[Span] = []
    for span in spans:
        last = result[-1] if result else None
        if last and _same(last) == _same(span):
            result[-1] = replace(last, count=last.count + span.count)
        else:
            result.append(span)
    return result


def version_summary(spans: Sequence[Span]) -> dict[str, Any]:
    """The fields of an answer that name its versions, also under verl's names. session: for the conversation's next
    request (core/version_bounds.py); None: no version is known."""
    lows = [span.lowest.version for span in spans if span.lowest]
    highs = [span.highest.version for span in spans if span.highest]
    lowest, highest = min(lows, default=None), max(highs, default=None)
    end = spans[-1].highest if spans else None
    return {
        "spans": [span.to_dict() for span in spans],
        "exact": all(span.exact for span in spans),
        "min_version": lowest,
        "max_version": highest,
        "session": label_of(end.version, end.root, end.lineage) if end else None,
        "global_steps": end.version if end else None,
        "min_global_steps": lowest,
        "max_global_steps": highest,
    }


def lineages(spans: Sequence[Span]) -> set[str]:
    """Lineages that are known to have made tokens."""
    return {identity.lineage for span in spans for identity in (span.lowest, span.highest) if identity} - {""}


def _same(span: Span) -> tuple[object, ...]:
    return span.lowest, span.highest, span.exact, span.caches


def _cover(labels: Sequence[Label], count: int) -> bool:
    at = 0
    for label in labels:
        if label.start != at or label.end < label.start:
            return False
        at = label.end
    return at >= count
