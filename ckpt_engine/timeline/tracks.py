"""What a timeline is made of: processes with threads, slices on them, and arrows from slice to slice. Pure.

All times are seconds of one clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, TypeAlias

Args: TypeAlias = Mapping[str, Any]
"""What is told of something, for JSON."""

NOTHING: Args = MappingProxyType({})


@dataclass
class TrackSlice:
    """Something that went on from begin to end. parts: what it was made of, one after the other, and inside it. args:
    what is told of it."""

    name: str
    begin: float
    end: float
    args: Args = field(default_factory=dict)
    parts: list[TrackSlice] = field(default_factory=list)

    def part(self, name: str, begin: float, end: float, args: Args = NOTHING) -> TrackSlice:
        """Adds a part after those that it has and within the whole: what sticks out is cut off."""
        lowest = self.parts[-1].end if self.parts else self.begin
        begin = min(max(begin, lowest), self.end)
        new_part = TrackSlice(name, begin, min(max(end, begin), self.end), args)
        self.parts.append(new_part)
        return new_part

    def backwards(self, steps: list[tuple[str, float]], until: float | None = None) -> None:
        """Adds parts of so many seconds, the last of which ends with the whole, or then. Empty parts are left out."""
        end = self.end if until is None else until
        begin = end - sum(seconds for _, seconds in steps)
        for name, seconds in steps:
            if seconds > 0:
                self.part(name, begin, begin + seconds)
            begin += seconds


@dataclass
class Track:
    """One thread of one process. slices: one after the other."""

    process: str
    thread: str
    slices: list[TrackSlice] = field(default_factory=list)

    def slice(self, name: str, begin: float, end: float, args: Args = NOTHING) -> TrackSlice:
        """Adds a slice after those that there are."""
        if self.slices:
            begin = max(begin, self.slices[-1].end)
        new_slice = TrackSlice(name, begin, max(begin, end), args)
        self.slices.append(new_slice)
        return new_slice

    def near(self, moment: float) -> float:
        """The moment nearest to that one in which something goes on here."""
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
    """One update as tracks.

    tracks: in the order in which they are to be shown. clocks: by process, how wrong its times may be, seconds, and
    what they are known by. about: of the whole. odd: what somebody told that cannot be, a sentence each.
    """

    tracks: list[Track] = field(default_factory=list)
    arrows: list[Arrow] = field(default_factory=list)
    clocks: dict[str, tuple[float, str]] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)
    odd: list[str] = field(default_factory=list)

    def track(self, process: str, thread: str) -> Track:
        """The track of that name; made now if there is none."""
        for track in self.tracks:
            if (track.process, track.thread) == (process, thread):
                return track
        self.tracks.append(Track(process, thread))
        return self.tracks[-1]

    def find(self, process: str) -> Track | None:
        """The first track of a process."""
        return next((track for track in self.tracks if track.process == process), None)
