"""Model classes whose loaders differ: each is recorded, serves transformers' tokens, and refuses what lacks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_engine import Trainer
from tests.cluster import running_cluster
from tests.engines.serving import bare, refuses_without
from tests.engines.vllm_server import assert_closed, assert_serves, needs_vllm, start_vllm

pytestmark = needs_vllm

SMALL: dict[str, Any] = {
    "vocab_size": 500,  # padded by vLLM to a multiple of 64
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
MIXTURE: dict[str, Any] = {"moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2}


def llama() -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(**SMALL, tie_word_embeddings=True, architectures=["LlamaForCausalLM"])


def qwen2() -> Any:
    from transformers import Qwen2Config

    return Qwen2Config(**SMALL, tie_word_embeddings=False, architectures=["Qwen2ForCausalLM"])


def qwen3_mixture() -> Any:
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(**SMALL, **MIXTURE, head_dim=32, decoder_sparse_step=1, architectures=["Qwen3MoeForCausalLM"])


def deepseek_v2(lora: int, nope: int, rope: int, value: int, **changed: Any) -> Any:
    """Its attention absorbs a projection into matrices that lie beside its parameters, and are made anew after each
    install. lora, nope, rope, value: sizes of the attention, of which some kernels know DeepSeek's own only."""
    from transformers import DeepseekV2Config

    return DeepseekV2Config(
        **SMALL | MIXTURE | {"num_key_value_heads": 4, "tie_word_embeddings": False} | changed,
        kv_lora_rank=lora,
        q_lora_rank=None,
        qk_nope_head_dim=nope,
        qk_rope_head_dim=rope,
        v_head_dim=value,
        n_routed_experts=4,
        n_shared_experts=1,
        first_k_dense_replace=1,
        architectures=["DeepseekV2ForCausalLM"],
    )


def gpt2() -> Any:
    from transformers import GPT2Config

    return GPT2Config(
        vocab_size=500,
        n_embd=128,
        n_layer=2,
        n_head=4,
        n_positions=512,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=None,
        architectures=["GPT2LMHeadModel"],
    )


def falcon() -> Any:
    """Its loader makes the fused QKV of the checkpoint's own order with `torch.cat`, which cannot be recorded."""
    from transformers import FalconConfig

    return FalconConfig(
        vocab_size=500,
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_kv_heads=2,
        new_decoder_architecture=True,
        parallel_attn=True,
        alibi=False,
        bias=False,
        max_position_embeddings=512,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=None,
        architectures=["FalconForCausalLM"],
    )


def mamba2() -> Any:
    """Its loader computes `-exp` of A, in float32, where it has loaded it."""
    from transformers import Mamba2Config

    return Mamba2Config(
        vocab_size=512,
        hidden_size=128,
        num_hidden_layers=2,
        num_heads=8,
        head_dim=32,
        expand=2,
        n_groups=1,
        state_size=32,
        chunk_size=16,
        initializer_range=0.2,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        architectures=["Mamba2ForCausalLM"],
    )


MODELS: dict[str, tuple[Callable[[], Any], str]] = {
    "llama with tied embeddings": (llama, "model.layers.1.mlp.up_proj.weight"),
    "qwen2 with QKV bias": (qwen2, "model.layers.0.self_attn.v_proj.bias"),
    "qwen3 mixture of experts": (qwen3_mixture, "model.layers.1.mlp.experts.3.gate_proj.weight"),
    "gpt2 with transposed weights": (gpt2, "transformer.h.1.mlp.c_fc.weight"),
    "falcon with a loader that concatenates": (falcon, "transformer.h.1.self_attention.query_key_value.weight"),
    "mamba2 with a loader that computes": (mamba2, "backbone.layers.1.mixer.A_log"),
}

BY_LOADER = {
    "falcon with a loader that concatenates": [
        f"transformer.h.{layer}.self_attention.query_key_value.weight" for layer in range(2)
    ],
    "mamba2 with a loader that computes": [f"backbone.layers.{layer}.mixer.A" for layer in range(2)],
}
"""What goes through vLLM's own loader at every update, by kind."""


ELSEWHERE_TOO = ("llama with tied embeddings", "qwen3 mixture of experts")
"""Kinds that other tests play as well: without a server (test_vllm_residency.py), and on two workers
(test_vllm_layouts.py)."""


def build(config: Any, seed: int, path: Path, embedding: float = 1.0) -> tuple[Any, dict[str, torch.Tensor]]:
    """A random model, and its tensors under the names of the checkpoint that transformers writes.

    embedding: scales the embedding, of models that would else repeat their last token whatever their layers hold.
    """
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    auto: Any = AutoModelForCausalLM
    model = auto.from_config(config, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn(parameter.shape))
            if "lm_head" in name or "wte" in name or "embed_tokens" in name:
                parameter.mul_(torch.exp(0.4 * torch.randn(parameter.shape[0], 1)))
            if "embed_tokens" in name:
                parameter.mul_(embedding)
    model.save_pretrained(path)
    return model, load_file(path / "model.safetensors")


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=pytest.mark.slow) if kind in ELSEWHERE_TOO else kind for kind in MODELS],
)
def test_a_model_class(tmp_path: Path, kind: str) -> None:
    torch.set_num_threads(1)
    make, lacking = MODELS[kind]
    config = make()
    with running_cluster(tmp_path / "cluster") as cluster:
        replica = start_vllm(cluster, "vllm", bare(config, tmp_path / "bare")).registered(600)
        assert_closed(replica)
        with Trainer(cluster.address, lineage=kind) as trainer:
            for version in (1, 2):
                model, weights = build(config, version, tmp_path / f"version-{version}")
                trainer.publish(tmp_path / f"version-{version}")
                report = trainer.update_weights(version=version)
                assert report.ok, f"{report}\n{replica.tail()}"
                assert report.verified
                (worker,) = report.replicas[0].message.workers
                assert sorted(worker.by_loader) == BY_LOADER.get(kind, [])
                assert_serves(replica, model, version)
            refuses_without(trainer, weights, lacking)
            assert_serves(replica, model, 2)  # the refused update left it
