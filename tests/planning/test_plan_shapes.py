"""The table of shapes is that of the models which transformers builds, and what is read from files is what they say."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file

from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.planning import roles
from ckpt_engine.planning.model import read_model
from ckpt_engine.planning.shapes import RULES, shapes_of
from ckpt_engine_adapters.reference import model as reference

SMALL = {
    "vocab_size": 100,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
LATENT = {
    "q_lora_rank": 20,
    "kv_lora_rank": 12,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 24,
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "moe_intermediate_size": 40,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
}
EXPERTS = {"num_experts": 4, "moe_intermediate_size": 24, "num_experts_per_tok": 2}

MODELS: list[tuple[str, str, dict[str, Any]]] = [
    ("LlamaForCausalLM", "LlamaConfig", {}),
    ("LlamaForCausalLM", "LlamaConfig", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ("MistralForCausalLM", "MistralConfig", {}),
    ("Qwen2ForCausalLM", "Qwen2Config", {}),
    ("Qwen3ForCausalLM", "Qwen3Config", {"tie_word_embeddings": True}),
    ("Qwen3ForCausalLM", "Qwen3Config", {"attention_bias": True}),
    ("MixtralForCausalLM", "MixtralConfig", {"num_local_experts": 4}),
    ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", EXPERTS),
    ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", {**EXPERTS, "mlp_only_layers": [1], "decoder_sparse_step": 1}),
    ("DeepseekV3ForCausalLM", "DeepseekV3Config", LATENT),
    ("DeepseekV3ForCausalLM", "DeepseekV3Config", {**LATENT, "q_lora_rank": None, "num_key_value_heads": 4}),
]


def built(kind: str, changes: dict[str, Any]) -> tuple[Any, Counter[tuple[str, tuple[int, ...]]]]:
    """A config, and the names and shapes of what transformers makes of it, experts apart as checkpoints have them."""
    config = getattr(transformers, kind)(**{**SMALL, **changes})
    with torch.device("meta"):
        auto: Any = transformers.AutoModelForCausalLM
        model = auto.from_config(config)
    found: Counter[tuple[str, tuple[int, ...]]] = Counter()
    tensors = dict(model.named_parameters())
    tensors |= {name: each for name, each in model.named_buffers() if name.endswith("e_score_correction_bias")}
    for name, tensor in tensors.items():
        shape = tuple(tensor.shape)
        for plain, each in apart(name, shape):
            found[re.sub(r"\.block_sparse_moe\.", ".mlp.", plain), each] += 1
    return config, found


def apart(name: str, shape: tuple[int, ...]) -> list[tuple[str, tuple[int, ...]]]:
    """transformers keeps all experts of a layer in two tensors."""
    prefix, _, last = name.rpartition(".experts.")
    if last not in ("gate_up_proj", "down_proj"):
        return [(name, shape)]
    experts, rows, columns = shape
    if last == "down_proj":
        return [(f"{prefix}.experts.{number}.down_proj.weight", (rows, columns)) for number in range(experts)]
    both = ("gate_proj", "up_proj")
    return [(f"{prefix}.experts.{n}.{each}.weight", (rows // 2, columns)) for n in range(experts) for each in both]


def as_transformers(name: str) -> str:
    """Mixtral's checkpoints have other names than its module."""
    name = name.replace(".block_sparse_moe.", ".mlp.")
    for one, other in (("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj")):
        name = re.sub(rf"(\.experts\.\d+)\.{one}\.", rf"\1.{other}.", name)
    return name


@pytest.mark.parametrize(("architecture", "kind", "changes"), MODELS)
def test_shapes_are_those_of_transformers(architecture: str, kind: str, changes: dict[str, Any]) -> None:
    config, expected = built(kind, changes)
    found = Counter((as_transformers(each.name), each.shape) for each in shapes_of(architecture, config.to_dict()))
    assert found == expected


def test_every_rule_is_compared() -> None:
    assert {architecture for architecture, *_ in MODELS} == set(RULES)


def test_the_reference_engine_splits_what_the_roles_say() -> None:
    assert reference.COLUMN_PARALLEL <= roles.COLUMNS
    assert reference.ROW_PARALLEL <= roles.ROWS
    assert reference.VOCABULARY_PARALLEL == roles.VOCABULARY


def test_headers_and_a_config_say_the_same(tmp_path: Path) -> None:
    config = transformers.Qwen3Config(**SMALL)
    config.architectures = ["Qwen3ForCausalLM"]
    config.dtype = torch.bfloat16
    config.save_pretrained(tmp_path / "config")
    config.save_pretrained(tmp_path / "files")
    rule = shapes_of("Qwen3ForCausalLM", config.to_dict())
    tensors = {each.name: torch.zeros(each.shape, dtype=torch.bfloat16) for each in rule}
    save_file(tensors, tmp_path / "files/a.safetensors")
    by_config, by_headers = read_model(tmp_path / "config"), read_model(tmp_path / "files")
    assert by_config.tensors == by_headers.tensors
    assert by_config.heads == by_headers.heads
    assert by_headers.by_dtype == {"bfloat16": by_config.bytes}
    assert read_model(tmp_path / "files", "float32").bytes == 2 * by_config.bytes


def test_an_index_is_compared_with_the_config(tmp_path: Path) -> None:
    config = transformers.Qwen3Config(**SMALL).to_dict() | {"architectures": ["Qwen3ForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    names = [each.name for each in shapes_of("Qwen3ForCausalLM", config)]
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(names, "model-1-of-1.safetensors")}))
    assert "names agree with" in read_model(index).notes[-1]
    assert read_model(tmp_path).tensors == read_model(index).tensors
    index.write_text(json.dumps({"weight_map": dict.fromkeys([*names, "model.more"], "model-1-of-1.safetensors")}))
    assert "1 tensors more, such as model.more" in read_model(index).notes[-1]
    index.write_text(json.dumps({"weight_map": dict.fromkeys(names[1:], "model-1-of-1.safetensors")}))
    with pytest.raises(CkptEngineError, match="lacks 1 tensors that config"):
        read_model(index)
