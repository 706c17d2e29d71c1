"""The shapes of Qwen3-8B: 399 tensors, 16.38 GB in bfloat16, with random values."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import nn

LAYERS, HIDDEN, INTERMEDIATE, VOCABULARY, KEYS, HEAD = 36, 4096, 12288, 151936, 1024, 128

LAYER = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (KEYS, HIDDEN),
    "self_attn.v_proj": (KEYS, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "self_attn.q_norm": (HEAD,),
    "self_attn.k_norm": (HEAD,),
    "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
    "mlp.up_proj": (INTERMEDIATE, HIDDEN),
    "mlp.down_proj": (HIDDEN, INTERMEDIATE),
    "input_layernorm": (HIDDEN,),
    "post_attention_layernorm": (HIDDEN,),
}

SHAPES: dict[str, tuple[int, ...]] = {
    "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
    **{f"model.layers.{i}.{name}.weight": shape for i in range(LAYERS) for name, shape in LAYER.items()},
    "model.norm.weight": (HIDDEN,),
    "lm_head.weight": (VOCABULARY, HIDDEN),
}

BYTES = 2 * sum(torch.Size(shape).numel() for shape in SHAPES.values())

COLUMNS = ("o_proj.weight", "down_proj.weight")
"""What a tensor-parallel worker holds columns of; of other matrices it holds rows, of norms everything."""


class Tree(nn.Module):
    """Parameters under dotted names, as a trainer's model has them; it has no forward."""

    def __init__(self, device: str) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            *path, last = name.split(".")
            module: nn.Module = self
            for step in path:
                if not hasattr(module, step):
                    module.add_module(step, nn.Module())
                module = getattr(module, step)
            module.register_parameter(
                last, nn.Parameter(torch.empty(shape, dtype=torch.bfloat16, device=device), requires_grad=False)
            )


@torch.no_grad()
def renew(model: nn.Module, seed: int) -> None:
    """New random values in every parameter (its local shard), where they lie; waits until they are there."""
    generator: torch.Generator | None = None
    for parameter in model.parameters():
        local = getattr(parameter, "to_local", lambda parameter=parameter: parameter)()
        if generator is None:
            generator = torch.Generator(device=local.device).manual_seed(seed)
        if parameter.dim() == 1:
            local.normal_(1.0, 0.02, generator=generator)
        else:
            local.normal_(0.0, 0.02, generator=generator)
    torch.cuda.synchronize()


class HostWeights:
    """New values for a model in host memory, made on a GPU: a CPU would take a minute for each version."""

    def __init__(self, model: Tree) -> None:
        self._model = model
        self._generator = torch.Generator(device="cuda:0")

    @torch.no_grad()
    def renew(self, seed: int) -> None:
        self._generator.manual_seed(seed)
        for parameter in self._model.parameters():
            values = torch.empty(parameter.shape, dtype=parameter.dtype, device="cuda:0")
            parameter.copy_(values.normal_(0.0, 0.02, generator=self._generator))


def slice_bytes(workers: int) -> int:
    """What all workers of one tensor-parallel replica need together, in bytes."""
    return sum(2 * torch.Size(shape).numel() * (workers if len(shape) == 1 else 1) for shape in SHAPES.values())


def write_config(path: Path) -> Path:
    """A model directory without weights."""
    path.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HIDDEN // HEAD,
        "num_key_value_heads": KEYS // HEAD,
        "head_dim": HEAD,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "attention_bias": False,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    (path / "config.json").write_text(json.dumps(config))
    return path
