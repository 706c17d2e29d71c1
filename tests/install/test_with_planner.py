"""Recordings, the real plan compiler and the installer fit together: two sources, two tensor-parallel workers."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from ckpt_engine.core.manifest import canonical
from ckpt_engine.core.plan import PlanRequest, compile_plans
from ckpt_engine.core.publication import merge_tables
from ckpt_engine.core.sealed import check_replicas
from ckpt_engine.engine.target import ModuleTarget
from ckpt_engine.v1 import manager_pb2, weights_pb2, worker_pb2
from tests.install.install_models import TensorParallel, assert_same, empty, state
from tests.install.install_world import Checkpoint, OneWorker
from tests.install.published import sealed, tables
from tests.sealing import expected_digests


def _mixed(rank: int, size: int, tied: bool) -> TensorParallel:
    """Of bfloat16, but for some tensors that it keeps in float32: sliced, transposed, fused, one layer's only."""
    model = TensorParallel(rank, size, layers=2, tied=tied)
    for kept in ("down", "conv1d", "gate_up"):
        setattr(model.layers[0], kept, empty(*getattr(model.layers[0], kept).shape, dtype=torch.float32))
    return model


@pytest.mark.parametrize("widened", [False, True], ids=["as served", "stored wider"])
@pytest.mark.parametrize("seed", range(4))
def test_what_is_planned_for_a_recording_installs_and_verifies(tmp_path: Path, seed: int, widened: bool) -> None:
    size = random.Random(seed).choice([1, 2, 4])
    models = [_mixed(rank, size, tied=seed % 2 == 0) for rank in range(size)]
    weights = models[0].checkpoint(seed)
    assert not widened or torch.bfloat16 in {weight.dtype for weight in weights.values()}
    checkpoint = Checkpoint(weights, seed, widened)
    publication = merge_tables(tables(checkpoint))
    assert publication.manifest_bytes == checkpoint.manifest_bytes
    workers, requests = [], []
    for rank, model in enumerate(models):
        (tmp_path / str(rank)).mkdir()
        workers.append(OneWorker(ModuleTarget(model), tmp_path / str(rank)))
        prepared = workers[-1].prepare(checkpoint)
        assert not prepared.HasField("problem"), prepared.problem.message
        needs = weights_pb2.WorkerNeeds.FromString(prepared.needs)
        requests.append(PlanRequest(rank, needs, prepared.host, ["shared_memory"]))
    plans = compile_plans(publication, publication.table_digests, requests)
    found = check_replicas(plans, sealed(plans, checkpoint.weights))
    for rank, (worker, model) in enumerate(zip(workers, models, strict=True)):
        order = worker_pb2.InstallOrder(
            fence=worker.fence(),
            identity=weights_pb2.Identity(lineage="run", version=1, root=found.root()),
            plan=canonical(plans.workers[rank]),
            expected=canonical(expected_digests(plans, rank, found)),
            deadline_seconds=60,
        )
        report = worker.installer.install(order).report
        assert not report.HasField("problem"), report.problem.message
        assert report.bytes == plans.workers[rank].bytes
        like = _mixed(rank, size, tied=seed % 2 == 0)
        like.load_weights(checkpoint.weights.items())
        assert_same(state(model), state(like))
        [word] = worker.page.read()
        assert (word.state, word.identity.root if word.identity else b"") == (
            manager_pb2.WORKER_STATE_CLEAN,
            found.root(),
        )
    checkpoint.close()
