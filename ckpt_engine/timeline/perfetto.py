"""A timeline as Perfetto and Chrome read it: the JSON of the Trace Event Format.

Complete events ("X") for slices, metadata ("M") for names, flow events ("s", "f") for arrows. Times are whole
microseconds from the first slice on.
"""

from __future__ import annotations

import json
from typing import Any

from ckpt_engine.timeline.tracks import Timeline, Track, TrackSlice


def trace_text(timeline: Timeline) -> str:
    """The timeline as a file for Perfetto."""
    return json.dumps(trace_events(timeline), separators=(",", ":"))


def trace_events(timeline: Timeline) -> dict[str, Any]:
    """The content of that file: Chrome's trace event format."""
    zero = min((each.begin for track in timeline.tracks for each in track.slices), default=0.0)
    numbers = _Numbers(timeline)
    events: list[dict[str, Any]] = list(numbers.names(timeline))
    for track in timeline.tracks:
        for each in track.slices:
            _slices(each, numbers.of(track), zero, events)
    for number, arrow in enumerate(timeline.arrows, start=1):
        same = {"name": "bytes", "cat": "edge", "id": number}
        events.append(
            {
                "ph": "s",
                **same,
                **numbers.of(arrow.source),
                "ts": _micros(arrow.departure - zero),
                "args": dict(arrow.args),
            }
        )
        events.append({"ph": "f", "bp": "e", **same, **numbers.of(arrow.target), "ts": _micros(arrow.arrival - zero)})
    about = timeline.about | ({"not_believed": timeline.odd} if timeline.odd else {})
    return {"displayTimeUnit": "ms", "traceEvents": events, "otherData": about}


class _Numbers:
    """Processes and threads have numbers in the format, and names beside them."""

    def __init__(self, timeline: Timeline) -> None:
        self._processes: dict[str, int] = {}
        self._threads: dict[tuple[str, str], int] = {}
        for track in timeline.tracks:
            self._processes.setdefault(track.process, len(self._processes) + 1)
            self._threads.setdefault((track.process, track.thread), len(self._threads) + 1)

    def of(self, track: Track) -> dict[str, int]:
        return {"pid": self._processes[track.process], "tid": self._threads[track.process, track.thread]}

    def names(self, timeline: Timeline) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []

        def name(kind: str, where: dict[str, int], args: dict[str, Any]) -> None:
            found.append({"ph": "M", "name": kind, "ts": 0, **where, "args": args})

        for process, number in self._processes.items():
            where = {"pid": number, "tid": 0}
            name("process_name", where, {"name": process})
            name("process_sort_index", where, {"sort_index": number})
            if process in timeline.clocks:
                error, by = timeline.clocks[process]
                name("process_labels", where, {"labels": f"± {error * 1e3:.3f} ms by {by}"})
        for (process, thread), number in self._threads.items():
            where = {"pid": self._processes[process], "tid": number}
            name("thread_name", where, {"name": thread})
            name("thread_sort_index", where, {"sort_index": number})
        return found


def _slices(each: TrackSlice, where: dict[str, int], zero: float, events: list[dict[str, Any]]) -> None:
    begin, end = _micros(each.begin - zero), _micros(each.end - zero)
    if begin == end:  # viewers disagree about the nesting of slices without duration
        return
    event = {"ph": "X", "name": each.name, "cat": "update", **where, "ts": begin, "dur": end - begin}
    events.append({**event, "args": dict(each.args)})
    for part in each.parts:
        _slices(part, where, zero, events)


def _micros(seconds: float) -> int:
    """Whole microseconds: viewers add begin and duration, and rounding there would let a slice overlap the next."""
    return max(0, round(seconds * 1e6))
