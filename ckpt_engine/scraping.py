"""Serves metrics to Prometheus for a process without an HTTP server of its own: an agent, a relay.

The numbers are read at the scrape, on the server's thread, from the process's state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ckpt_engine.addresses import join_address, split_address
from ckpt_engine.core.problems import unavailable


def labelled(
    family: type[GaugeMetricFamily] | type[CounterMetricFamily],
    label: str,
    name: str,
    found: Mapping[str, tuple[str, float]],
) -> Iterator[Metric]:
    """Metrics with one number and one label each. label, name: the label and its value. found: help and number, by the
    metric's name."""
    for metric, (words, number) in found.items():
        metric_family = family(metric, words, labels=(label,))
        metric_family.add_metric((name,), number)
        yield metric_family


class _Now(Collector):
    def __init__(self, collect: Callable[[], Iterable[Metric]]) -> None:
        self._collect = collect

    def describe(self) -> Iterable[Metric]:
        """Returns nothing: the registry must not collect before the process runs."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """The current metrics."""
        return self._collect()


def registry_of(collect: Callable[[], Iterable[Metric]]) -> CollectorRegistry:
    """A registry with the metrics of `collect` and those of the process."""
    registry = CollectorRegistry()
    registry.register(_Now(collect))
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    GCCollector(registry=registry)
    return registry


@contextmanager
def scraped_at(address: str, collect: Callable[[], Iterable[Metric]]) -> Iterator[str]:
    """Serves `/metrics` at host:port (--metrics) on a thread of its own; gives the address as bound. Empty: nowhere.

    Raises CkptEngineError: INVALID_ARGUMENT for an invalid address, UNAVAILABLE for one that cannot be bound.
    """
    if not address:
        yield ""
        return
    host, port = split_address(address, "--metrics")
    try:
        server, thread = start_http_server(port, host, registry_of(collect))
    except OSError as error:
        raise unavailable(f"cannot listen on {address} for metrics (--metrics): {error.strerror}") from error
    try:
        yield join_address(host, server.server_port)
    finally:
        server.shutdown()
        server.server_close()
        thread.join(2.0)
