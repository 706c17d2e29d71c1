"""A worker of one replica is stopped (SIGSTOP), so bringing that one up hangs: the others get their next update."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch

from ckpt_engine import Trainer
from ckpt_engine.core.deadlines import ENVIRONMENT
from ckpt_engine.trace import ENVIRONMENT as TRACE
from tests.cluster import eventually, generate, outcomes, running_cluster
from tests.end_to_end.conftest import PADDED_VOCABULARY
from tests.faults.listener import Listener
from tests.tiny_model import decisive_prompts, make_tiny_qwen3

pytestmark = pytest.mark.slow


def test_an_update_does_not_wait_for_a_late_replica_with_a_stopped_worker(
    tmp_path: Path, bare_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next update has 30 s, and bringing it up may take 300. The update that meets the stopped worker ends as soon
    as that has told nothing new for 15 s: it has no order yet, so it keeps what it serves."""
    monkeypatch.setenv(ENVIRONMENT, "resume=3 quiesce=10 stall=15")
    torch.set_num_threads(1)
    models = [
        make_tiny_qwen3(tmp_path / f"{seed}", seed, vocabulary=PADDED_VOCABULARY, weights=False) for seed in (1, 2)
    ]
    with running_cluster(tmp_path / "cluster") as cluster, Trainer(cluster.address, lineage="run") as trainer:
        well = cluster.replica("well", "reference", bare_model)
        hung = cluster.replica("hung", "reference", bare_model, "--tensor-parallel", "2")
        for replica in (well, hung):
            replica.registered()
        trainer.publish(models[0], snapshot=True)
        assert trainer.update_weights(version=0).ok
        trainer.publish(models[1], snapshot=True)  # plans that no worker has ready yet
        worker = hung.workers()[1]
        worker.send_signal(signal.SIGSTOP)
        try:
            first = trainer.update_weights(version=1, timeout=120.0)
            assert outcomes(first)["well"] == "new_serving"
            (stopped,) = (each for each in first.replicas if each.name == "hung")
            assert stopped.outcome == "old_serving", stopped
            assert "no install has told anything new for 15 s" in str(stopped.problem)
            eventually("it is brought up", 60, lambda: "bringing up hung" in cluster.status().phase)
            second = trainer.update_weights(version=2, timeout=30.0)
            assert outcomes(second)["well"] == "new_serving"
            assert outcomes(second)["hung"] != "new_serving"
        finally:
            worker.send_signal(signal.SIGCONT)
        hung.serving(2)


@pytest.mark.parametrize("point", ["worker.install.transfer", "agent.does.PrepareEngine.begin"])
def test_a_worker_that_stops_while_its_replica_is_brought_up_holds_nobody_up(
    point: str, tmp_path: Path, bare_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has its order and stands at the first byte, or it is asked to record its loader. Bringing it up may take 300 s
    and the update has 40; when the worker goes on, its replica comes to the version that the others serve."""
    monkeypatch.setenv(ENVIRONMENT, "resume=3")
    torch.set_num_threads(1)
    model = make_tiny_qwen3(tmp_path / "model", 1, vocabulary=PADDED_VOCABULARY)
    with Listener(tmp_path / "trace") as listener:
        monkeypatch.setenv(TRACE, str(listener.path))
        with running_cluster(tmp_path / "cluster") as cluster, Trainer(cluster.address, lineage="run") as trainer:
            well, hung = (cluster.replica(name, "reference", bare_model) for name in ("well", "hung"))
            for replica in (well, hung):
                replica.registered()
            trainer.publish(model, snapshot=True)
            assert trainer.update_weights(version=0).ok
            (killed,) = hung.workers()
            others = {well.process.pid, *(each.pid for each in well.workers())}
            with listener.holding(point, lambda pid: pid not in others) as held:
                killed.kill()
                assert held.wait(120), "it is not brought up"
                (worker,) = hung.workers()
                worker.send_signal(signal.SIGSTOP)
            try:
                assert "bringing up hung" in cluster.status().phase
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.neg_()
                report = trainer.update_weights(version=1, timeout=40.0)
                assert outcomes(report)["well"] == "new_serving", report
                (told,) = (each for each in report.replicas if each.name == "hung")
                assert told.outcome == "quarantined", told
            finally:
                worker.send_signal(signal.SIGCONT)
            hung.serving(1)
            prompt = decisive_prompts(model, 1, 8)[0]
            assert generate(hung, prompt, 8) == generate(well, prompt, 8)
