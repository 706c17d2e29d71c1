"""vLLM split by layers and by experts: each worker loads its own, and together they must load everything. vLLM with
several engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_engine import CkptEngineError, Trainer
from ckpt_engine.planning.question import PlanOptions, question_of
from ckpt_engine.planning.update import plan_update
from tests.cluster import running_cluster
from tests.engines.serving import bare, model_of, refuses_without
from tests.engines.test_vllm_models import build, qwen3_mixture
from tests.engines.vllm_server import assert_closed, assert_serves, needs_vllm, start_vllm
from tests.tiny_model import make_tiny_qwen3, named_weights

pytestmark = needs_vllm

COMPILED = ["--no-enforce-eager", "--compilation-config", '{"mode":1,"backend":"eager"}']
"""vLLM 0.32 makes the tensors that travel between stages when it warms up, and on a CPU it does not if it is eager."""

LAYOUTS: dict[str, tuple[list[str], int, str]] = {
    "pipeline": (["--pipeline-parallel-size", "2", *COMPILED], 1, "model.layers.7.mlp.experts.0.up_proj.weight"),
    "experts": (["--enable-expert-parallel"], 2, "model.layers.1.mlp.experts.9.up_proj.weight"),
}
"""Arguments, tensor parallel size, and a tensor of a stage or expert that no worker has."""


def foretold(config: Path, layout: str) -> list[int]:
    """What `ckpt-engine plan` says that each worker reads, by a rule for names instead of vLLM's loader."""
    parallel = {"pp": 2} if layout == "pipeline" else {"tp": 2, "ep": 2}
    answer = plan_update(question_of(PlanOptions(config, "files", engine="vllm", cpu=True, **parallel)))
    assert not answer.impossible
    return [line.edge.bytes for line in sorted(answer.installs, key=lambda line: line.worker)]


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_two_workers_share_a_mixture_of_experts(tmp_path: Path, layout: str) -> None:
    torch.set_num_threads(1)
    arguments, tensor_parallel, nobody = LAYOUTS[layout]
    config: Any = qwen3_mixture()
    with running_cluster(tmp_path / "cluster") as cluster:
        replica = start_vllm(
            cluster, layout, bare(config, tmp_path / "bare"), *arguments, tensor_parallel=tensor_parallel
        )
        replica.registered(600)
        assert_closed(replica)
        with Trainer(cluster.address, lineage=layout) as trainer:
            for version in (1, 2):
                model, weights = build(config, version, tmp_path / f"version-{version}")
                trainer.publish(tmp_path / f"version-{version}")
                report = trainer.update_weights(version=version)
                assert report.ok, f"{report}\n{replica.tail()}"
                workers = report.replicas[0].message.workers
                total = sum(tensor.nbytes for tensor in weights.values())
                assert [worker.rank for worker in workers] == [0, 1]
                assert not any(worker.by_loader for worker in workers)
                assert all(worker.bytes < 0.8 * total for worker in workers), "its own stage or experts only"
                assert [worker.bytes for worker in workers] == foretold(tmp_path / "bare", layout)
                if layout == "experts":
                    continue  # vLLM 0.32's kernel for experts on a CPU knows no expert map, and dies of a request
                assert_serves(replica, model, version)
            refuses_without(trainer, weights, "model.layers.1.mlp.experts.3.gate_proj.weight")
            trainer.publish({**weights, nobody: torch.zeros(64, 128, dtype=torch.bfloat16)})
            with pytest.raises(CkptEngineError) as refused:
                trainer.update_weights(version=3)
            assert nobody in refused.value.problem.message
            if layout == "pipeline":
                assert_serves(replica, model, 2)  # the refused updates left it


def test_data_parallel_engines_are_all_updated(tmp_path: Path) -> None:
    """Two engine cores behind one server: both must hold the version before the gate opens."""
    make_tiny_qwen3(tmp_path / "bare", weights=False)
    with running_cluster(tmp_path / "dp2") as cluster:
        replica = start_vllm(
            cluster, "dp2", tmp_path / "bare", "--data-parallel-size", "2", tensor_parallel=1
        ).registered(600)
        assert len(replica.workers()) == 2
        assert_closed(replica)
        with Trainer(cluster.address, lineage="dp") as trainer:
            for version in (1, 2, 3):
                model = model_of(tmp_path, version)
                trainer.publish(named_weights(model))
                report = trainer.update_weights(version=version)
                assert report.ok, f"{report}\n{replica.tail()}"
                assert len(report.replicas[0].message.workers) == 2
                for _ in range(4):  # requests go to either engine
                    assert_serves(replica, model, version)
