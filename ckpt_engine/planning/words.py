"""A plan as a text for people, in which equal things are grouped. Pure."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain

from ckpt_engine.core.relay_layout import SLOTS
from ckpt_engine.core.sizes import human_bytes
from ckpt_engine.planning.foresight import SOURCE, Forecast
from ckpt_engine.planning.relays import Relay
from ckpt_engine.planning.update import Line, PlanAnswer, traffic

_NUMBER = re.compile(r"\d+")

COLUMNS = 100


def as_text(answer: PlanAnswer, forecast: Forecast, setting: Mapping[str, str]) -> str:
    """The whole plan. setting: what was asked for, by topic."""
    sections = [
        _model(answer, setting),
        _edges(answer),
        _hosts(answer),
        _relays(answer),
        _time(answer, forecast),
        _impossible(answer),
    ]
    return "\n\n".join("\n".join(lines) for lines in sections if lines)


def several(names: Iterable[str]) -> str:
    """Joins names that differ only in their numbers: "replica-0..3 worker 0..1"."""
    return ", ".join(merge_numbers(names))


def merge_numbers(texts: Iterable[str]) -> list[str]:
    """Merges texts that differ only in their numbers into one text with all numbers."""
    forms: dict[str, list[tuple[int, ...]]] = {}
    for text in dict.fromkeys(texts):
        forms.setdefault(_NUMBER.sub("\0", text), []).append(tuple(map(int, _NUMBER.findall(text))))
    found = []
    for form, numbers in forms.items():
        between = form.split("\0")
        runs = [*(_runs(column) for column in zip(*numbers, strict=True)), ""]
        found.append("".join(text + run for text, run in zip(between, runs, strict=True)))
    return found


def _runs(numbers: Iterable[int]) -> str:
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}..{last}" for first, last in runs)


def _wrapped(first: str, text: str, indent: str = "      ") -> list[str]:
    return textwrap.wrap(
        text,
        COLUMNS,
        initial_indent=first,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _model(answer: PlanAnswer, setting: Mapping[str, str]) -> list[str]:
    model = answer.question.model
    dtypes = ", ".join(f"{human_bytes(size)} {dtype}" for dtype, size in model.by_dtype.items())
    lines = [f"Model: {model.name}, {len(model.tensors)} tensors, {dtypes}"]
    lines += [line for note in model.notes for line in _wrapped("  - ", note)]
    lines += [line for what, words in setting.items() for line in _wrapped(f"  {what}: ", words)]
    return lines


def _edges(answer: PlanAnswer) -> list[str]:
    count = len(answer.installs) + len(answer.fills)
    if not count:
        return []
    lines = [f"Edges: {count}"]
    lines += _alike(answer.fills, "before any pause") if answer.fills else []
    lines += _alike(answer.installs, "in the pause")
    return lines


def _alike(lines: Sequence[Line], when: str) -> Iterator[str]:
    groups: dict[tuple[object, ...], list[Line]] = {}
    for line in lines:
        ends = _NUMBER.sub("", line.edge.source), _NUMBER.sub("", line.edge.reader)
        key = line.choice.transport, line.choice.distance, human_bytes(line.edge.bytes), *ends
        groups.setdefault(key, []).append(line)
    yield f"  {when}:"
    for alike in sorted(groups.values(), key=lambda group: -group[0].edge.bytes)[:_SHOWN]:
        edge, choice = alike[0].edge, alike[0].choice
        size = human_bytes(edge.bytes)
        total = human_bytes(sum(line.edge.bytes for line in alike))
        each = f"{len(alike)} of {size} each, {total} in all" if len(alike) > 1 else size
        between = f"{several(line.edge.source for line in alike)} -> {several(line.edge.reader for line in alike)}"
        more = ", and the others likewise" if len(alike) > 1 else ""
        yield from _wrapped("    ", f"{between}: {each}, by {choice.transport}: {choice.reason}{more}")
    if len(groups) > _SHOWN:
        yield f"    and {len(groups) - _SHOWN} more kinds of edges, each of which is in --json"


_SHOWN = 12


def _hosts(answer: PlanAnswer) -> list[str]:
    by_way: dict[tuple[str, ...], list[str]] = {}
    for host, ways in traffic(answer).items():
        if ways:
            by_way.setdefault(tuple(f"{way} {human_bytes(ways[way])}" for way in sorted(ways)), []).append(host)
    lines = ["Hosts: bytes over each link"] if by_way else []
    for flows, hosts in by_way.items():
        lines += _wrapped("  ", f"{several(hosts)}: {', '.join(flows)}{' each' if len(hosts) > 1 else ''}")
    asks = answer.relays.asks
    if asks:
        passing = {other for shares in asks.values() for other in shares if other}
        words = (
            f"{several(asks)} are filled together: each reads a part from the version's holders and the rest from each "
            f"other; {len(passing)} of them pass on"
        )
        lines += _wrapped("  ", words)
    return lines


def _relays(answer: PlanAnswer) -> list[str]:
    relays = answer.relays
    if not relays.why:
        return []
    groups: dict[tuple[object, ...], list[Relay]] = {}
    for relay in relays.filled.values():
        brings = sum(read.bytes for read in relay.reads)
        groups.setdefault((relay.slot.size, bool(relay.replicas), human_bytes(brings)), []).append(relay)
    lines = ["Relays"]
    for alike in groups.values():
        relay = alike[0]
        size, brings = relay.slot.size, sum(read.bytes for read in relay.reads)
        readers = f"for {several(chain(*(each.replicas for each in alike)))}" if relay.replicas else "a step in between"
        gaps = human_bytes(size - relay.slot.bytes)
        takes, all_of_it = human_bytes(size), human_bytes(SLOTS * size)
        words = (
            f"{several(each.name for each in alike)}: {readers}; brings {human_bytes(brings)} and takes {takes} of "
            f"memory a version ({gaps} of it gaps), so --memory of {all_of_it} or more for {SLOTS}"
        )
        lines += _wrapped("  ", words)
    names_by_reason: dict[str, list[str]] = {}
    for name, why in relays.why.items():
        if name not in relays.filled:
            names_by_reason.setdefault(why.removeprefix(name), []).append(name)
    for why, names in names_by_reason.items():
        lines += _wrapped("  ", f"{several(names)}{_short(why)}")
    return lines


def _short(text: str, most: int = 240) -> str:
    return text if len(text) <= most else f"{text[:most]}… (--json has all of it)"


def _time(answer: PlanAnswer, forecast: Forecast) -> list[str]:
    if not forecast.stages:
        return []
    lines = ["Time: at the rates of each link, of any update but the first"]
    for stage, expected in forecast.stages.items():
        because = f"  {expected.because}" if expected.because else "  measured, whatever the bytes"
        lines.append(f"  {stage:<10}{seconds(expected.seconds):>9}{because}")
    if forecast.unknown:
        names = ", ".join(forecast.unknown)
        lines += _wrapped("  ", f"nothing is known of the rate of {names}, so neither is the pause: give it in --rates")
    if forecast.unmeasured:
        words = f"no update was measured of engine {forecast.unmeasured}, so the pause is not known"
        lines += _wrapped("  ", words)
    if forecast.pause is not None and forecast.call is not None:
        call = f"the whole call: {seconds(forecast.call)}"
        lines.append(f"  pause of the slowest replica: {seconds(forecast.pause)}; {call}")
    lines += _wrapped("  ", f"rates: {SOURCE}, unless --network or --rates says another")
    return lines


def seconds(value: float) -> str:
    """Formats seconds for people: "43 ms", "3.3 s"."""
    return f"{value * 1000:.3g} ms" if value < 1 else f"{value:.3g} s" if value < 1000 else f"{value:.0f} s"


def _impossible(answer: PlanAnswer) -> list[str]:
    if not answer.impossible:
        return []
    reasons = merge_numbers(answer.impossible)
    lines = ["Impossible", *(line for why in reasons[:_SHOWN] for line in _wrapped("  - ", why))]
    return [*lines, *([f"  and {len(reasons) - _SHOWN} more, in --json"] if len(reasons) > _SHOWN else [])]
