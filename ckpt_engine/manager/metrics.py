"""Prometheus metrics of one manager, in a registry of their own.

Counters and histograms are fed from reports as updates end; gauges are read from the manager's status at each scrape.
Labels are closed sets. Lineages are not labels, since they grow without bound. Names of replicas are labels of gauges
only, which end with the replica.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from prometheus_client import (
    CollectorRegistry,
    Counter,
    GCCollector,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ckpt_engine.core.enums import enum_label
from ckpt_engine.core.probe import is_bad, known_figures
from ckpt_engine.core.problems import ErrorCode
from ckpt_engine.core.scrub import oldest_pass, share
from ckpt_engine.machines.manager.status import REPLICA_STATES, replica_state
from ckpt_engine.manager.about import software_version
from ckpt_engine.manager.blobs import BlobStore
from ckpt_engine.v1 import manager_pb2, weights_pb2

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


REASONS = tuple(code.lower() for code in ErrorCode)
"""Why an update can be refused: the codes of problems."""


class ManagerMetrics:
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
        self._refusals = Counter(
            "ckpt_engine_update_refusals",
            "Updates that were refused, by the code of the problem.",
            ("reason",),
            registry=self.registry,
        )
        self._not_finite = Counter(
            "ckpt_engine_updates_not_finite",
            "Updates that were carried out with weights that hold NaN or infinity.",
            registry=self.registry,
        )
        self._differences = Counter(
            "ckpt_engine_scrub_differences",
            "Differences that scrubs found between what replicas held and what was sealed, once an update mended them.",
            registry=self.registry,
        )
        self._gather_seconds = Histogram(
            "ckpt_engine_gather_seconds",
            "From the first trainer rank's call of an update to the last one's: what ranks waited for each other.",
            buckets=SECONDS,
            registry=self.registry,
        )
        self._seal_seconds = Histogram(
            "ckpt_engine_seal_seconds",
            "What one rank took to copy its weights, where its source needs a copy, and to digest them.",
            ("part",),
            buckets=SECONDS,
            registry=self.registry,
        )
        self._calls: dict[str, tuple[float, float]] = {}
        self._current = _Current(status, blobs)
        for reason in REASONS:
            self._refusals.labels(reason)
        for part in ("copy", "digest"):
            self._seal_seconds.labels(part)
        for outcome in ("ok", "partial", "refused"):
            self._updates.labels(outcome)
        for outcome in ("new_serving", "old_serving", "quarantined", "not_reached"):
            self._outcomes.labels(outcome)
        self.registry.register(self._current)
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        GCCollector(registry=self.registry)

    def called(self, lineage: str) -> None:
        """Notes that a rank calls an update of this run."""
        now = time.monotonic()
        first, _ = self._calls.get(lineage, (now, now))
        self._calls[lineage] = (first, now)

    def forget_calls(self, lineage: str) -> None:
        """Forgets the calls of a run, since none of its ranks is in a call any more."""
        self._calls.pop(lineage, None)

    def sealed(self, sealed: manager_pb2.Sealed) -> None:
        """Records the times of a rank's seal, unless it failed."""
        if not sealed.HasField("problem"):
            self._seal_seconds.labels("copy").observe(sealed.copy_seconds)
            self._seal_seconds.labels("digest").observe(sealed.digest_seconds)

    def report(self, report: manager_pb2.UpdateReport) -> None:
        """Counts an update that was carried out."""
        if (calls := self._calls.pop(report.identity.lineage, None)) is not None:
            self._gather_seconds.observe(calls[1] - calls[0])
        if report.ok:
            self.succeeded(time.time())
        self._updates.labels("ok" if report.ok else "partial").inc()
        self._not_finite.inc(bool(report.not_finite))
        self._update_seconds.observe(report.seconds)
        for stage in report.stages:
            self._stage_seconds.labels(enum_label(manager_pb2.Stage, stage.stage)).observe(stage.seconds)
        self._current.took(
            [each.replica for each in report.replicas if each.outcome == manager_pb2.OUTCOME_NEW_SERVING]
        )
        for replica in report.replicas:
            self._differences.inc(len(replica.differences))
            self._outcomes.labels(enum_label(manager_pb2.Outcome, replica.outcome)).inc()
            if replica.pause_seconds > 0:
                self._pause_seconds.observe(replica.pause_seconds)
            for edge in replica.edges:
                self._bytes.labels(edge.transport).inc(edge.bytes)

    def succeeded(self, at: float) -> None:
        """Notes that an update succeeded at this Unix time; also for one that the ledger has from before the start."""
        self._current.success = at

    def refused(self, problem: weights_pb2.Problem) -> None:
        """Counts an update that was refused before any replica was touched."""
        self._updates.labels("refused").inc()
        self._refusals.labels(reason_of(problem)).inc()

    def exposition(self) -> bytes:
        """The Prometheus text format."""
        return generate_latest(self.registry)


def reason_of(problem: weights_pb2.Problem) -> str:
    """The label of a problem, from a fixed list."""
    return enum_label(weights_pb2.Problem.Code, problem.code)


class _Current(Collector):
    """Gauges of the current state, read at each scrape."""

    def __init__(self, status: Callable[[], manager_pb2.GetStatusResponse], blobs: BlobStore) -> None:
        self._status = status
        self._blobs = blobs
        self.success = 0.0  # when an update last succeeded, Unix seconds
        self.replicas: dict[str, float] = {}  # when each replica last took a version, Unix seconds

    def took(self, names: Sequence[str]) -> None:
        """Notes that these replicas have taken a version now. If one of them is new, replicas that are gone are
        forgotten, since there may never be a scrape."""
        if not self.replicas.keys() >= set(names):
            self._forget_gone(self._status())
        self.replicas |= dict.fromkeys(names, time.time())

    def _forget_gone(self, status: manager_pb2.GetStatusResponse) -> None:
        registered = {replica.name for replica in status.replicas}
        self.replicas = {name: at for name, at in self.replicas.items() if name in registered}

    def describe(self) -> Iterable[Metric]:
        """Describes nothing: the registry must not ask for a status before the manager runs."""
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
        sessions.add_metric(("holder",), sum(holder.connected for holder in status.holders))
        sessions.add_metric(("replica",), sum(replica.connected for replica in status.replicas))
        yield sessions
        yield GaugeMetricFamily("ckpt_engine_epoch", "The highest epoch used.", value=status.fence.epoch)
        running = 0 if status.phase in ("", "idle") else 1
        yield GaugeMetricFamily("ckpt_engine_update_running", "1 while an update runs.", value=running)
        version = GaugeMetricFamily("ckpt_engine_latest_version", "The last version sealed; absent before the first.")
        if status.HasField("latest"):
            version.add_metric((), status.latest.version)
        yield version
        since = GaugeMetricFamily(
            "ckpt_engine_since_success_seconds", "Since an update last ended well; absent before the first."
        )
        if self.success:
            since.add_metric((), max(0.0, time.time() - self.success))
        yield since
        yield from self._of_replicas(status)
        yield from _of_scrubs(status)
        yield from _of_probes(status)
        yield from _of_relays(status)
        yield GaugeMetricFamily("ckpt_engine_blob_bytes", "Bytes of stored blobs.", value=self._blobs.stored_bytes)
        yield GaugeMetricFamily("ckpt_engine_blobs", "Stored blobs.", value=len(self._blobs))
        build = GaugeMetricFamily("ckpt_engine_build", "Always 1; the software's version.", labels=("version",))
        build.add_metric((software_version(),), 1)
        yield build

    def _of_replicas(self, status: manager_pb2.GetStatusResponse) -> Iterable[Metric]:
        """One series for each registered replica, which vanishes with it."""
        state = GaugeMetricFamily("ckpt_engine_replica_state", "1 for its state now.", labels=("replica", "state"))
        version = GaugeMetricFamily(
            "ckpt_engine_replica_version", "What its workers hold; absent if they do not agree.", labels=("replica",)
        )
        lag = GaugeMetricFamily(
            "ckpt_engine_replica_lag_versions",
            "How far it is behind the last version sealed; absent while it holds none of the same run.",
            labels=("replica",),
        )
        since = GaugeMetricFamily(
            "ckpt_engine_replica_since_success_seconds",
            "Since it last took a version; absent before, and after a restart of the manager.",
            labels=("replica",),
        )
        drift = GaugeMetricFamily(
            "ckpt_engine_replica_drift_seconds",
            "For how long it has not held what it is to serve; 0: it does, or nothing is meant for it.",
            labels=("replica",),
        )
        held = GaugeMetricFamily(
            "ckpt_engine_replica_held", "1 while an operator holds it: no update is for it.", labels=("replica",)
        )
        scrub_age = GaugeMetricFamily(
            "ckpt_engine_replica_scrub_age_seconds",
            "Since all that its scrubs compare was last found right, of its worker that is furthest behind; absent "
            "before its first pass, and without scrubs.",
            labels=("replica",),
        )
        scrub_share = GaugeMetricFamily(
            "ckpt_engine_replica_scrub_share",
            "The share of its model's bytes that its scrubs compare; absent without scrubs.",
            labels=("replica",),
        )
        differences = GaugeMetricFamily(
            "ckpt_engine_replica_scrub_differences",
            "Differences that the scrubs of its present workers have found.",
            labels=("replica",),
        )
        self._forget_gone(status)
        for replica in status.replicas:
            if replica.scrubs:
                scrub_share.add_metric((replica.name,), share(replica.scrubs))
                differences.add_metric((replica.name,), sum(each.differences for each in replica.scrubs))
            if (at := oldest_pass(replica.scrubs)) is not None:
                scrub_age.add_metric((replica.name,), max(0.0, time.time() - at))
            drift.add_metric((replica.name,), replica.drift.seconds)
            held.add_metric((replica.name,), int(replica.HasField("hold")))
            for each in REPLICA_STATES:
                state.add_metric((replica.name, each), int(each == replica_state(replica)))
            if replica.HasField("identity"):
                version.add_metric((replica.name,), replica.identity.version)
                if status.HasField("latest") and status.latest.lineage == replica.identity.lineage:
                    lag.add_metric((replica.name,), status.latest.version - replica.identity.version)
            if replica.name in self.replicas:
                since.add_metric((replica.name,), max(0.0, time.time() - self.replicas[replica.name]))
        yield from (state, version, lag, since, drift, held, scrub_age, scrub_share, differences)


def _of_scrubs(status: manager_pb2.GetStatusResponse) -> Iterable[Metric]:
    """The scrubs of all connected replicas together."""
    scrubs = [scrub for replica in status.replicas if replica.connected for scrub in replica.scrubs]
    yield GaugeMetricFamily(
        "ckpt_engine_scrub_bytes", "Bytes that scrubs compare.", value=sum(each.bytes for each in scrubs)
    )
    yield GaugeMetricFamily(
        "ckpt_engine_unscrubbed_bytes",
        "Bytes of models that scrubs cannot compare with what was sealed.",
        value=sum(each.bytes for scrub in scrubs for each in scrub.unscrubbed),
    )
    age = GaugeMetricFamily(
        "ckpt_engine_scrub_age_seconds",
        "Since the worker whose scrub is furthest behind ended its last pass; absent while one has ended none.",
    )
    if (at := oldest_pass(scrubs)) is not None:
        age.add_metric((), max(0.0, time.time() - at))
    yield age


def _of_probes(status: manager_pb2.GetStatusResponse) -> Iterable[Metric]:
    """Of each replica that answered the probe of the version that it installed last."""
    gauges = {
        name: GaugeMetricFamily(f"ckpt_engine_replica_probe_{name}", words, labels=("replica", "compared"))
        for name, words in (
            ("mean", "Mean difference of log-probabilities of the probe's tokens, nats."),
            ("p99", "The difference that 99 of 100 tokens do not exceed, nats."),
            ("largest", "The largest difference, nats."),
            ("kl", "The k3 estimate of the divergence, nats."),
            ("clipped", "The share of tokens with a ratio of probabilities outside of the clip."),
            ("flips", "The share of places with another likeliest token; absent if one side does not tell it."),
        )
    }
    bad = GaugeMetricFamily(
        "ckpt_engine_replica_probe_bad",
        "1 if its engine broke a bound of the last probe, or gave no answer; absent if it was not asked.",
        labels=("replica",),
    )
    for replica in status.replicas:
        if not replica.last_outcome.HasField("probe"):
            continue
        answer = replica.last_outcome.probe
        bad.add_metric((replica.name,), int(is_bad(answer)))
        for compared in ("engine", "before", "cached"):
            if answer.HasField(compared):
                for name, value in known_figures(getattr(answer, compared)).items():
                    gauges[name].add_metric((replica.name, compared), value)
    yield from (bad, *gauges.values())


def _of_relays(status: manager_pb2.GetStatusResponse) -> Iterable[Metric]:
    """One series for each holder that can be filled, which vanishes with it."""

    def gauge(name: str, words: str) -> GaugeMetricFamily:
        return GaugeMetricFamily(f"ckpt_engine_relay_{name}", words, labels=("relay",))

    connected = gauge("connected", "1 while it has a session.")
    memory = gauge("memory_bytes", "Memory that it may take for two versions.")
    held = gauge("held_versions", "Versions that it holds, compared with what was sealed.")
    version = gauge("version", "The highest version that it holds; absent while it holds none.")
    size = gauge("filled_bytes", "Bytes of the version that was brought into it last; 0 if that failed.")
    seconds = gauge("fill_seconds", "What that took, without waiting for readers.")
    missing = gauge("missing_cells", "Pieces of it that no source could bring as they were sealed.")
    for holder in status.holders:
        if not holder.HasField("filling"):
            continue
        name = (holder.name,)
        connected.add_metric(name, int(holder.connected))
        memory.add_metric(name, holder.filling.memory_bytes)
        held.add_metric(name, len(holder.held))
        if holder.held:
            version.add_metric(name, max(each.version for each in holder.held))
        if holder.HasField("last_filled"):
            size.add_metric(name, holder.last_filled.bytes)
            seconds.add_metric(name, holder.last_filled.fill_seconds)
            missing.add_metric(name, holder.last_filled.missing_cells)
    yield from (connected, memory, held, version, size, seconds, missing)
