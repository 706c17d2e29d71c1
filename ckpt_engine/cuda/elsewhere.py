"""Which addresses of this process are memory of another GPU than the one for which they were mapped.

For memory of a GPU that this process cannot see, the driver does not promise to tell. So code that maps memory notes it
here, and code that copies looks it up. Any thread: a lease may end on another thread than the copying.
"""

from __future__ import annotations

import threading
from bisect import bisect_right, insort
from typing import TypeAlias

Span: TypeAlias = tuple[int, int]
"""First address, and the one behind the last."""

_spans: list[Span] = []
"""Sorted; used under the lock."""

_lock = threading.Lock()


def note_elsewhere(span: Span) -> None:
    """Notes that a span is mapped now. Spans do not overlap."""
    with _lock:
        insort(_spans, span)


def forget_elsewhere(span: Span) -> None:
    """Notes that a span is about to be unmapped. Raises ValueError for one that was not noted."""
    with _lock:
        _spans.remove(span)


def lies_elsewhere(pointer: int) -> bool:
    """Whether an address lies in a noted span."""
    with _lock:
        index = bisect_right(_spans, (pointer, 1 << 64)) - 1
        return index >= 0 and pointer < _spans[index][1]
