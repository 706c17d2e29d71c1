"""The parts of a timeline: processes with threads, slices on them, and arrows from slice to slice. Pure.

All times are seconds of one clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, TypeAlias

Args: TypeAlias = Mapping[str, Any]
"""Details of a slice or an arrow, for JSON."""

NOTHING: Args = MappingProxyType({})


@dataclass
class TrackSlice:
    """An activity from begin to end."""

    name: str
    begin: float
    end: float
    args: Args = field(default_factory=dict)
    parts: list[TrackSlice] = field(default_factory=list)  # one after the other, within it

    def part(self, name: str, begin: float, end: float, args: Args = NOTHING) -> TrackSlice:
        """Adds a part after the last one; what lies outside the slice is cut off."""
        lowest = self.parts[-1].end if self.parts else self.begin
        begin = min(max(begin, lowest), self.end)
        new_part = TrackSlice(name, begin, min(max(end, begin), self.end), args)
        self.parts.append(new_part)
        return new_part

    def backwards(self, steps: list[tuple[str, float]], until: float | None = None) -> None:
        """Adds parts of so many seconds; the last ends with the slice, or at `until`. Leaves out empty ones."""
        end = self.end if until is None else until
        begin = end - sum(seconds for _, seconds in steps)
        for name, seconds in steps:
            if seconds > 0:
                self.part(name, begin, begin + seconds)
            begin += seconds


@dataclass
class Track:
    """One thread of one process."""

    process: str
    thread: str
    slices: list[TrackSlice] = field(default_factory=list)  # one after the other

    def slice(self, name: str, begin: float, end: float, args: Args = NOTHING) -> TrackSlice:
        """Adds a slice after the last one."""
        if self.slices:
            begin = max(begin, self.slices[-1].end)
        new_slice = TrackSlice(name, begin, max(begin, end), args)
        self.slices.append(new_slice)
        return new_slice

    def near(self, moment: float) -> float:
        """The moment within a slice that is nearest to this one."""
        inside = [min(max(moment, each.begin), each.end) for each in self.slices]
        return min(inside, key=lambda each: abs(each - moment))


@dataclass(frozen=True)
class Arrow:
    """Bytes from one track to another."""

    source: Track
    departure: float
    target: Track
    arrival: float
    args: Args


@dataclass
class Timeline:
    """One update as tracks."""

    tracks: list[Track] = field(default_factory=list)  # in display order
    arrows: list[Arrow] = field(default_factory=list)
    clocks: dict[str, tuple[float, str]] = field(default_factory=dict)  # by process: error (seconds), and its origin
    about: dict[str, Any] = field(default_factory=dict)  # the update
    odd: list[str] = field(default_factory=list)  # a sentence for each impossible number of a member

    def track(self, process: str, thread: str) -> Track:
        """The track of these names; adds it if there is none."""
        for track in self.tracks:
            if (track.process, track.thread) == (process, thread):
                return track
        self.tracks.append(Track(process, thread))
        return self.tracks[-1]

    def find(self, process: str) -> Track | None:
        """The first track of a process."""
        return next((track for track in self.tracks if track.process == process), None)
