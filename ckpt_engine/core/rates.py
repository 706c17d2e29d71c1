"""How fast hosts send and receive, and which are slow. Pure.

A host is measured only while it could have sent more: while a reader had asked it for something that it had. It is at
least as fast as the best of what some of its connections carried together. So a host is not called slow because it
sends to one slow reader, or reads from one slow parent.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

LEAF_BELOW = 0.55
"""Share of the usual rate: a slower host passes nothing on. One half is meant; a host at half the rate does not measure
as exactly that."""

EVIDENCE_SECONDS = 0.25
"""How long a host must be measured in one filling before it may count as slow: with less it delayed no reader."""

MEASURED = 2
"""Fillings. The best of them counts, so that a single disturbed one makes no host slow."""

TRIED_AGAIN = 16
"""Fillings without a measurement until a slow host is tried again: a leaf sends nothing that could be measured."""


class Flow(NamedTuple):
    """A stretch of time in which one connection had something to carry."""

    start: float  # seconds of one clock
    stop: float
    bytes: int  # that it carried


class Rate(NamedTuple):
    """How fast something was sent or received."""

    per_second: float  # bytes
    seconds: float  # how long that was measured


Turn = tuple[int, int]
"""Epoch and attempt of a filling."""


def rate_of(connections: Collection[Sequence[Flow]]) -> Rate | None:
    """The least that a host can carry over all its connections: the best rate of the fastest one, the two fastest, and
    so on. None: nothing was carried."""
    by_rate = [(rate, flows) for flows in connections if (rate := _rate(flows)) is not None]
    by_rate.sort(key=lambda each: -each[0].per_second)
    best: Rate | None = None
    all_flows: list[Flow] = []
    for _, flows in by_rate:
        all_flows += flows
        rate = _rate(all_flows)
        if rate is not None and (best is None or rate.per_second > best.per_second):
            best = rate
    return best


def _rate(flows: Sequence[Flow]) -> Rate | None:
    seconds, until = 0.0, float("-inf")
    for start, stop, _ in sorted(flows):
        seconds += max(0.0, stop - max(start, until))
        until = max(until, stop)
    total = sum(flow.bytes for flow in flows)
    return Rate(total / seconds, seconds) if seconds > 0 and total > 0 else None


@dataclass
class Measured:
    """The rates that one relay process reported of its last fillings."""

    sent: dict[Turn, Rate] = field(default_factory=dict)
    received: dict[Turn, Rate] = field(default_factory=dict)
    unsent: int = 0  # fillings since the last one in which it sent
    _last: Turn = (0, 0)

    def filled(self, turn: Turn, sent: Rate | None, received: Rate | None) -> None:
        """Takes the rates of a filling that has ended. A repeated report counts once."""
        if turn > self._last:
            self._last = turn
            self.unsent += 1
            if self.unsent >= TRIED_AGAIN:
                _keep(self.sent, 1)
        if sent is not None:
            self.passed_on(turn, sent)
        if received is not None:
            self.received[turn] = received
            _keep(self.received, MEASURED)

    def passed_on(self, turn: Turn, sent: Rate) -> None:
        """Takes the rate at which it has sent in a filling so far."""
        self.sent[turn] = sent
        _keep(self.sent, MEASURED)
        self.unsent = 0


def slow(measured: Mapping[str, Measured]) -> dict[str, str]:
    """The hosts that must pass nothing on, by name, each with the reason as a predicate of the name."""
    found: dict[str, str] = {}
    sent = {name: list(each.sent.values()) for name, each in measured.items()}
    received = {name: list(each.received.values()) for name, each in measured.items()}
    for what, rates in (("sent", sent), ("received", received)):
        best = {name: max(rate.per_second for rate in each) for name, each in rates.items() if each}
        usual = median(best.values()) if best else 0.0
        for name, rate in best.items():
            is_measured = len(rates[name]) == MEASURED and all(each.seconds >= EVIDENCE_SECONDS for each in rates[name])
            if is_measured and rate < LEAF_BELOW * usual:
                found.setdefault(
                    name,
                    f"{what} {_mega(rate)} at most in each of the last {MEASURED} fillings in which that was measured, "
                    f"and relays usually do {_mega(usual)}",
                )
    return found


def _mega(rate: float) -> str:
    return f"{rate / 1e6:.0f} MB/s" if rate >= 10e6 else f"{rate / 1e6:.2g} MB/s"


def _keep(rates: dict[Turn, Rate], most: int) -> None:
    for turn in sorted(rates)[:-most]:
        del rates[turn]
