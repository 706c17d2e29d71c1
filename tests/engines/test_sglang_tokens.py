"""A model of experts behind the genuine SGLang server: after each update it generates transformers' tokens.

What our install leaves in other model classes is compared with SGLang's own loader in test_sglang_models.py, and dense
models are served in the conformance suite.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ckpt_engine import CkptEngineError, Trainer
from tests.cluster import running_cluster
from tests.engines.sglang_server import TOKENS, assert_closed, complete, needs_sglang, start_sglang, tokens
from tests.engines.test_sglang_models import KINDS
from tests.engines.test_vllm_models import build
from tests.tiny_model import DECISIVE_GAP, decisive_prompts, reference_tokens

pytestmark = needs_sglang


def test_a_model_of_experts(tmp_path: Path) -> None:
    kind = "qwen3-experts"
    torch.set_num_threads(1)
    config = KINDS[kind].make()
    config.num_experts_per_tok = config.num_experts  # else rounding may choose another expert, and another token
    config.dtype = torch.bfloat16
    (tmp_path / "bare").mkdir()
    config.save_pretrained(tmp_path / "bare")
    with running_cluster(tmp_path / "cluster") as cluster:
        replica = start_sglang(cluster, "sglang", tmp_path / "bare").registered(600)
        assert_closed(replica)
        with Trainer(cluster.address, lineage=kind) as trainer:
            for version in (1, 2):
                model, weights = build(config, version, tmp_path / f"version-{version}")
                trainer.publish(tmp_path / f"version-{version}")
                report = trainer.update_weights(version=version)
                assert report.ok, f"{report}\n{replica.tail()}"
                assert report.verified
                prompt = decisive_prompts(model, 1, TOKENS)[0]
                expected = reference_tokens(model, prompt, TOKENS)
                assert expected.gap > DECISIVE_GAP
                assert tokens(complete(replica, prompt)) == expected.tokens
            lacking = next(iter(KINDS[kind].leaves_out.values()))
            trainer.publish({name: tensor for name, tensor in weights.items() if name != lacking})
            with pytest.raises(CkptEngineError, match="come from nowhere"):
                trainer.update_weights(version=3)
            assert tokens(complete(replica, prompt)) == expected.tokens, "the refused update left the old version"
