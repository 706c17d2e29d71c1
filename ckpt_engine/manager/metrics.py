"""Prometheus metrics of one manager, in a registry of their own.

Counters and histograms are fed from reports as updates end; gauges are read from the manager's status when somebody
scrapes. Labels are closed sets: neither replica names nor lineages become labels, since both grow without bound.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ckpt_engine.manager.about import software_version
from ckpt_engine.manager.blobs import BlobStore
from ckpt_engine.v1 import manager_pb2

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
REPLICA_STATES = ("serving", "asleep", "closed", "disconnected")


def replica_state(replica: manager_pb2.ReplicaStatus) -> str:
    """The one word for a replica: the first of disconnected, asleep, serving, closed that is true."""
    if not replica.connected:
        return "disconnected"
    if replica.asleep:
        return "asleep"
    return "serving" if replica.serving else "closed"


class Metrics:
    """All metrics of a manager. Runs on its event loop thread."""

    def __init__(self, status: Callable[[], manager_pb2.GetStatusResponse], blobs: BlobStore) -> None:
        self.registry = CollectorRegistry()
        self._updates = Counter(
            "ckpt_engine_updates",
            "Updates that ended: ok (every registered replica serves the new weights, or as many as the caller named), "
            "partial, or refused (nothing touched).",
            ("outcome",),
            registry=self.registry,
        )
        self._outcomes = Counter(
            "ckpt_engine_replica_outcomes",
            "How updates ended for single replicas; not_reached: registered, and its agent or engine was not there.",
            ("outcome",),
            registry=self.registry,
        )
        self._update_seconds = Histogram(
            "ckpt_engine_update_seconds",
            "From the last trainer rank's call to the report.",
            buckets=SECONDS,
            registry=self.registry,
        )
        self._stage_seconds = Histogram(
            "ckpt_engine_stage_seconds",
            "Stages of updates: plan is the manager's, the others are the slowest replica's.",
            ("stage",),
            buckets=SECONDS,
            registry=self.registry,
        )
        self._pause_seconds = Histogram(
            "ckpt_engine_pause_seconds",
            "How long one replica produced no token in an update.",
            buckets=SECONDS,
            registry=self.registry,
        )
        self._bytes = Counter(
            "ckpt_engine_transferred_bytes",
            "Bytes that workers read from sources, by transport.",
            ("transport",),
            registry=self.registry,
        )
        for outcome in ("ok", "partial", "refused"):
            self._updates.labels(outcome)
        for outcome in ("new_serving", "old_serving", "quarantined", "not_reached"):
            self._outcomes.labels(outcome)
        self.registry.register(_Gauges(status, blobs))

    def report(self, report: manager_pb2.UpdateReport) -> None:
        """Counts an update that was carried out."""
        self._updates.labels("ok" if report.ok else "partial").inc()
        self._update_seconds.observe(report.seconds)
        for stage in report.stages:
            self._stage_seconds.labels(manager_pb2.Stage.Name(stage.stage).lower()).observe(stage.seconds)
        for replica in report.replicas:
            self._outcomes.labels(manager_pb2.Outcome.Name(replica.outcome).lower()).inc()
            if replica.pause_seconds > 0:
                self._pause_seconds.observe(replica.pause_seconds)
            for edge in replica.edges:
                self._bytes.labels(edge.transport).inc(edge.bytes)

    def refused(self) -> None:
        """Counts an update that was refused before any replica was touched."""
        self._updates.labels("refused").inc()

    def exposition(self) -> bytes:
        """The Prometheus text format."""
        return generate_latest(self.registry)


class _Gauges(Collector):
    """What is true now, read at each scrape."""

    def __init__(self, status: Callable[[], manager_pb2.GetStatusResponse], blobs: BlobStore) -> None:
        self._status = status
        self._blobs = blobs

    def describe(self) -> Iterable[Metric]:
        """Nothing: the registry must not ask for a status before the manager runs."""
        return ()

    def collect(self) -> Iterable[Metric]:
        status = self._status()
        replicas = GaugeMetricFamily("ckpt_engine_replicas", "Registered replicas by state.", labels=("state",))
        states = [replica_state(replica) for replica in status.replicas]
        for state in REPLICA_STATES:
            replicas.add_metric((state,), states.count(state))
        yield replicas
        sessions = GaugeMetricFamily("ckpt_engine_sessions", "Open session streams.", labels=("kind",))
        sessions.add_metric(("trainer",), sum(trainer.connected for trainer in status.trainers))
        sessions.add_metric(("replica",), sum(replica.connected for replica in status.replicas))
        yield sessions
        yield GaugeMetricFamily("ckpt_engine_epoch", "The highest epoch used.", value=status.fence.epoch)
        running = 0 if status.phase in ("", "idle") else 1
        yield GaugeMetricFamily("ckpt_engine_update_running", "1 while an update runs.", value=running)
        version = GaugeMetricFamily("ckpt_engine_latest_version", "The last version sealed; absent before the first.")
        if status.HasField("latest"):
            version.add_metric((), status.latest.version)
        yield version
        yield GaugeMetricFamily("ckpt_engine_blob_bytes", "Bytes of stored blobs.", value=self._blobs.stored_bytes)
        yield GaugeMetricFamily("ckpt_engine_blobs", "Stored blobs.", value=len(self._blobs))
        build = GaugeMetricFamily("ckpt_engine_build", "Always 1; the software's version.", labels=("version",))
        build.add_metric((software_version(),), 1)
        yield build
