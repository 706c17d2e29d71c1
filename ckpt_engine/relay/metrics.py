"""Prometheus metrics of one relay: its session, and what it has brought since it started."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from ckpt_engine.scraping import labelled
from ckpt_engine.v1 import manager_pb2


@dataclass
class RelayState:
    """The state of a relay that its metrics show."""

    relay: str = ""
    connected: bool = False  # it has a session with the manager
    filling: bool = False  # it brings a version now
    held: int = 0  # fillings that ended well
    failed: int = 0
    brought_bytes: int = 0  # of versions that are held
    brought_seconds: float = 0.0  # the same, without waiting for readers
    network_bytes: int = 0  # that other relays sent for them
    delta_bytes: int = 0  # of what came as what had changed, in full
    changed_bytes: int = 0  # of the elements of these that differ
    _before: dict[int, manager_pb2.RelayFilled] = field(default_factory=dict)  # by slot: of its filling

    def filled(self, report: manager_pb2.RelayFilled, slot: int, more: bool) -> None:
        """Counts a version that is held. more: missing cells were brought, and the report includes the former one."""
        before = self._before.get(slot) if more else None
        before = before or manager_pb2.RelayFilled()
        self._before[slot] = report
        self.held += not more
        self.brought_bytes += sum(each.bytes for each in report.brought) - sum(each.bytes for each in before.brought)
        self.brought_seconds += report.fill_seconds - before.fill_seconds
        self.network_bytes += report.network_bytes - before.network_bytes
        self.delta_bytes += report.delta_bytes - before.delta_bytes
        self.changed_bytes += report.changed_bytes - before.changed_bytes


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
        "ckpt_engine_relay_network_bytes": ("Bytes that other relays sent for versions held.", state.network_bytes),
        "ckpt_engine_relay_delta_bytes": (
            "Bytes that the chunks which came as deltas have in full.",
            state.delta_bytes,
        ),
        "ckpt_engine_relay_changed_bytes": ("Bytes of these that had changed.", state.changed_bytes),
    }
    yield from labelled(CounterMetricFamily, "relay", state.relay, counters)
