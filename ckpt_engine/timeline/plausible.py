"""Removes impossible numbers from a report, so that those of one member do not spoil the whole timeline. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from ckpt_engine.v1 import manager_pb2

OUTSIDE = 3600.0
"""Seconds before and after an update beyond which a moment is not believed."""

_LARGEST_CLOCK = 1e10
"""Most seconds of a clock: three centuries."""

_CLOCKS = frozenset({"begin", "ahead", "began", "digested"})
"""Fields that are moments of a member's own clock, or how far that is ahead."""


def believable(report: manager_pb2.UpdateReport) -> tuple[manager_pb2.UpdateReport, list[str]]:
    """A copy of the report without numbers that are not finite, or more than an hour outside the update; and a sentence
    for each number that was removed."""
    plausible = manager_pb2.UpdateReport()
    plausible.CopyFrom(report)
    odd: list[str] = []
    if not abs(plausible.seconds) < _LARGEST_CLOCK:
        odd.append(_sentence("the update", "seconds", plausible.seconds))
        plausible.ClearField("seconds")
    most = max(plausible.seconds, 0.0) + OUTSIDE
    _clear_numbers(plausible, "the update", most, odd)
    for source in plausible.timeline.sources:
        if source.digested and source.HasField("span") and abs(source.digested - source.span.begin) > most:
            odd.append(_sentence(source.source, "digested", source.digested))
            source.ClearField("digested")
    for outcome in plausible.replicas:
        for worker in outcome.workers:
            far = worker.span.begin - outcome.span.begin
            if worker.HasField("span") and outcome.HasField("span") and abs(far) > most:
                odd.append(_sentence(f"{outcome.replica} worker {worker.rank}", "span.begin", worker.span.begin))
                worker.ClearField("span")
            elif not outcome.HasField("span"):  # both are of one clock, which only the replica's span aligns
                worker.ClearField("span")
    return plausible, odd


def _clear_numbers(message: Message, member: str, most: float, odd: list[str]) -> None:
    """Clears impossible numbers in a message and in all that it holds. A span is cleared as a whole."""
    for name in ("replica", "relay", "source"):
        label = getattr(message, name, "")
        member = label if isinstance(label, str) and label else member
    if isinstance(message, manager_pb2.WorkerReport):
        member = f"{member} worker {message.rank}"
    for field, value in message.ListFields():
        if isinstance(value, float):
            if not _can_be(field.name, value, most):
                odd.append(_sentence(member, field.name, value))
                message.ClearField(field.name)
        elif isinstance(value, manager_pb2.Span):
            wrong = [(each.name, number) for each, number in value.ListFields() if not _can_be(each.name, number, most)]
            if wrong:
                odd.append(_sentence(member, f"span.{wrong[0][0]}", wrong[0][1]))
                message.ClearField(field.name)
        elif field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
            for each in _messages(value):
                _clear_numbers(each, member, most, odd)


def _messages(value: object) -> Iterator[Message]:
    if isinstance(value, Message):
        yield value
    elif not hasattr(value, "items"):  # a map has none of the numbers that are drawn
        yield from value  # type: ignore[misc]


def _can_be(name: str, value: float, most: float) -> bool:
    if name == "bytes_per_second":
        return math.isfinite(value)
    return math.isfinite(value) and abs(value) <= (_LARGEST_CLOCK if name in _CLOCKS else most)


def _sentence(member: str, what: str, value: float) -> str:
    return f"{member} tells {what} {value:g}, which cannot be: it is taken as not told"
