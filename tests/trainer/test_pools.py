"""Pools: runs that share a manager, and whose replicas must never get each other's weights."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from plain_replica import PlainReplica
from trainer_world import DEADLINES

from ckpt_engine import CkptEngineError, Trainer
from ckpt_engine.v1 import weights_pb2
from tests.command_line import run

StartReplica = Callable[..., PlainReplica]
INVALID, PRECONDITION = weights_pb2.Problem.CODE_INVALID_ARGUMENT, weights_pb2.Problem.CODE_FAILED_PRECONDITION


def a_trainer(address: str, pool: str, value: float) -> Trainer:
    """Of a run of its own, which publishes one tensor."""
    trainer = Trainer(address, lineage=f"run of {pool or 'nobody'}", pool=pool, deadlines=DEADLINES)
    trainer.publish({"weight": torch.full((4,), value)})
    return trainer


def test_an_update_is_for_the_replicas_of_its_pool_only(manager: str, replica: StartReplica) -> None:
    actor, judge, alone = replica("a", pool="actor"), replica("b", pool="judge"), replica("c")
    with a_trainer(manager, "actor", 1.0) as first, a_trainer(manager, "judge", 2.0) as second:
        for trainer, name in ((first, "a"), (second, "b")):
            assert trainer.wait_for_replicas(timeout=60) == [name]
            report = trainer.update_weights(timeout=60)
            assert [each.name for each in report.replicas] == [name]
            assert report.ok
        with a_trainer(manager, "", 3.0) as third:
            assert third.wait_for_replicas(timeout=60) == ["c"]
            assert [each.name for each in third.update_weights(timeout=60).replicas] == ["c"]
        assert first.update_weights(timeout=60).ok
    held = {each.name: float(each.weights["weight"][0]) for each in (actor, judge, alone)}
    assert held == {"a": 1.0, "b": 2.0, "c": 3.0}
    assert [len(each.installs) for each in (actor, judge, alone)] == [2, 1, 1]


def test_naming_a_replica_of_another_pool_is_refused(manager: str, replica: StartReplica) -> None:
    judge, alone = replica("b", pool="judge"), replica("c")
    with a_trainer(manager, "actor", 1.0) as trainer, a_trainer(manager, "", 1.0) as other:
        other.wait_for_replicas(timeout=60)
        with a_trainer(manager, "judge", 0.0) as third:
            third.wait_for_replicas(timeout=60)
        with pytest.raises(CkptEngineError, match=r"replica 'b' is in pool 'judge'.*those in pool 'actor'") as caught:
            trainer.update_weights(replicas=["b"], timeout=60)
        assert caught.value.problem.code == INVALID
        with pytest.raises(CkptEngineError, match=r"replica 'b' is in pool 'judge'.*the pool without a name") as caught:
            other.update_weights(replicas=["b"], timeout=60)
    assert not judge.installs
    assert not alone.installs


def test_a_pool_without_replicas_names_the_pools_that_there_are(manager: str, replica: StartReplica) -> None:
    replica("b", pool="judge")
    with a_trainer(manager, "judgee", 1.0) as trainer, a_trainer(manager, "judge", 1.0) as right:
        right.wait_for_replicas(timeout=60)
        with pytest.raises(CkptEngineError, match=r"in pool 'judgee'.*--pool judgee.*others in pool 'judge'") as caught:
            trainer.update_weights(timeout=60)
        assert caught.value.problem.code == PRECONDITION
        with pytest.raises(CkptEngineError, match=r"0 of 1 .* in pool 'judgee'.*others in pool 'judge'"):
            trainer.wait_for_replicas(timeout=2.0)


def test_one_run_updates_two_pools_each_when_it_is_wanted(manager: str, replica: StartReplica) -> None:
    """The evaluation's stays at version 1 while the other goes on."""
    actor, evaluation = replica("a", pool="actor"), replica("e", pool="evaluation")
    with a_trainer(manager, "actor", 1.0) as trainer:
        trainer.wait_for_replicas(timeout=60)
        with a_trainer(manager, "evaluation", 0.0) as other:
            other.wait_for_replicas(timeout=60)
        assert trainer.update_weights(1, pool="evaluation", timeout=60).ok
        for version in (1, 2):
            assert trainer.update_weights(version, timeout=60).ok
    assert [each.identity.version for each in (actor, evaluation) if each.identity is not None] == [2, 1]
    assert len(evaluation.installs) == 1


def test_a_pools_name_has_no_spaces() -> None:
    with pytest.raises(CkptEngineError, match="'two words'"):
        Trainer("127.0.0.1:1", lineage="run", pool="two words")


def test_sleep_is_for_one_pool_and_status_shows_it(manager: str, replica: StartReplica) -> None:
    replica("b", pool="judge")
    with a_trainer(manager, "judge", 1.0) as trainer:
        trainer.wait_for_replicas(timeout=60)
    for words in (["b"], ["--pool", "judgee"]):
        asked = run("replica", "sleep", *words, "--manager", manager)
        assert (asked.exit_code, "pool 'judge'" in asked.output) == (1, True), asked.output
    assert "'judgee'" in asked.output
    shown = run("status", "--manager", manager)
    assert "pool" in shown.output
    assert "judge" in shown.output
