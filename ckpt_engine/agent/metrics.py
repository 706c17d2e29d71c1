"""Prometheus metrics of one agent, in a registry of their own: its engine, its gate, its manager.

Everything is read at the scrape, on the thread of the HTTP server, from what the agent keeps anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ckpt_engine.addresses import join_address, split_address
from ckpt_engine.core.problems import unavailable
from ckpt_engine.words.counts import counted


@dataclass
class AgentState:
    """What an agent tells about itself. directory: the engine's; None: it has none yet.

    connected: it has a session with the manager. up: the engine answers. starts: how often it has come up.
    """

    replica: str = ""
    directory: Path | None = None
    connected: bool = False
    up: bool = False
    starts: int = 0


class _Now(Collector):
    def __init__(self, state: Callable[[], AgentState]) -> None:
        self._state = state

    def describe(self) -> Iterable[Metric]:
        """Nothing: the registry must not ask before the agent runs."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """Everything, with the replica's name as the only label beside reasons."""
        state = self._state()
        name = (state.replica,)
        gauges = {
            "ckpt_engine_agent_connected": ("1 while the agent has a session with the manager.", state.connected),
            "ckpt_engine_engine_up": ("1 while the engine answers its agent.", state.up),
        }
        for metric, (words, value) in gauges.items():
            gauge = GaugeMetricFamily(metric, words, labels=("replica",))
            gauge.add_metric(name, int(value))
            yield gauge
        starts = CounterMetricFamily("ckpt_engine_engine_starts", "How often the engine came up.", labels=("replica",))
        starts.add_metric(name, state.starts)
        yield starts
        if state.directory is not None:
            yield from _of_gate(name[0], state.directory)


def _of_gate(replica: str, directory: Path) -> Iterable[Metric]:
    counts = counted(directory)
    held = GaugeMetricFamily("ckpt_engine_gate_held_requests", "Requests that wait now.", labels=("replica",))
    held.add_metric((replica,), counts.held)
    yield held
    kept = CounterMetricFamily("ckpt_engine_gate_held", "Requests that waited for an update.", labels=("replica",))
    kept.add_metric((replica,), counts.held_total)
    yield kept
    waited = CounterMetricFamily("ckpt_engine_gate_held_seconds", "How long they waited.", labels=("replica",))
    waited.add_metric((replica,), counts.held_seconds)
    yield waited
    refusals = CounterMetricFamily(
        "ckpt_engine_gate_refusals", "Requests that were answered 503.", labels=("replica", "reason")
    )
    for reason, number in counts.refusals.items():
        refusals.add_metric((replica, reason), number)
    yield refusals


def registry_of(state: Callable[[], AgentState]) -> CollectorRegistry:
    """A registry with the agent's metrics and its process's figures."""
    registry = CollectorRegistry()
    registry.register(_Now(state))
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    GCCollector(registry=registry)
    return registry


@contextmanager
def scraped_at(address: str, state: Callable[[], AgentState]) -> Iterator[str]:
    """Serves `/metrics` at host:port on a thread of its own; gives the address as bound. Empty: nowhere.

    Raises CkptEngineError: the address is none (INVALID_ARGUMENT), or cannot be had (UNAVAILABLE).
    """
    if not address:
        yield ""
        return
    host, port = split_address(address, "--metrics")
    try:
        server, thread = start_http_server(port, host, registry_of(state))
    except OSError as error:
        raise unavailable(f"cannot listen on {address} for metrics (--metrics): {error.strerror}") from error
    try:
        yield join_address(host, server.server_port)
    finally:
        server.shutdown()
        server.server_close()
        thread.join(2.0)
