"""A model of experts behind the genuine SGLang server: after each update it generates transformers' tokens.

What our install leaves in other model classes is compared with SGLang's own loader in test_sglang_models.py, and dense
models are served in the conformance suite.
"""

from __future__ import annotations

from pathlib import Path

import torch

from ckpt_engine import Trainer
from tests.cluster import running_cluster
from tests.engines.serving import bare, refuses_without
from tests.engines.sglang_server import assert_closed, assert_serves, needs_sglang, start_sglang
from tests.engines.test_sglang_models import KINDS
from tests.engines.test_vllm_models import build

pytestmark = needs_sglang


def test_a_model_of_experts(tmp_path: Path) -> None:
    kind = "qwen3-experts"
    torch.set_num_threads(1)
    config = KINDS[kind].make()
    config.num_experts_per_tok = config.num_experts  # else rounding may choose another expert, and another token
    with running_cluster(tmp_path / "cluster") as cluster:
        replica = start_sglang(cluster, "sglang", bare(config, tmp_path / "bare")).registered(600)
        assert_closed(replica)
        with Trainer(cluster.address, lineage=kind) as trainer:
            for version in (1, 2):
                model, weights = build(config, version, tmp_path / f"version-{version}")
                trainer.publish(tmp_path / f"version-{version}")
                report = trainer.update_weights(version=version)
                assert report.ok, f"{report}\n{replica.tail()}"
                assert report.verified
                assert_serves(replica, model, version)
            refuses_without(trainer, weights, next(iter(KINDS[kind].leaves_out.values())))
            assert_serves(replica, model, 2)  # the refused update left it
