"""How fast a host sends and receives, and who is slow. Pure.

Only times count in which a host could have sent more: somebody had asked it for something that was there. It is at
least as fast as the best of what some of its connections carried together, so whoever sends to one slow reader is not
slow, nor whoever reads one slow parent.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

from ckpt_engine.core.fan_out import LEAF_BELOW

EVIDENCE_SECONDS = 0.25
"""How long a host was measured in one filling before it may count as slow: who sent for less held nobody up."""

MEASURED = 2
"""Fillings. The best of them counts, so one that was disturbed makes nobody slow."""

TRIED_AGAIN = 16
"""Fillings without a measurement until whoever was slow is tried once more: a leaf sends nothing that could be
measured."""


class Flow(NamedTuple):
    """A stretch of time in which one connection carried bytes.

    start, stop: seconds of one clock, between which a connection had something to carry. bytes: that it carried.
    """

    start: float
    stop: float
    bytes: int


class Rate(NamedTuple):
    """How fast something was sent or received.

    per_second: bytes. seconds: in how many that was measured.
    """

    per_second: float
    seconds: float


Turn = tuple[int, int]
"""Epoch and attempt of a filling."""


def rate_of(connections: Collection[Sequence[Flow]]) -> Rate | None:
    """What a host carries over all of them at least: the best of the fastest, the two fastest, and so on; None if there
    is nothing to go by."""
    alone = [(rate, flows) for flows in connections if (rate := _rate(flows)) is not None]
    alone.sort(key=lambda each: -each[0].per_second)
    best: Rate | None = None
    together: list[Flow] = []
    for _, flows in alone:
        together += flows
        rate = _rate(together)
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
    """What one relay process said of its last fillings. unsent: how many there were since it was seen to send."""

    sent: dict[Turn, Rate] = field(default_factory=dict)
    received: dict[Turn, Rate] = field(default_factory=dict)
    unsent: int = 0
    _last: Turn = (0, 0)

    def filled(self, turn: Turn, sent: Rate | None, received: Rate | None) -> None:
        """A filling has ended. Said again of the same filling, it counts once."""
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
        """What it has sent of a filling, all that is known by now."""
        self.sent[turn] = sent
        _keep(self.sent, MEASURED)
        self.unsent = 0


def slow(measured: Mapping[str, Measured]) -> dict[str, str]:
    """Hosts that are to pass nothing on: by name why, to go on after the name."""
    found: dict[str, str] = {}
    sent = {name: list(each.sent.values()) for name, each in measured.items()}
    received = {name: list(each.received.values()) for name, each in measured.items()}
    for what, rates in (("sent", sent), ("received", received)):
        best = {name: max(rate.per_second for rate in each) for name, each in rates.items() if each}
        usual = median(best.values()) if best else 0.0
        for name, rate in best.items():
            known = len(rates[name]) == MEASURED and all(each.seconds >= EVIDENCE_SECONDS for each in rates[name])
            if known and rate < LEAF_BELOW * usual:
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
