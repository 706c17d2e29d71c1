"""Prometheus metrics of one relay: its session, and what it has brought since it started."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from ckpt_engine.scraping import labelled
from ckpt_engine.v1 import manager_pb2


@dataclass
class RelayState:
    """What a relay tells about itself.

    connected: it has a session with the manager. filling: it brings a version now. held, failed: fillings that ended
    so. brought_bytes, brought_seconds: of those that are held, without waiting for readers.
    """

    relay: str = ""
    connected: bool = False
    filling: bool = False
    held: int = 0
    failed: int = 0
    brought_bytes: int = 0
    brought_seconds: float = 0.0
    _before: dict[int, tuple[int, float]] = field(default_factory=dict)

    def filled(self, report: manager_pb2.RelayFilled, slot: int, more: bool) -> None:
        """A version is held. more: what the slot lacked was brought, and what is told is that and what was told before
        together."""
        size, seconds = self._before.get(slot, (0, 0.0)) if more else (0, 0.0)
        self._before[slot] = sum(each.bytes for each in report.brought), report.fill_seconds
        self.held += not more
        self.brought_bytes += self._before[slot][0] - size
        self.brought_seconds += report.fill_seconds - seconds


def of_relay(state: RelayState) -> Iterable[Metric]:
    """All metrics, with the relay's name as the only label beside outcomes."""
    gauges = {
        "ckpt_engine_relay_session": ("1 while the relay has a session with the manager.", state.connected),
        "ckpt_engine_relay_filling": ("1 while the relay brings a version into its memory.", state.filling),
    }
    yield from labelled(GaugeMetricFamily, "relay", state.relay, gauges)
    fillings = CounterMetricFamily("ckpt_engine_relay_fillings", "Versions to be brought.", labels=("relay", "outcome"))
    fillings.add_metric((state.relay, "held"), state.held)
    fillings.add_metric((state.relay, "failed"), state.failed)
    yield fillings
    counters = {
        "ckpt_engine_relay_brought_bytes": ("Bytes that were brought for versions held.", state.brought_bytes),
        "ckpt_engine_relay_brought_seconds": ("What that took, without waiting for readers.", state.brought_seconds),
    }
    yield from labelled(CounterMetricFamily, "relay", state.relay, counters)
