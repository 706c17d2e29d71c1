"""Trainers against a real manager: what arrives, what is reported, and that trainers go on after errors."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from plain_replica import PlainReplica
from safetensors.torch import save_file
from trainer_world import DEADLINES

from ckpt_engine import CkptEngineError, Trainer, UpdateReport
from ckpt_engine.v1 import manager_pb2, weights_pb2
from tests.cluster import eventually

Problem = weights_pb2.Problem
StartReplica = Callable[..., PlainReplica]


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 3, dtype=torch.bfloat16))


def a_trainer(address: str, lineage: str = "run") -> Trainer:
    return Trainer(address, lineage=lineage, deadlines=DEADLINES)


def update(trainer: Trainer, version: int | None = None, **wishes: object) -> UpdateReport:
    """An update once a replica is there."""
    trainer.wait_for_replicas(timeout=60)
    return trainer.update_weights(version, timeout=60, **wishes)


def holds(replica: PlainReplica, wanted: dict[str, torch.Tensor]) -> bool:
    return replica.weights.keys() == wanted.keys() and all(
        torch.equal(replica.weights[name], tensor) for name, tensor in wanted.items()
    )


def test_a_module_arrives_and_the_report_says_how(manager: str, replica: StartReplica) -> None:
    net, reader = model(), replica()
    with a_trainer(manager) as trainer:
        trainer.publish(net)
        for version in (0, 7):
            with torch.no_grad():
                for parameter in net.parameters():
                    parameter.add_(1)
            report = update(trainer, version)
            assert holds(reader, net.state_dict())
            assert report.ok
            assert report.verified
            assert (report.lineage, report.version) == ("run", version)
            assert report.nbytes == sum(p.nbytes for p in net.parameters())
            (outcome,) = report.replicas
            assert (outcome.name, outcome.outcome, outcome.nbytes) == ("plain", "new_serving", report.nbytes)
            assert [use.transport for use in outcome.transports] == ["shared_memory"]
            assert outcome.transports[0].reason
            assert f"version {version} of run" in str(report)
            assert "new_serving" in report.details
            assert report.replicas[0].verified


def test_versions_count_by_themselves_and_progress_is_told(manager: str, replica: StartReplica) -> None:
    replica()
    told: list[manager_pb2.UpdateProgress] = []
    with a_trainer(manager) as trainer:
        trainer.publish([("a", torch.ones(4))])
        first = update(trainer)
        second = update(trainer, on_progress=told.append)
    assert second.version == first.version + 1
    assert second.epoch > first.epoch
    assert {progress.message for progress in told} >= {"sealing", "installing"}


def test_what_is_withdrawn_is_held_by_nobody_and_refused_until_it_is_published_again(
    manager: str, replica: StartReplica
) -> None:
    net, reader = model(), replica()
    with a_trainer(manager) as trainer:
        trainer.withdraw()  # nothing to take back
        trainer.publish(net)
        update(trainer)
        parameter = weakref.ref(next(net.parameters()))
        trainer.withdraw()
        with pytest.raises(CkptEngineError, match="publish weights before"):
            trainer.update_weights(timeout=60)
        net = model()
        gc.collect()
        assert parameter() is None
        trainer.publish(net)
        assert update(trainer).ok
        assert holds(reader, net.state_dict())


def test_named_tensors_are_sent_as_they_are_at_each_update(manager: str, replica: StartReplica) -> None:
    weights = {"a": torch.arange(12.0).view(3, 4), "b": torch.ones(2, dtype=torch.int64)}
    reader = replica()
    with a_trainer(manager) as trainer:
        trainer.publish(weights)
        update(trainer)
        weights["a"].mul_(2)
        update(trainer)
        assert holds(reader, weights)


def test_weights_can_be_served_in_another_dtype(manager: str, replica: StartReplica) -> None:
    reader = replica()
    with a_trainer(manager) as trainer:
        trainer.publish({"a": torch.tensor([1.0, 1e-3])}, dtype="bfloat16")
        report = update(trainer)
    assert torch.equal(reader.weights["a"], torch.tensor([1.0, 1e-3]).bfloat16())
    assert report.message.source_copies == 1


def test_a_directory_is_read_in_place(manager: str, replica: StartReplica, tmp_path: Path) -> None:
    weights = {"a": torch.randn(3, 4), "b": torch.randn(5).bfloat16()}
    save_file(weights, tmp_path / "model.safetensors")
    reader = replica()
    with a_trainer(manager) as trainer:
        trainer.publish(tmp_path)
        report = update(trainer)
    assert holds(reader, weights)
    assert report.message.source_copies == 0
    assert [use.transport for use in report.replicas[0].transports] == ["file"]


def test_other_weights_can_be_published(manager: str, replica: StartReplica) -> None:
    reader = replica()
    with a_trainer(manager) as trainer:
        trainer.publish({"a": torch.ones(3)})
        update(trainer)
        trainer.publish({"b": torch.zeros(2, 2)})
        update(trainer)
    assert holds(reader, {"b": torch.zeros(2, 2)})


def test_a_late_replica_gets_what_stays_sealed_while_the_trainer_computes(manager: str, replica: StartReplica) -> None:
    weights = {"a": torch.ones(8)}
    replica("first")
    with a_trainer(manager) as trainer:
        trainer.publish(weights, snapshot=True)
        update(trainer, 3)
        weights["a"].zero_()
        late = replica("late")
        eventually("the late one is brought up", 60, lambda: late.identity)
        assert holds(late, {"a": torch.ones(8)})
        assert late.identity is not None
        assert late.identity.version == 3


def test_changing_weights_during_an_update_is_found_out(manager: str, replica: StartReplica) -> None:
    net, reader = model(), replica()
    with a_trainer(manager) as trainer:
        trainer.publish(net, move=True)
        reader.before_reading = lambda: net[0].weight.data.add_(1)
        report = update(trainer)
        assert not report.ok
        assert not report.verified
        assert report.replicas[0].outcome == "quarantined"
        assert "1 tensors differ" in report.details
        reader.before_reading = lambda: None
        assert update(trainer).ok
        assert holds(reader, net.state_dict())


def test_changing_weights_while_they_are_copied_is_found_out(manager: str, replica: StartReplica) -> None:
    weights, reader, ending = {"a": torch.zeros(500_000), "b": torch.zeros(3)}, replica(), threading.Event()

    def step() -> None:
        while not ending.is_set():
            weights["a"].add_(1)

    def update_until_seen() -> None:
        end = time.monotonic() + 60
        while time.monotonic() < end:
            update(trainer)

    with a_trainer(manager) as trainer:
        trainer.publish(weights)
        update(trainer)
        writer = threading.Thread(target=step)
        writer.start()
        try:
            with pytest.raises(CkptEngineError, match="changed while they were copied") as caught:
                update_until_seen()
        finally:
            ending.set()
            writer.join()
        assert caught.value.problem.code == Problem.CODE_FAILED_PRECONDITION
        assert list(caught.value.problem.tensors) == ["a"]
        assert update(trainer).ok
        assert holds(reader, weights)


def test_moved_weights_are_refused_by_name(manager: str, replica: StartReplica) -> None:
    net, reader = model(), replica()
    with a_trainer(manager) as trainer:
        trainer.publish(net, move=True)
        update(trainer)
        net[1].weight.data = net[1].weight.data.clone()
        with pytest.raises(CkptEngineError) as caught:
            trainer.update_weights(timeout=60)
        assert caught.value.problem.code == Problem.CODE_FAILED_PRECONDITION
        assert list(caught.value.problem.tensors) == ["1.weight"]
        assert list(caught.value.problem.ranks) == [0]
        assert len(reader.installs) == 1
        trainer.publish(net, move=True)
        assert update(trainer).ok


def test_a_replica_that_cannot_take_the_model_refuses_the_update(manager: str, replica: StartReplica) -> None:
    reader = replica()
    reader.prepare_problem = Problem(code=Problem.CODE_INVALID_ARGUMENT, message="no such parameter", tensors=["a"])
    with a_trainer(manager) as trainer:
        trainer.publish({"a": torch.ones(3)})
        with pytest.raises(CkptEngineError, match="no such parameter") as caught:
            update(trainer)
        assert list(caught.value.problem.tensors) == ["a"]
        assert caught.value.problem.replica == "plain"
        reader.prepare_problem = None
        assert update(trainer).ok


def test_too_few_replicas_refuse_the_update(manager: str, replica: StartReplica) -> None:
    with a_trainer(manager) as trainer:
        trainer.publish({"a": torch.ones(3)})
        with pytest.raises(CkptEngineError) as caught:
            trainer.update_weights(timeout=60)
        assert caught.value.problem.code == Problem.CODE_FAILED_PRECONDITION
        replica()
        assert update(trainer).ok
        with pytest.raises(CkptEngineError) as caught:
            trainer.update_weights(min_replicas=2, timeout=60)
        assert caught.value.problem.code == Problem.CODE_FAILED_PRECONDITION


def test_going_back_is_refused(manager: str, replica: StartReplica) -> None:
    replica()
    weights = {"a": torch.ones(3)}
    with a_trainer(manager) as trainer:
        trainer.publish(weights)
        update(trainer, 5)
        weights["a"].add_(1)
        for version in (4, 5):
            with pytest.raises(CkptEngineError, match="lineage") as caught:
                trainer.update_weights(version, timeout=60)
            assert caught.value.problem.code == Problem.CODE_FAILED_PRECONDITION
        assert update(trainer, 6).ok


def test_an_update_that_takes_too_long_is_given_up_and_the_next_one_works(manager: str, replica: StartReplica) -> None:
    reader = replica()
    with a_trainer(manager) as trainer:
        trainer.publish({"a": torch.ones(3)})
        update(trainer)
        go_on = threading.Event()
        reader.before_reading = lambda: go_on.wait(60)
        report = trainer.update_weights(timeout=4)
        assert not report.ok
        assert "no outcome within" in report.replicas[0].problem
        reader.before_reading = lambda: None
        go_on.set()
        assert update(trainer).ok


def test_an_interrupt_cancels_the_call_and_the_trainer_goes_on(manager: str, replica: StartReplica) -> None:
    def interrupt(_: manager_pb2.UpdateProgress) -> None:
        raise KeyboardInterrupt

    reader, go_on = replica(), threading.Event()
    reader.before_preparing = lambda: go_on.wait(60)
    with a_trainer(manager) as trainer:
        trainer.publish({"a": torch.ones(3)})
        with pytest.raises(KeyboardInterrupt):
            update(trainer, on_progress=interrupt)

        def refused() -> str:
            with pytest.raises(CkptEngineError) as caught:
                trainer.update_weights(timeout=1.5)
            return caught.value.problem.message

        # The manager hears of the interrupt a little after us; from then on no other update runs.
        eventually("the next update runs", 60, lambda: "not recorded" in refused())
        go_on.set()
        assert update(trainer).ok


def test_an_interrupt_between_sealing_and_reading_is_survived(manager: str, replica: StartReplica) -> None:
    def interrupt(progress: manager_pb2.UpdateProgress) -> None:
        if progress.message == "sealing":
            raise KeyboardInterrupt

    reader = replica()
    with a_trainer(manager) as trainer:
        trainer.publish({"a": torch.ones(3)})
        with pytest.raises(KeyboardInterrupt):
            update(trainer, on_progress=interrupt)

        def is_updated() -> bool:
            with suppress(CkptEngineError):
                assert update(trainer).ok
                return True
            return False

        eventually("an update after the interrupted one", 60, is_updated)  # of which the manager hears a little later
        assert len(reader.installs) == 1
