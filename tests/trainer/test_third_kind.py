"""A kind of member that nobody had thought of joins; a late replica is read from it, over real files and streams."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from keeper import Keeper
from plain_replica import PlainReplica
from torch import nn
from trainer_world import manager_config

from ckpt_engine import Trainer
from ckpt_engine.manager.service import running_manager
from ckpt_engine.v1 import weights_pb2
from tests.waiting import eventually

Start = Callable[..., PlainReplica]
Hold = Callable[..., Keeper]


def trained(address: str, first: PlainReplica) -> tuple[weights_pb2.Identity, dict[str, torch.Tensor]]:
    """A run that ends after one update, of weights that nobody can read afterwards."""
    model = nn.Linear(6, 4)
    weights = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    with Trainer(address, lineage="run") as trainer:
        trainer.publish(model)
        trainer.wait_for_replicas(1)
        assert trainer.update_weights(timeout=60).ok
    assert first.identity is not None
    return first.identity, weights


def test_a_late_replica_is_read_from_a_holder_whom_nobody_asks_to_digest(
    manager: str, replica: Start, hold: Hold
) -> None:
    identity, weights = trained(manager, replica("first"))
    holder = hold(manager, "one", identity, weights)
    late = replica("late")
    eventually("the late replica holds the version", 90, lambda: late.identity == identity)
    assert all(torch.equal(late.weights[name], tensor) for name, tensor in weights.items())
    assert not holder.sealed, "all that the replica needs is in the record"
    (install,) = late.installs
    assert install.fence.epoch > 0
    assert all(told.problem is None for told in holder.told)


def test_records_come_with_the_hellos_of_holders_when_the_manager_was_restarted(
    replica: Start, hold: Hold, tmp_path: Path
) -> None:
    ledger = tmp_path / "another.sqlite3"
    with running_manager(manager_config(ledger)) as address:
        first = replica("first", address=address)
        identity, weights = trained(address, first)
        first.stop()
    with running_manager(manager_config(ledger, address)):
        holder = hold(address, "one", identity, weights)
        late = replica("late", address=address)
        eventually("the late replica holds the version", 90, lambda: late.identity == identity)
        assert not holder.sealed
        late.stop()


def test_who_brings_a_record_of_other_weights_is_told_and_read_by_nobody(
    manager: str, replica: Start, hold: Hold
) -> None:
    identity, weights = trained(manager, replica("first"))
    liar = hold(manager, "liar", identity, {name: tensor + 1 for name, tensor in weights.items()})
    late = replica("late")
    eventually("the liar is told", 90, lambda: any(told.problem is not None for told in liar.told))
    problem = next(told.problem for told in liar.told if told.problem is not None)
    assert problem.code == weights_pb2.Problem.CODE_DATA_LOSS
    assert "what keeper liar holds is left out: the record hashes to" in problem.message
    assert not late.installs
    hold(manager, "honest", identity, weights)
    eventually("the late replica holds the version", 90, lambda: late.identity == identity)
    assert torch.equal(late.weights["weight"], weights["weight"])
