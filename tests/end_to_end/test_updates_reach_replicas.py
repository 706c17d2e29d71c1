"""The whole path on real processes: what trainers publish is what replicas serve, token for token."""

from __future__ import annotations

import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ckpt_engine import Trainer
from ckpt_engine.cli import app_for
from ckpt_engine.planning.question import PlanOptions, question_of
from ckpt_engine.planning.update import plan_update
from tests.cluster import Cluster, Replica, generate, outcomes
from tests.command_line import run
from tests.end_to_end.conftest import PADDED_VOCABULARY
from tests.timeline.trace_format import read
from tests.tiny_model import DECISIVE_GAP, decisive_prompts, make_tiny_qwen3, named_weights, reference_tokens
from tests.waiting import eventually

TOKENS = 32


def model_of(path: Path, seed: int) -> Any:
    return make_tiny_qwen3(path / str(seed), seed, vocabulary=PADDED_VOCABULARY, weights=False)


def assert_serves(cluster: Cluster, model: Any) -> None:
    """Every replica's greedy tokens are transformers', at prompts where rounding cannot decide."""
    prompt = decisive_prompts(model, 1, TOKENS)[0]
    expected = reference_tokens(model, prompt, TOKENS)
    assert expected.gap > DECISIVE_GAP
    for replica in cluster.replicas:
        assert generate(replica, prompt, TOKENS) == expected.tokens, replica.name


SEVERAL = pytest.mark.parametrize("updates", [4, pytest.param(20, marks=[pytest.mark.slow, pytest.mark.hours])])


def test_edges_are_those_that_a_plan_foretold(cluster: Cluster, tmp_path: Path) -> None:
    """`ckpt-engine plan` from the config alone, and what the agents' reports say: each edge, byte by byte."""
    model = model_of(tmp_path, 98)
    with Trainer(cluster.address, lineage="foretold") as trainer:
        trainer.publish(model, move=True)
        report = trainer.update_weights(version=1)
    assert report.ok, report
    for replica, workers in zip(sorted(report.replicas, key=lambda each: each.name), (1, 2), strict=True):
        foretold = plan_update(
            question_of(PlanOptions(tmp_path / "98", engine="reference", tp=workers, cpu=True, trainer_memory="host"))
        )
        found = [(edge.source, edge.worker_rank, edge.transport, edge.bytes) for edge in replica.message.edges]
        edges = [(line.edge.source, line.worker, line.choice.transport, line.edge.bytes) for line in foretold.installs]
        assert sorted(found) == sorted(edges)


def test_an_update_can_be_looked_at_as_a_timeline(cluster: Cluster, tmp_path: Path) -> None:
    """Its bytes are those of the report, and every member was asked and has answered in the time that is shown."""
    with Trainer(cluster.address, lineage="looked-at") as trainer:
        trainer.publish(model_of(tmp_path, 3), move=True)
        report = trainer.update_weights(version=70)
        words = ["trace", "70", "-o", str(tmp_path / "trace.json"), "--manager", cluster.address]
        written = run(*words)
    assert written.exit_code == 0, written.output
    file = read((tmp_path / "trace.json").read_text())
    assert sum(said["bytes"] for _, _, said in file.flows) == report.nbytes
    told = [(to.process, to.thread, to.name) for _, to, _ in file.flows]
    assert sorted(told) == [
        ("replica one", "worker 0", "transfer"),
        ("replica two", "worker 0", "transfer"),
        ("replica two", "worker 1", "transfer"),
    ]
    assert {left.process for left, _, _ in file.flows} == {"trainer rank 0"}
    assert all("round trips" in label for label in file.labels.values()), file.labels
    assert "memory of host" in written.output


@pytest.mark.slow
@SEVERAL
def test_updates_from_two_ranks_that_shard_with_fsdp2(cluster: Cluster, tmp_path: Path, updates: int) -> None:
    """Two gloo ranks publish their shards, and no rank holds the whole model: 2 -> 1 and 2 -> TP2 at once."""
    script = Path(__file__).with_name("fsdp_rank.py")
    logs = [tmp_path / f"rank-{rank}.log" for rank in range(2)]
    ranks = []
    try:
        for rank, log in enumerate(logs):
            with log.open("w") as errors:
                command = [sys.executable, str(script), cluster.address, str(rank), str(tmp_path), f"sharded-{updates}"]
                ranks.append(
                    subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True)
                )
        for version in range(updates):
            for process in ranks:
                process.stdin.write(f"{100 + version}\n")
                process.stdin.flush()
            for process, log in zip(ranks, logs, strict=True):
                assert process.stdout.readline() == f"updated {version}\n", log.read_text()
            assert_serves(cluster, model_of(tmp_path, 100 + version))
        for process in ranks:
            process.stdin.close()
            assert process.wait(60) == 0
    finally:
        for process in ranks:
            process.kill()


def test_two_ranks_bring_weights_by_a_collective(cluster: Cluster, tmp_path: Path) -> None:
    """Over Gloo, since all are on CPUs: each rank holds every other tensor, and every worker gets what it needs."""
    model = model_of(tmp_path, 30)
    whole = named_weights(model)
    lineage, reports = "together", list[Any]()

    def train(rank: int) -> None:
        with Trainer(cluster.address, rank=rank, world_size=2, lineage=lineage) as trainer:
            trainer.publish(dict(whole[rank::2]), transport="nccl")
            reports.extend(trainer.update_weights() for _ in range(2))

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(train, range(2)))
    for report in reports:
        assert outcomes(report) == {"one": "new_serving", "two": "new_serving"}, report
        assert report.verified
        assert report.collective == "one and two are updated by a collective: the trainer publishes for it alone"
        assert {use.transport for replica in report.replicas for use in replica.transports} == {"nccl"}
    assert_serves(cluster, model)


def test_a_checkpoint_directory_by_the_command_line(cluster: Cluster, tmp_path: Path) -> None:
    model = make_tiny_qwen3(tmp_path / "checkpoint", 40, vocabulary=PADDED_VOCABULARY)
    words = ["update", "--manager", cluster.address, "--checkpoint", str(tmp_path / "checkpoint"), "--version"]
    done = subprocess.run(
        [sys.executable, "-m", "ckpt_engine", *words, "3"], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert_serves(cluster, model)
    again = CliRunner().invoke(app_for(words), [*words, "2"])
    assert again.exit_code != 0
    assert "version" in f"{again.output}{again.exception}"


@pytest.mark.slow
def test_a_replica_that_starts_late_catches_up_from_what_stays_sealed(
    cluster: Cluster, tmp_path: Path, bare_model: Path
) -> None:
    """From a snapshot in shared memory while its trainer lives, and with other slices than were sealed before."""
    model = model_of(tmp_path, 50)
    with Trainer(cluster.address, lineage="late") as trainer:
        trainer.publish(model, snapshot=True)
        assert trainer.update_weights(version=5).ok
        late = cluster.replica("late", "reference", bare_model, "--tensor-parallel", "2")
        try:
            late.registered().serving(5)
            assert_serves_only(late, model)
        finally:
            late.stop()
            cluster.replicas.remove(late)


@pytest.mark.slow
def test_a_late_replica_is_served_by_a_directory_whose_publisher_has_gone(
    cluster: Cluster, tmp_path: Path, bare_model: Path
) -> None:
    model = make_tiny_qwen3(tmp_path / "checkpoint", 51, vocabulary=PADDED_VOCABULARY)
    with Trainer(cluster.address, lineage="directory") as trainer:
        trainer.publish(tmp_path / "checkpoint")
        assert trainer.update_weights(version=6).ok
    late = cluster.replica("late-2", "reference", bare_model)
    try:
        late.registered().serving(6)
        assert_serves_only(late, model)
    finally:
        late.stop()
        cluster.replicas.remove(late)


def assert_serves_only(replica: Any, model: Any) -> None:
    prompt = decisive_prompts(model, 1, TOKENS)[0]
    assert generate(replica, prompt, TOKENS) == reference_tokens(model, prompt, TOKENS).tokens


def test_an_agent_with_its_engines_own_command_leaves_nothing_when_it_is_asked_to_end(
    cluster: Cluster, tmp_path: Path, bare_model: Path
) -> None:
    """The command tells the engine's kind. A killed agent leaves its directory (tests/conformance)."""
    engine = [sys.executable, "-m", "ckpt_engine_adapters.reference.server", "--model", str(bare_model)]
    command = [sys.executable, "-m", "ckpt_engine", "--manager", cluster.address, "agent", "--name", "typed"]
    typed = Replica(cluster, "typed", [*command, "--", *engine], {"XDG_RUNTIME_DIR": str(tmp_path)})
    try:
        workers = typed.registered().workers()
        assert list(tmp_path.glob("ckpt-engine/*/page"))
        typed.process.send_signal(signal.SIGTERM)
        assert typed.process.wait(60) == 0, typed.tail()
        assert not any(each.is_running() for each in workers)
        assert not list(tmp_path.glob("ckpt-engine/*/page"))
        eventually("the manager forgets it", 60, lambda: typed.status is None)
    finally:
        typed.stop()
