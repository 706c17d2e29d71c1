"""The shapes of a model's tensors, as in its architecture's checkpoints, from the numbers in config.json. Pure.

There is one rule for each architecture, by its name in config.json; other architectures are refused. A test compares
the rules with the models that transformers builds. Experts are listed one by one, as in checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple

from ckpt_engine.core.problems import invalid

Config = Mapping[str, Any]
Shape = tuple[int, ...]


class TensorShape(NamedTuple):
    """A tensor's name and shape."""

    name: str
    shape: Shape
    dtype: str = ""  # empty: that of the model


MOST_TENSORS = 200_000

Rule = Callable[[Config], Iterator[TensorShape]]


def shapes_of(architecture: str, config: Config) -> list[TensorShape]:
    """Every tensor of a model, in the order of its layers.

    Raises INVALID_ARGUMENT for an architecture without a rule, or a config without a number that its rule needs.
    """
    rule = RULES.get(architecture)
    if rule is None:
        raise invalid(
            f"the shapes of {architecture} are not known here (known: {', '.join(RULES)}): give the directory of its "
            "safetensors files instead, whose headers have all shapes"
        )
    found = list(islice(rule(config), MOST_TENSORS + 1))
    if len(found) > MOST_TENSORS:
        raise invalid(f"config.json says more than {MOST_TENSORS} tensors, which no model has; look at its numbers")
    return found


def number(config: Config, *names: str) -> int:
    """A positive integer of a config, under the first of these names that it has. Raises INVALID_ARGUMENT if it has
    none."""
    value = optional(config, *names)
    if value is None:
        raise invalid(f"config.json has no {' or '.join(names)}, which the shapes follow from")
    return value


def optional(config: Config, *names: str) -> int | None:
    """The same; None if the config has none of these names."""
    for name in names:
        value = config.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise invalid(f"config.json: {name} must be an int of at least 1, got {value!r}")
        return value
    return None


def head_dim(config: Config) -> int:
    """The dimension of an attention head."""
    return optional(config, "head_dim") or number(config, "hidden_size") // number(config, "num_attention_heads")


def key_value_heads(config: Config) -> int:
    """Heads of keys and values; as many as query heads where the config names none."""
    return optional(config, "num_key_value_heads") or number(config, "num_attention_heads")


def _model(config: Config, layer: Callable[[int], Iterator[TensorShape]]) -> Iterator[TensorShape]:
    hidden, vocabulary = number(config, "hidden_size"), number(config, "vocab_size")
    yield TensorShape("model.embed_tokens.weight", (vocabulary, hidden))
    for index in range(number(config, "num_hidden_layers")):
        prefix = f"model.layers.{index}."
        for each in layer(index):
            yield TensorShape(prefix + each.name, each.shape, each.dtype)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield TensorShape(f"{prefix}{norm}.weight", (hidden,))
    yield TensorShape("model.norm.weight", (hidden,))
    if not config.get("tie_word_embeddings", False):
        yield TensorShape("lm_head.weight", (vocabulary, hidden))


def _linear(name: str, rows: int, columns: int, bias: bool = False) -> Iterator[TensorShape]:
    yield TensorShape(f"{name}.weight", (rows, columns))
    if bias:
        yield TensorShape(f"{name}.bias", (rows,))


def _attention(config: Config, bias: bool, output_bias: bool, norms: bool) -> Iterator[TensorShape]:
    hidden, heads, size = number(config, "hidden_size"), number(config, "num_attention_heads"), head_dim(config)
    pairs = key_value_heads(config)
    yield from _linear("self_attn.q_proj", heads * size, hidden, bias)
    yield from _linear("self_attn.k_proj", pairs * size, hidden, bias)
    yield from _linear("self_attn.v_proj", pairs * size, hidden, bias)
    yield from _linear("self_attn.o_proj", hidden, heads * size, output_bias)
    if norms:
        yield TensorShape("self_attn.q_norm.weight", (size,))
        yield TensorShape("self_attn.k_norm.weight", (size,))


def _mlp(prefix: str, hidden: int, inner: int, bias: bool = False) -> Iterator[TensorShape]:
    yield from _linear(f"{prefix}.gate_proj", inner, hidden, bias)
    yield from _linear(f"{prefix}.up_proj", inner, hidden, bias)
    yield from _linear(f"{prefix}.down_proj", hidden, inner, bias)


def _dense(norms: bool = False, always_bias: bool = False) -> Rule:
    def layer(config: Config) -> Iterator[TensorShape]:
        output_bias = bool(config.get("attention_bias", False)) and not always_bias
        yield from _attention(config, output_bias or always_bias, output_bias, norms)
        inner = number(config, "intermediate_size")
        yield from _mlp("mlp", number(config, "hidden_size"), inner, bool(config.get("mlp_bias", False)))

    return lambda config: _model(config, lambda index: layer(config))


def _mistral(config: Config) -> Iterator[TensorShape]:
    return _dense()({**config, "attention_bias": False, "mlp_bias": False})


def _mixtral(config: Config) -> Iterator[TensorShape]:
    hidden, inner = number(config, "hidden_size"), number(config, "intermediate_size")
    experts = number(config, "num_local_experts", "num_experts")

    def layer(index: int) -> Iterator[TensorShape]:
        yield from _attention(config, False, False, False)
        yield TensorShape("block_sparse_moe.gate.weight", (experts, hidden))
        for expert in range(experts):
            prefix = f"block_sparse_moe.experts.{expert}"
            yield TensorShape(f"{prefix}.w1.weight", (inner, hidden))
            yield TensorShape(f"{prefix}.w2.weight", (hidden, inner))
            yield TensorShape(f"{prefix}.w3.weight", (inner, hidden))

    return _model(config, layer)


def _qwen3_moe(config: Config) -> Iterator[TensorShape]:
    hidden, experts = number(config, "hidden_size"), number(config, "num_experts", "num_local_experts")
    dense, step = config.get("mlp_only_layers") or [], optional(config, "decoder_sparse_step") or 1
    bias = bool(config.get("attention_bias", False))

    def layer(index: int) -> Iterator[TensorShape]:
        yield from _attention(config, bias, bias, True)
        if index in dense or (index + 1) % step:
            yield from _mlp("mlp", hidden, number(config, "intermediate_size"))
            return
        yield TensorShape("mlp.gate.weight", (experts, hidden))
        for expert in range(experts):
            yield from _mlp(f"mlp.experts.{expert}", hidden, number(config, "moe_intermediate_size"))

    return _model(config, layer)


def _latent_attention(config: Config) -> Iterator[TensorShape]:
    hidden, heads = number(config, "hidden_size"), number(config, "num_attention_heads")
    bias, rotary = bool(config.get("attention_bias", False)), number(config, "qk_rope_head_dim")
    plain, values = number(config, "qk_nope_head_dim"), number(config, "v_head_dim")
    low, pairs = optional(config, "q_lora_rank"), number(config, "kv_lora_rank")
    if low is None:
        yield from _linear("self_attn.q_proj", heads * (plain + rotary), hidden)
    else:
        yield from _linear("self_attn.q_a_proj", low, hidden, bias)
        yield TensorShape("self_attn.q_a_layernorm.weight", (low,))
        yield from _linear("self_attn.q_b_proj", heads * (plain + rotary), low)
    yield from _linear("self_attn.kv_a_proj_with_mqa", pairs + rotary, hidden, bias)
    yield TensorShape("self_attn.kv_a_layernorm.weight", (pairs,))
    yield from _linear("self_attn.kv_b_proj", heads * (plain + values), pairs)
    yield from _linear("self_attn.o_proj", hidden, heads * values, bias)


def _deepseek_v3(config: Config) -> Iterator[TensorShape]:
    hidden, experts = number(config, "hidden_size"), number(config, "n_routed_experts", "num_local_experts")
    inner, shared = number(config, "moe_intermediate_size"), optional(config, "n_shared_experts") or 0
    dense = config.get("first_k_dense_replace") or 0

    def layer(index: int) -> Iterator[TensorShape]:
        yield from _latent_attention(config)
        if index < dense:
            yield from _mlp("mlp", hidden, number(config, "intermediate_size"))
            return
        yield TensorShape("mlp.gate.weight", (experts, hidden))
        yield TensorShape("mlp.gate.e_score_correction_bias", (experts,), "float32")
        for expert in range(experts):
            yield from _mlp(f"mlp.experts.{expert}", hidden, inner)
        if shared:
            yield from _mlp("mlp.shared_experts", hidden, inner * shared)

    return _model(config, layer)


RULES: Mapping[str, Rule] = {
    "LlamaForCausalLM": _dense(),
    "MistralForCausalLM": _mistral,
    "Qwen2ForCausalLM": _dense(always_bias=True),
    "Qwen3ForCausalLM": _dense(norms=True),
    "MixtralForCausalLM": _mixtral,
    "Qwen3MoeForCausalLM": _qwen3_moe,
    "DeepseekV3ForCausalLM": _deepseek_v3,
}
