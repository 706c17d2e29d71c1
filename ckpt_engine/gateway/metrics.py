"""A gateway's Prometheus metrics. The numbers of several worker processes are added up."""

from __future__ import annotations

import os

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

TOGETHER = "PROMETHEUS_MULTIPROC_DIR"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class GatewayMetrics:
    """The metrics of one process. Used on the gateway's loop."""

    def __init__(self) -> None:
        registry = self._registry = CollectorRegistry()
        self.requests = Counter(
            "ckpt_engine_gateway_requests", "Answers by route and how they ended", ["route", "ended"], registry=registry
        )
        self.first_token = Histogram(
            "ckpt_engine_gateway_first_token_seconds",
            "From a request's arrival to its first token",
            buckets=_SECONDS,
            registry=registry,
        )
        self.legs = Counter(
            "ckpt_engine_gateway_legs", "Requests to engines by how they ended", ["replica", "ended"], registry=registry
        )
        self.resumes = Counter(
            "ckpt_engine_gateway_resumes", "Legs that went on after another", ["replica"], registry=registry
        )
        self.prefilled_again = Counter(
            "ckpt_engine_gateway_prefilled_again_tokens",
            "Tokens of prompts and outputs that a resumed leg brought to an engine once more",
            ["replica"],
            registry=registry,
        )
        self.cached = Counter(
            "ckpt_engine_gateway_cached_tokens",
            "Prompt tokens that engines found in their caches, where they say so",
            ["replica"],
            registry=registry,
        )
        self.inside = Gauge(
            "ckpt_engine_gateway_requests_inside",
            "Requests that run or wait now",
            registry=registry,
            multiprocess_mode="livesum",
        )

    def exposition(self) -> bytes:
        """The metrics in Prometheus' text format: this process's, or all worker processes' together."""
        if TOGETHER not in os.environ:
            return generate_latest(self._registry)
        all_processes = CollectorRegistry()
        MultiProcessCollector(all_processes)  # type: ignore[no-untyped-call]
        return generate_latest(all_processes)
