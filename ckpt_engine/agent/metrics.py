"""Prometheus metrics of one agent: its engine, its gate, its manager."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from ckpt_engine.gate.counts import total_counts
from ckpt_engine.scraping import labelled
from ckpt_engine.v1 import manager_pb2


@dataclass
class AgentState:
    """An agent's state, for its metrics."""

    replica: str = ""
    directory: Path | None = None  # of the engine; None: there is none yet
    connected: bool = False  # it has a session with the manager
    up: bool = False  # the engine answers
    starts: int = 0  # how often the engine came up
    scrubs: dict[int, manager_pb2.WorkerScrub] = field(default_factory=dict)  # as its workers told them last, by rank


def of_agent(state: AgentState) -> Iterable[Metric]:
    """All metrics. Their labels are the replica's name and, of refusals, the reason."""
    gauges = {
        "ckpt_engine_agent_connected": ("1 while the agent has a session with the manager.", state.connected),
        "ckpt_engine_engine_up": ("1 while the engine answers its agent.", state.up),
    }
    yield from labelled(GaugeMetricFamily, "replica", state.replica, gauges)
    starts = {"ckpt_engine_engine_starts": ("How often the engine came up.", state.starts)}
    yield from labelled(CounterMetricFamily, "replica", state.replica, starts)
    yield from _of_scrubs(state.replica, list(state.scrubs.values()))
    if state.directory is not None:
        yield from _of_gate(state.replica, state.directory)


def _of_scrubs(replica: str, scrubs: list[manager_pb2.WorkerScrub]) -> Iterable[Metric]:
    counters = {
        "ckpt_engine_worker_scrub_passes": (
            "How often all parameters were hashed again, of the worker that is furthest behind.",
            min((scrub.passes for scrub in scrubs), default=0),
        ),
        "ckpt_engine_worker_scrub_differences": (
            "Parts of them that did not hash to what was sealed.",
            sum(scrub.differences for scrub in scrubs),
        ),
    }
    yield from labelled(CounterMetricFamily, "replica", replica, counters)


def _of_gate(replica: str, directory: Path) -> Iterable[Metric]:
    counts = total_counts(directory)
    gauges = {"ckpt_engine_gate_held_requests": ("Requests that wait now.", counts.held)}
    yield from labelled(GaugeMetricFamily, "replica", replica, gauges)
    counters = {
        "ckpt_engine_gate_held": ("Requests that waited for an update.", counts.held_total),
        "ckpt_engine_gate_held_seconds": ("How long they waited.", counts.held_seconds),
        "ckpt_engine_gate_answered": ("Requests that were let in, and have ended.", counts.answered),
        "ckpt_engine_gate_failed": ("Of these, those that the engine answered with 5xx, or broke off.", counts.failed),
    }
    yield from labelled(CounterMetricFamily, "replica", replica, counters)
    refusals = CounterMetricFamily(
        "ckpt_engine_gate_refusals", "Requests that were answered 503.", labels=("replica", "reason")
    )
    for reason, number in counts.refusals.items():
        refusals.add_metric((replica, reason), number)
    yield refusals
