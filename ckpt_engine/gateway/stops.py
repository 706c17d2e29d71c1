"""Finds stop strings in the text of one sample, wherever it is split. Pure.

It decides where a text ends and how much of it can no longer be the beginning of a stop string. It does not decide what
becomes of the tokens after that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopFound:
    """The first stop string of a text."""

    stop: str
    rest: str  # what the text has after the answer's end, so far as it was read; the stop string too unless it is kept


class StopSearch:
    """Reads a text piece by piece. Of several stop strings the one that is complete first counts, as in vLLM; if two
    are complete at the same character, the one that the caller named first."""

    def __init__(self, stops: Sequence[str], keep: bool = False) -> None:
        """stops: not empty, nor is any of them. keep: the answer ends behind the stop string, not before it."""
        self._stops, self._keep = tuple(stops), keep
        self._longest = max(map(len, stops))
        self._tail = ""  # the last characters that a stop string may have begun with
        self.length = 0  # characters read

    def copy(self) -> StopSearch:
        """The same search at the same place."""
        other = StopSearch(self._stops, self._keep)
        other._tail, other.length = self._tail, self.length
        return other

    def feed(self, text: str, may_end: bool = True) -> StopFound | None:
        """Reads on. may_end: whether a stop string may be complete within `text`; before the minimum of tokens none
        may. Do not feed on after a stop string was found."""
        window, before = self._tail + text, len(self._tail)
        self.length += len(text)
        self._tail = window[-(self._longest - 1) :] if self._longest > 1 else ""
        if not may_end:
            return None
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = window.find(stop, max(0, before + 1 - len(stop)))
            if start >= 0 and (best is None or start + len(stop) < best[1]):
                best = start, start + len(stop), stop
        if best is None:
            return None
        start, end, stop = best
        return StopFound(stop, window[end if self._keep else start :])

    @property
    def safe(self) -> int:
        """How many characters, from the beginning, belong to the answer whatever follows."""
        if self._keep:
            return self.length
        for begin in range(len(self._tail)):
            beginning = self._tail[begin:]
            if any(stop.startswith(beginning) for stop in self._stops):
                return self.length - len(beginning)
        return self.length
