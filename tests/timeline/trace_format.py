"""A strict reader of the Trace Event Format, as far as timelines use it.

Its rules are those of the format's description. Events have a phase, a process and a thread. Complete events ("X") have
a time and a duration in microseconds; those of one thread lie in each other or beside each other. Metadata ("M") name
processes and threads. A flow begins once ("s") and ends once ("f"), not before it began, both within slices.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

METADATA = {
    "process_name": "name",
    "process_labels": "labels",
    "process_sort_index": "sort_index",
    "thread_name": "name",
    "thread_sort_index": "sort_index",
}
NEEDED = {
    "X": {"name", "cat", "pid", "tid", "ts", "dur"},
    "M": {"name", "pid", "tid", "ts", "args"},
    "s": {"name", "cat", "pid", "tid", "ts", "id"},
    "f": {"name", "cat", "pid", "tid", "ts", "id", "bp"},
}
ALLOWED = {phase: names | {"ph", "args"} for phase, names in NEEDED.items()}
LONGEST_MICROS = 24 * 3600 * 1e6


@dataclass(frozen=True)
class Read:
    """One slice. begin, end: nanoseconds."""

    process: str
    thread: str
    name: str
    begin: int
    end: int
    args: dict[str, Any]


@dataclass
class File:
    """slices: in the order of the file. flows: (from, to) with what the beginning tells, both the innermost slices."""

    slices: list[Read] = field(default_factory=list)
    flows: list[tuple[Read, Read, dict[str, Any]]] = field(default_factory=list)
    labels: dict[str, str] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)

    def named(self, name: str, process: str = "") -> list[Read]:
        """Slices of that name, of one process if that is named."""
        return [each for each in self.slices if each.name == name and process in ("", each.process)]


def read(text: str) -> File:
    """What the file says. Raises AssertionError for what the format does not allow."""
    whole = json.loads(text, parse_constant=lambda name: _fail(f"{name} is not JSON"))
    assert set(whole) <= {"traceEvents", "displayTimeUnit", "otherData"}
    assert whole["displayTimeUnit"] in ("ms", "ns")
    events = whole["traceEvents"]
    assert isinstance(events, list)
    for event in events:
        _check(event)
    names = _names(events)
    found = File(about=whole["otherData"])
    for event in events:
        if event["ph"] == "X":
            begin = round(event["ts"] * 1000)
            process, thread = names[event["pid"], 0], names[event["pid"], event["tid"]]
            end = begin + round(event["dur"] * 1000)
            found.slices.append(Read(process, thread, event["name"], begin, end, event.get("args", {})))
        elif event["name"] == "process_labels":
            found.labels[names[event["pid"], 0]] = event["args"]["labels"]
    assert found.slices, "nothing is shown"
    assert min(each.begin for each in found.slices) == 0, "times count from the first slice on"
    _nested(found.slices)
    _flows(events, names, found)
    return found


def _fail(why: str) -> None:
    raise AssertionError(why)


def _check(event: dict[str, Any]) -> None:
    phase = event.get("ph")
    assert phase in NEEDED, f"no such phase here: {event}"
    assert NEEDED[phase] <= set(event) <= ALLOWED[phase], event
    assert type(event["pid"]) is int, event
    assert type(event["tid"]) is int, event
    assert isinstance(event["name"], str), event
    assert event["name"], event
    for unit in ("ts", "dur"):
        if unit in event:
            assert unit == "ts" or event[unit] > 0, f"shown as nothing, or as all: {event}"
            assert type(event[unit]) is int, f"begins and ends would be added with an error: {event}"
            assert 0 <= event[unit] < LONGEST_MICROS, event
    assert isinstance(event.get("args", {}), dict), event
    if phase == "M":
        assert METADATA[event["name"]] in event["args"], event
    if phase == "f":
        assert event["bp"] == "e", "otherwise it binds to the next slice"


def _names(events: list[dict[str, Any]]) -> dict[tuple[int, int], str]:
    """Of processes, as thread 0, and of threads. Each has one name, and no two of a kind the same."""
    names: dict[tuple[int, int], str] = {}
    for event in events:
        if event["name"] in ("process_name", "thread_name"):
            key = event["pid"], 0 if event["name"] == "process_name" else event["tid"]
            assert key not in names, f"named twice: {event}"
            assert key[1] or event["name"] == "process_name", "thread 0 would be the process"
            names[key] = event["args"]["name"]
    processes = [name for (_, thread), name in names.items() if not thread]
    assert len(processes) == len(set(processes))
    threads = [thread for _, thread in names if thread]
    assert len(threads) == len(set(threads)), "numbers of threads are those of the whole file, as in a kernel"
    return names


def _nested(slices: list[Read]) -> None:
    """In the order of the file a slice comes after those that it lies in."""
    threads: dict[tuple[str, str], list[Read]] = defaultdict(list)
    for each in slices:
        open_ = threads[each.process, each.thread]
        while open_ and open_[-1].end <= each.begin:
            open_.pop()
        if open_:
            assert open_[-1].begin <= each.begin, f"{each} comes before {open_[-1]}, which comes first"
            assert each.end <= open_[-1].end, f"{each} sticks out of {open_[-1]}"
        open_.append(each)


def _flows(events: list[dict[str, Any]], names: dict[tuple[int, int], str], found: File) -> None:
    ends: dict[Any, dict[str, dict[str, Any]]] = defaultdict(dict)
    for event in events:
        if event["ph"] in ("s", "f"):
            assert event["ph"] not in ends[event["id"]], f"twice: {event}"
            ends[event["id"]][event["ph"]] = event
    for number, flow in ends.items():
        assert set(flow) == {"s", "f"}, f"flow {number} has one end"
        assert flow["s"]["ts"] <= flow["f"]["ts"], f"flow {number} ends before it begins"
        assert flow["s"]["name"] == flow["f"]["name"]
        assert flow["s"]["cat"] == flow["f"]["cat"]
        left, arrived = (_around(flow[end], names, found) for end in ("s", "f"))
        found.flows.append((left, arrived, flow["s"].get("args", {})))


def _around(event: dict[str, Any], names: dict[tuple[int, int], str], found: File) -> Read:
    """The innermost slice of its thread at its time."""
    where, moment = (names[event["pid"], 0], names[event["pid"], event["tid"]]), round(event["ts"] * 1000)
    around = [e for e in found.slices if (e.process, e.thread) == where and e.begin <= moment <= e.end]
    assert around, f"an arrow that is bound to nothing: {event}"
    return min(around, key=lambda each: each.end - each.begin)
