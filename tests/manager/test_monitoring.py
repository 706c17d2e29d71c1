"""What is exported, and that dashboard, alerts and page speak of nothing else."""

from __future__ import annotations

import json
import logging
import re
import urllib.request
from pathlib import Path

import pytest
import yaml
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from ckpt_engine.agent.metrics import AgentState, of_agent
from ckpt_engine.core.version import Version
from ckpt_engine.gate.counts import REASONS as GATE_REASONS
from ckpt_engine.gate.counts import Counts, GateCounts, total_counts
from ckpt_engine.gate.holding import FULL, UPDATING
from ckpt_engine.machines import events
from ckpt_engine.manager.blobs import MEBIBYTE, BlobStore
from ckpt_engine.manager.compiler import Compiler
from ckpt_engine.manager.ledger import Ledger
from ckpt_engine.manager.metrics import REASONS, ManagerMetrics
from ckpt_engine.manager.tasks import Tasks
from ckpt_engine.relay.metrics import RelayState, of_relay
from ckpt_engine.scraping import registry_of, scraped_at
from ckpt_engine.v1 import manager_pb2, weights_pb2

ROOT = Path(__file__).parents[2]
MONITORING = ROOT / "examples" / "monitoring"


def identity(version: int, lineage: str = "run") -> weights_pb2.Identity:
    return weights_pb2.Identity(lineage=lineage, version=version, root=bytes(32))


def replica(name: str, version: int | None, **fields: bool) -> manager_pb2.ReplicaStatus:
    held = None if version is None else identity(version)
    return manager_pb2.ReplicaStatus(name=name, connected=True, serving=True, identity=held, **fields)


def samples(registry: CollectorRegistry) -> dict[tuple[str, tuple[str, ...]], float]:
    return {
        (sample.name, tuple(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(generate_latest(registry).decode())
        for sample in family.samples
    }


class Manager:
    """Metrics of a manager whose status a test writes."""

    def __init__(self) -> None:
        self.status = manager_pb2.GetStatusResponse(latest=identity(7))
        self.metrics = ManagerMetrics(lambda: self.status, BlobStore(MEBIBYTE, MEBIBYTE))

    def samples(self) -> dict[tuple[str, tuple[str, ...]], float]:
        return samples(self.metrics.registry)


def test_series_of_replicas_end_with_them() -> None:
    manager = Manager()
    manager.status.replicas.extend([replica("new", 7), replica("old", 4), replica("empty", None)])
    manager.status.replicas[1].drift.seconds = 12.0
    outcome = manager_pb2.ReplicaOutcome(replica="new", outcome=manager_pb2.OUTCOME_NEW_SERVING)
    manager.metrics.report(manager_pb2.UpdateReport(ok=True, identity=identity(7), replicas=[outcome]))
    shown = manager.samples()
    assert shown["ckpt_engine_replica_state", ("new", "serving")] == 1
    assert shown["ckpt_engine_replica_state", ("new", "closed")] == 0
    assert (shown["ckpt_engine_replica_version", ("new",)], shown["ckpt_engine_replica_version", ("old",)]) == (7, 4)
    lags = [shown["ckpt_engine_replica_lag_versions", (name,)] for name in ("new", "old")]
    assert lags == [0, 3]
    assert [shown["ckpt_engine_replica_drift_seconds", (name,)] for name in ("new", "old")] == [0, 12]
    assert ("ckpt_engine_replica_version", ("empty",)) not in shown
    assert ("ckpt_engine_replica_since_success_seconds", ("new",)) in shown
    assert ("ckpt_engine_replica_since_success_seconds", ("old",)) not in shown
    assert 0 <= shown["ckpt_engine_since_success_seconds", ()] < 1e6, "since then, and not since 1970"
    del manager.status.replicas[:]
    assert not [labels for _, labels in manager.samples() if "new" in labels]
    assert not manager.metrics._current.replicas, "nothing is kept of it"


def test_replicas_that_have_gone_are_forgotten_though_nobody_scrapes() -> None:
    manager = Manager()
    for number in range(20):
        name = f"pod-{number}"
        del manager.status.replicas[:]
        manager.status.replicas.append(replica(name, number))
        outcome = manager_pb2.ReplicaOutcome(replica=name, outcome=manager_pb2.OUTCOME_NEW_SERVING)
        for _ in range(2):
            manager.metrics.report(manager_pb2.UpdateReport(ok=True, identity=identity(number), replicas=[outcome]))
    assert set(manager.metrics._current.replicas) == {"pod-19"}
    assert ("ckpt_engine_replica_since_success_seconds", ("pod-19",)) in manager.samples()


def relay_status() -> manager_pb2.HolderStatus:
    brought = [manager_pb2.RelayFilled.Brought(source="rank 0", bytes=5)]
    filled = manager_pb2.RelayFilled(identity=identity(7), bytes=5, fill_seconds=0.5, missing_cells=2, brought=brought)
    return manager_pb2.HolderStatus(
        kind="relay",
        name="a",
        connected=True,
        held=[identity(6), identity(7)],
        filling=manager_pb2.Filling(memory_bytes=11),
        last_filled=filled,
    )


def test_relays_are_shown_as_they_said_last_and_end_with_them() -> None:
    manager = Manager()
    manager.status.holders.extend([relay_status(), manager_pb2.HolderStatus(kind="keeper", name="k", connected=True)])
    shown = manager.samples()
    found = {name.removeprefix("ckpt_engine_relay_"): value for (name, labels), value in shown.items() if "a" in labels}
    assert found == {
        "connected": 1,
        "memory_bytes": 11,
        "held_versions": 2,
        "version": 7,
        "filled_bytes": 5,
        "fill_seconds": 0.5,
        "missing_cells": 2,
    }
    assert shown["ckpt_engine_sessions", ("holder",)] == 2
    del manager.status.holders[:]
    assert not [labels for _, labels in manager.samples() if "a" in labels]


def test_a_replica_of_another_run_has_no_lag() -> None:
    manager = Manager()
    manager.status.replicas.append(manager_pb2.ReplicaStatus(name="other", identity=identity(100, "another")))
    assert ("ckpt_engine_replica_lag_versions", ("other",)) not in manager.samples()


def test_no_lineage_is_a_label() -> None:
    manager = Manager()
    manager.status.replicas.append(replica("new", 7))
    manager.metrics.called("run")
    manager.metrics.refused(weights_pb2.Problem(code=weights_pb2.Problem.CODE_NOT_FOUND))
    assert not [labels for _, labels in manager.samples() if "run" in labels]
    manager.metrics.forget_calls("run")
    assert not manager.metrics._calls


def test_refusals_gathering_and_sealing_are_counted() -> None:
    manager = Manager()
    manager.metrics.refused(weights_pb2.Problem(code=weights_pb2.Problem.CODE_FAILED_PRECONDITION))
    for _ in range(2):
        manager.metrics.called("run")
    manager.metrics.sealed(manager_pb2.Sealed(copy_seconds=1.5, digest_seconds=0.5))
    manager.metrics.sealed(manager_pb2.Sealed(problem=weights_pb2.Problem(message="no")))
    manager.metrics.report(manager_pb2.UpdateReport(identity=identity(7)))
    assert manager.samples()["ckpt_engine_updates_not_finite_total", ()] == 0
    manager.metrics.report(manager_pb2.UpdateReport(identity=identity(8), not_finite=["a", "b"]))
    shown = manager.samples()
    assert shown["ckpt_engine_updates_not_finite_total", ()] == 1
    assert {name: shown["ckpt_engine_update_refusals_total", (name,)] for name in REASONS} == {
        **dict.fromkeys(REASONS, 0),
        "failed_precondition": 1,
    }
    assert shown["ckpt_engine_gather_seconds_count", ()] == 1
    assert shown["ckpt_engine_seal_seconds_sum", ("copy",)] == 1.5
    assert shown["ckpt_engine_seal_seconds_count", ("digest",)] == 1
    assert ("ckpt_engine_since_success_seconds", ()) not in shown, "the report was not ok"
    assert shown["process_resident_memory_bytes", ()] > 0


async def test_a_report_that_is_corrected_has_not_ended_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is written, and the update that runs meanwhile is counted as before."""
    manager, ledger = Manager(), await Ledger.open(tmp_path / "ledger")
    tasks = Tasks(ledger, Compiler(BlobStore(MEBIBYTE, MEBIBYTE)), manager.metrics)
    caplog.set_level(logging.INFO, "ckpt_engine.manager")
    report = manager_pb2.UpdateReport(fence=weights_pb2.Fence(epoch=3), identity=identity(7), seconds=1.0)
    report.replicas.add(replica="a", outcome=manager_pb2.OUTCOME_QUARANTINED)
    report.replicas.add(replica="b", outcome=manager_pb2.OUTCOME_OLD_SERVING)
    try:
        await ledger.record_intent(3, Version.of(identity(7)), selection=["a", "b"])
        assert (await tasks.run(("report",), events.RecordOutcome(report, 60.0))).problem is None
        manager.metrics.called("run")
        before = {name: value for name, value in manager.samples().items() if name[0].startswith("ckpt_engine_")}
        caplog.clear()
        report.replicas[0].outcome = manager_pb2.OUTCOME_NEW_SERVING
        assert (await tasks.run(("correct",), events.CorrectOutcome(report, "a", 60.0))).problem is None
        after = {name: value for name, value in manager.samples().items() if name[0].startswith("ckpt_engine_")}
        assert after == before
        assert manager.metrics._calls
        assert [record.getMessage() for record in caplog.records] == [
            "report corrected epoch=3 lineage='run' version=7 replica=a outcome=new_serving ok=False"
        ]
        assert (await ledger.last_update("run", 7)).report == report
    finally:
        tasks.close()
        await ledger.close()


def test_gates_are_counted_for_the_agent(tmp_path: Path) -> None:
    assert total_counts(tmp_path) == Counts()
    gate = GateCounts(tmp_path)
    for _ in range(3):
        gate.waits()
    gate.waited(0.5)
    gate.refused(FULL)
    gate.refused("a reason that nobody foresaw")
    (tmp_path / "gate-1.counts").write_bytes(b"cut off")
    found = total_counts(tmp_path)
    assert (found.held, found.held_total, found.held_seconds) == (2, 3, 0.5)
    assert found.refusals == {**dict.fromkeys(GATE_REASONS, 0), FULL: 1}
    mine = next(path for path in tmp_path.iterdir() if path.stat().st_size > 100)
    dead = bytearray(mine.read_bytes())
    dead[8] ^= 1  # another start time: the process of this file has died
    (tmp_path / "gate-2.counts").write_bytes(dead)
    both = total_counts(tmp_path)
    assert (both.held, both.held_total) == (2, 6), "its counters stay, and nobody waits there any more"
    again = GateCounts(tmp_path)
    again.refused(UPDATING)
    assert total_counts(tmp_path).refusals[FULL] == 2


def test_an_agent_is_scraped(tmp_path: Path) -> None:
    GateCounts(tmp_path).refused(UPDATING)
    state = AgentState("rollout-0", tmp_path, connected=True, up=True, starts=2)
    with scraped_at("127.0.0.1:0", lambda: of_agent(state)) as address:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=60) as answer:
            text = answer.read().decode()
    assert 'ckpt_engine_gate_refusals_total{reason="updating",replica="rollout-0"} 1.0' in text
    assert 'ckpt_engine_engine_starts_total{replica="rollout-0"} 2.0' in text
    with scraped_at("", lambda: of_agent(state)) as nowhere:
        assert nowhere == ""


def test_figures_of_a_probe_are_those_of_the_last_outcome() -> None:
    manager = Manager()
    for name in ("asked", "silent", "unasked"):
        manager.status.replicas.append(replica(name, 7))
    figures = manager_pb2.ProbeFigures(mean=0.25, kl=0.5)
    answer = manager_pb2.ProbeAnswer(engine=figures, before=figures, broken=["mean 0.25 above 0.1"])
    manager.status.replicas[0].last_outcome.probe.CopyFrom(answer)
    manager.status.replicas[1].last_outcome.probe.problem.message = "too late"
    found = {key: value for key, value in samples(manager.metrics.registry).items() if "_probe_" in key[0]}
    first = "ckpt_engine_replica_probe_"
    assert {name for name, _ in found} == {first + each for each in ("bad", "mean", "p99", "largest", "kl", "clipped")}
    assert {labels for _, labels in found} == {("asked",), ("silent",), ("engine", "asked"), ("before", "asked")}
    assert found[f"{first}mean", ("engine", "asked")] == 0.25
    assert found[f"{first}kl", ("before", "asked")] == 0.5
    assert found[f"{first}bad", ("asked",)] == found[f"{first}bad", ("silent",)] == 1


def exported(tmp_path: Path) -> set[str]:
    """Every name that a query may use."""
    manager = Manager()
    manager.status.replicas.append(replica("new", 7))
    manager.status.holders.append(relay_status())
    manager.status.replicas[-1].scrubs.add(passes=1, passed_at=1.0, bytes=1)
    manager.status.replicas[-1].connected = True
    manager.status.replicas[-1].last_outcome.probe.engine.flips = 0.5
    outcome = manager_pb2.ReplicaOutcome(replica="new", outcome=manager_pb2.OUTCOME_NEW_SERVING)
    stage = manager_pb2.StageSeconds(stage=manager_pb2.STAGE_PLAN, seconds=1)
    outcome.edges.add(transport="file", bytes=1)
    manager.metrics.report(manager_pb2.UpdateReport(ok=True, identity=identity(7), replicas=[outcome], stages=[stage]))
    agent = registry_of(lambda: of_agent(AgentState("new", tmp_path)))
    relay = registry_of(lambda: of_relay(RelayState("a")))
    return {"up"} | {name for registry in (manager.metrics.registry, agent, relay) for name, _ in samples(registry)}


def asked(query: str) -> set[str]:
    """The metrics of a query."""
    return set(re.findall(r"\b(?:ckpt_engine_\w+|process_\w+|up(?=\{))", query))


def test_dashboard_alerts_and_page_speak_of_what_is_exported(tmp_path: Path) -> None:
    there = exported(tmp_path)
    dashboard = json.loads((MONITORING / "dashboard.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    rules = yaml.safe_load((MONITORING / "alerts.yaml").read_text())["groups"][0]["rules"]
    queries += [rule["expr"] for rule in rules]
    assert len(queries) > 25
    for query in queries:
        assert asked(query), query
        assert asked(query) <= there, query
    page = (ROOT / "docs" / "monitoring.md").read_text()
    for rule in rules:
        assert f"`{rule['alert']}`" in page, rule["alert"]
    told = set(re.findall(r"^\| `(ckpt_engine_\w+)", page, re.MULTILINE))
    suffixes = re.compile(r"_(total|bucket|count|sum|created)$")
    ours = {suffixes.sub("", name) for name in there if name.startswith("ckpt_engine_")}
    assert {suffixes.sub("", name) for name in told} == ours
