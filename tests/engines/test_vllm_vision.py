"""Vision models in vLLM on the CPU; see vision_scene.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ckpt_engine import Trainer
from tests.cluster import running_cluster
from tests.engines.serving import TOKENS
from tests.engines.vision_models import CLASSES, save_files, save_model
from tests.engines.vision_scene import OPTIONS, TEXT_ONLY, check_chats, running
from tests.engines.vllm_server import complete, needs_vllm, plain_vllm, start_vllm, tokens
from tests.tiny_model import ROUNDING, regrets

pytestmark = needs_vllm

UP_SECONDS = 900.0


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow) for name in CLASSES])
def test_chats_after_updates(tmp_path: Path, name: str) -> None:
    torch.set_num_threads(1)
    with running(CLASSES[name], tmp_path, start_vllm, plain_vllm, UP_SECONDS) as scene:
        check_chats(scene)


def test_a_server_of_text_only_takes_nothing_of_its_tower(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    make, prompt = CLASSES["Qwen3-VL"], [3, 5, 7, 11, 13, 17]
    with running_cluster(tmp_path / "cluster") as cluster:
        bare = save_files(make(), tmp_path / "bare")
        replica = start_vllm(cluster, "reading", bare, *OPTIONS, *TEXT_ONLY).registered(UP_SECONDS)
        with Trainer(cluster.address, lineage="text") as trainer:
            for version in (1, 2):
                model, weights = save_model(make(), version, tmp_path / str(version))
                trainer.publish(tmp_path / str(version))
                report = trainer.update_weights(version=version)
                assert report.ok, f"{report}\n{replica.tail()}"
                assert report.verified
                (row,) = report.replicas[0].absent
                tower = [tensor.nbytes for name, tensor in weights.items() if "visual." in name]
                assert (row.prefix, row.tensors, row.nbytes) == ("model.visual.", len(tower), sum(tower))
                assert report.nbytes == sum(tensor.nbytes for tensor in weights.values()) - sum(tower)
                assert str(row) in report.details
                answer = tokens(complete(replica, prompt))
                assert len(answer) == TOKENS
                assert max(regrets(model, prompt, answer)) < ROUNDING
