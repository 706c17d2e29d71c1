"""Updates of real replicas by a collective: `publish(transport="nccl")` on a CPU, so the collective runs over Gloo."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from ckpt_engine import CkptEngineError, Trainer
from ckpt_engine.core.problems import precondition
from ckpt_engine.transport.collective.door import _doors
from ckpt_engine.v1 import manager_pb2
from tests.cluster import Cluster, Replica, eventually, generate, outcomes
from tests.end_to_end.conftest import PADDED_VOCABULARY
from tests.tiny_model import decisive_prompts, make_tiny_qwen3

pytestmark = pytest.mark.slow

TOKENS = 16


def test_updates_over_one_communicator_and_other_weights_over_another(tmp_path: Path, cluster: Cluster) -> None:
    model = make_tiny_qwen3(tmp_path / "model", 3, vocabulary=PADDED_VOCABULARY)
    with Trainer(cluster.address, lineage="collective") as trainer:
        trainer.publish(model, transport="nccl", move=True)
        for version in (1, 2, 3):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1 + 2**-6)
            report = trainer.update_weights()
            assert outcomes(report) == {"one": "new_serving", "two": "new_serving"}, report.message
            assert report.ok, report.message
            for each in report.replicas:
                assert {use.transport for use in each.transports} == {"nccl"}
            assert "one" in report.collective, report.message
            if version == 1:
                kept = trainer._background._part._seat._member
            assert trainer._background._part._seat._member is kept
        prompt = decisive_prompts(model, 1, TOKENS)[0]
        expected = generate(cluster.replicas[0], prompt, TOKENS)
        assert generate(cluster.replicas[1], prompt, TOKENS) == expected
        other = make_tiny_qwen3(tmp_path / "model", 4, vocabulary=PADDED_VOCABULARY, weights=False).float()
        trainer.publish(other, transport="nccl", dtype=torch.bfloat16, move=True)
        assert trainer._background._part._seat._member is None
        assert trainer.update_weights().ok
        trainer.withdraw()
        with pytest.raises(CkptEngineError, match="publish weights"):
            trainer.update_weights()


def after_go(trainer: Trainer, strike: Callable[[], None]) -> None:
    """The rank does this once, when all have agreed to begin and before it sends anything: workers are DIRTY by then,
    or will be, and wait for it."""
    seat = trainer._background._part._seat
    run = seat.run

    def struck(*given: Any) -> int:
        seat.run = run  # type: ignore[method-assign]
        strike()
        return run(*given)

    seat.run = struck  # type: ignore[method-assign, assignment]


def test_what_fails_before_go_leaves_all_as_they_were(tmp_path: Path, cluster: Cluster) -> None:
    model = make_tiny_qwen3(tmp_path / "model", 5, vocabulary=PADDED_VOCABULARY)
    prompt = decisive_prompts(model, 1, TOKENS)[0]
    with Trainer(cluster.address, lineage="goes back") as trainer:
        trainer.publish(model, transport="nccl", move=True)
        assert trainer.update_weights().ok
        expected = [generate(replica, prompt, TOKENS) for replica in cluster.replicas]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.neg_()
        seat = trainer._background._part._seat
        vote = seat.vote

        def refuses(*_: Any) -> None:
            raise precondition("its training loop went on")

        seat.vote = refuses  # type: ignore[method-assign]
        report = trainer.update_weights()
        assert outcomes(report) == {"one": "old_serving", "two": "old_serving"}
        assert "its training loop went on" in report.collective
        for each in report.replicas:
            assert "rank 0 failed: its training loop went on" in str(each.problem)
        seat.vote = vote  # type: ignore[method-assign]
        assert [generate(replica, prompt, TOKENS) for replica in cluster.replicas] == expected

        trainer.publish(model, transport="nccl", move=True)
        for door in [each for each in _doors.values() if each.port]:
            door.close()
        report = trainer.update_weights()
        assert outcomes(report) == {"one": "old_serving", "two": "old_serving"}
        for each in report.replicas:
            assert each.pause_seconds == 0
            assert "cannot be reached" in str(each.problem)
        assert [generate(replica, prompt, TOKENS) for replica in cluster.replicas] == expected
        trainer.publish(model, transport="nccl", move=True)
        assert trainer.update_weights().ok


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_worker_that_ends_in_the_middle_is_named_and_the_next_update_mends_all(
    number: signal.Signals, tmp_path: Path, cluster: Cluster
) -> None:
    model = make_tiny_qwen3(tmp_path / "model", 6, vocabulary=PADDED_VOCABULARY)
    with Trainer(cluster.address, lineage=f"a worker ends by {number}") as trainer:
        trainer.publish(model, transport="nccl", move=True)
        assert trainer.update_weights().ok
        (victim,) = cluster.replicas[0].workers()
        after_go(trainer, lambda: os.kill(victim.pid, number))
        try:
            report = trainer.update_weights(timeout=60.0)
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):
                victim.send_signal(signal.SIGCONT)
        assert not report.ok
        assert outcomes(report) == {"one": "quarantined", "two": "quarantined"}
        assert "one, worker 0" in report.collective
        assert "the next update mends them" in report.collective
        if number == signal.SIGKILL:
            eventually("another worker", 120.0, lambda: victim.pid not in pids(cluster.replicas[0]))
        mended(cluster, trainer)


def test_a_trainer_that_is_killed_in_the_middle_leaves_replicas_that_the_next_one_mends(
    tmp_path: Path, cluster: Cluster
) -> None:
    program = [sys.executable, "-m", "tests.end_to_end.killed_lead", cluster.address, str(tmp_path / "model")]
    assert subprocess.run(program, cwd=Path(__file__).parents[2], timeout=180.0).returncode == -signal.SIGKILL
    for replica in cluster.replicas:

        def closed(replica: Replica = replica) -> bool:
            status = replica.status
            return status is not None and status.last_outcome.outcome == manager_pb2.OUTCOME_QUARANTINED

        eventually("a replica is quarantined", 120.0, closed)
        status = replica.status
        assert status is not None
        assert "rank 0" in status.last_outcome.problem.message, status
    model = make_tiny_qwen3(tmp_path / "model", 7, vocabulary=PADDED_VOCABULARY)
    with Trainer(cluster.address, lineage="after a lead was killed") as trainer:
        trainer.publish(model, transport="nccl", move=True)
        mended(cluster, trainer)


def pids(replica: Replica) -> list[int]:
    """Of the engine's workers, as far as they have started."""
    status = replica.status
    return [] if status is None else [worker.pid for worker in status.workers]


def mended(cluster: Cluster, trainer: Trainer) -> None:
    for replica in cluster.replicas:
        replica.registered()
    report = trainer.update_weights()
    assert report.ok, report.message
    assert {use.transport for each in report.replicas for use in each.transports} == {"nccl"}
