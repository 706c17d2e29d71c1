"""Trainers whose weights are stepped by somebody else than the published tensors: replicas get what was stepped.

Real optimizers, a learner process, and a replica that reads over the real transports.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest
import torch
from plain_replica import PlainReplica
from test_trainer_updates import a_trainer, holds, model, update

from ckpt_engine import CkptEngineError, Trainer, UpdateReport

StartReplica = Callable[..., PlainReplica]


def updated(trainer: Trainer, reader: PlainReplica, net: torch.nn.Module) -> UpdateReport:
    report = update(trainer)
    assert report.ok
    assert report.verified
    assert holds(reader, net.state_dict())
    return report


def test_a_flat_optimizer_reaches_the_replica_with_every_step(manager: str, replica: StartReplica) -> None:
    net, reader = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 3)), replica()
    flat = torch.nn.Parameter(torch.nn.utils.parameters_to_vector(net.parameters()).detach())
    torch.nn.utils.vector_to_parameters(flat, net.parameters())
    optimizer = torch.optim.AdamW([flat], lr=0.1)
    roots = set()
    with a_trainer(manager) as trainer:
        trainer.publish(net, move=True)
        for _ in range(3):
            flat.grad = torch.ones_like(flat)
            optimizer.step()
            report = updated(trainer, reader, net)
            assert torch.equal(
                torch.nn.utils.parameters_to_vector(reader.weights[n] for n, _ in net.named_parameters()), flat
            )
            roots.add(report.root)
            assert not report.warnings
    assert len(roots) == 3
    (copied,) = report.copied
    assert (copied.tensors, copied.nbytes, copied.ranks) == (4, flat.nbytes, 1)
    assert copied.names == ("0.bias", "0.weight", "1.bias", "1.weight")
    assert f"4 tensors, {flat.nbytes} B (0.bias, 0.weight, 1.bias, 1.weight); each shares its memory" in report.details
    assert report.to_dict()["copied"][0]["reason"] == copied.reason


def learn(net: torch.nn.Module, steps: object, done: object) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    while steps.get():  # type: ignore[attr-defined]
        for parameter in net.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        done.put(True)  # type: ignore[attr-defined]


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_a_learner_process_reaches_the_replica_with_every_step(
    manager: str, replica: StartReplica, method: str
) -> None:
    context = torch.multiprocessing.get_context(method)
    net, steps, done = model(), context.SimpleQueue(), context.SimpleQueue()
    net.share_memory()
    learner = context.Process(target=learn, args=(net, steps, done), daemon=True)
    learner.start()
    reader, roots = replica(), set()
    try:
        with a_trainer(manager) as trainer:
            trainer.publish(net)
            for _ in range(2):
                steps.put(True)
                assert done.get()
                roots.add(updated(trainer, reader, net).root)
        steps.put(False)
        learner.join(60)
    finally:
        learner.kill()
    assert len(roots) == 2


def test_a_version_without_a_change_is_a_warning_in_its_lineage_only(manager: str, replica: StartReplica) -> None:
    net, reader = model(), replica()
    with a_trainer(manager) as trainer:
        trainer.publish(net)
        assert not update(trainer, 4).warnings
        same = update(trainer, 7)
        assert same.ok
        assert same.warnings[0].startswith("version 7 has the same weights as version 4")
        assert "warning: version 7 has the same" in str(same)
        assert same.to_dict()["warnings"] == list(same.warnings)
        with torch.no_grad():
            net[0].weight.add_(1)
        assert not updated(trainer, reader, net).warnings
    with a_trainer(manager, "another run") as other:
        other.publish(net)
        assert not updated(other, reader, net).warnings


def test_the_warning_outlives_a_restart_of_the_trainer(manager: str, replica: StartReplica) -> None:
    net, _ = model(), replica()
    for version in (1, 2):
        with a_trainer(manager) as trainer:
            trainer.publish(net)
            assert len(update(trainer, version).warnings) == version - 1


def test_what_is_moved_or_read_in_place_is_not_said_to_be_copied(manager: str, replica: StartReplica) -> None:
    replica()
    with a_trainer(manager) as trainer:
        trainer.publish(model(), move=True)
        report = update(trainer)
    assert report.copied == ()
    assert "copied" not in report.details


def test_what_publishing_does_not_call_is_in_the_report(manager: str, replica: StartReplica) -> None:
    replica()
    net = model()
    net[0].register_state_dict_post_hook(lambda *_: None)
    with a_trainer(manager) as trainer:
        trainer.publish(net)
        for _ in range(2):
            with torch.no_grad():
                net[0].weight.add_(1)
            report = update(trainer)
            (warning,) = report.warnings
            assert "hooks on state_dict" in warning
            assert "0 (Linear)" in warning
            assert f"warning: {warning}" in report.details


def test_what_is_written_through_a_dlpack_view_reaches_the_replica(manager: str, replica: StartReplica) -> None:
    net, reader = torch.nn.BatchNorm1d(4), replica()
    view = torch.from_dlpack(net.running_mean)
    with a_trainer(manager) as trainer:
        for move in (False, True):
            trainer.publish(net, move=move)
            for _ in range(2):
                view.add_(1)
                assert updated(trainer, reader, net).copied
    assert reader.weights["running_mean"].tolist() == [4.0] * 4


def test_a_write_where_weights_lay_before_they_moved_refuses_the_update(manager: str, replica: StartReplica) -> None:
    net, reader = model(), replica()
    kept = (ctypes.c_float * 1).from_address(net[0].weight.data_ptr())
    with a_trainer(manager) as trainer:
        trainer.publish(net, move=True)
        updated(trainer, reader, net)
        kept[0] = 7.0
        installs = len(reader.installs)
        with pytest.raises(CkptEngineError, match=r"wrote to their old memory since: 0\.weight") as refused:
            trainer.update_weights(timeout=60)
        assert list(refused.value.problem.tensors) == ["0.weight"]
        assert len(reader.installs) == installs, "no replica was touched"
        trainer.publish(net)
        updated(trainer, reader, net)
