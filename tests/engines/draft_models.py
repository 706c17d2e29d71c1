"""Tiny targets with drafts of three kinds whose guesses are right, or wrong, by how they are made.

With random weights no guess is accepted, whatever a server does to the draft. So the layers of these targets add little
to the embedding (`FAINT`), and what follows a token is mostly decided by embedding and head. A draft that passes the
embedding on to the same head then guesses right; one whose projection is random guesses wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.tiny_model import make_tiny_qwen3, named_weights

Weights = dict[str, Tensor]

FAINT = 0.001
"""By how much the outputs of attention and of feed-forward layers are scaled down."""

HIDDEN, VOCABULARY = 128, 512


@dataclass(frozen=True)
class Version:
    """The weights of one version. draft: None: the draft's tensors are in the target's checkpoint."""

    target: Weights
    draft: Weights | None


class DraftModelKind:
    """A whole model of its own: the target's weights, with noise. Wrong: other random weights."""

    name, guesses, shared = "draft_model", 2, False

    def configure(self, path: Path) -> Mapping[str, Any]:
        """Writes the configurations without weights. Returns the server's `--speculative-config`."""
        for part in ("target", "draft"):
            make_tiny_qwen3(path / part, weights=False)
        return {"method": self.name, "model": str(path / "draft"), "num_speculative_tokens": self.guesses}

    def version(self, path: Path, seed: int, right: bool = True) -> Version:
        target = _faint(dict(named_weights(make_tiny_qwen3(path / "made", seed, weights=False))))
        generator = torch.Generator().manual_seed(seed)
        if not right:
            return Version(target, dict(named_weights(make_tiny_qwen3(path / "made", seed + 1000, weights=False))))
        noise = {name: torch.randn(each.shape, generator=generator) * 0.02 + 1 for name, each in target.items()}
        return Version(target, {name: (each * noise[name]).to(each.dtype) for name, each in target.items()})


class EagleKind:
    """EAGLE on a Llama: one layer after a projection of embedding and hidden state, with the target's embedding and
    head. Its checkpoint has an embedding, equal to the target's. Wrong: a random projection."""

    name, guesses, shared = "eagle", 2, True

    def configure(self, path: Path) -> Mapping[str, Any]:
        """Writes the configurations without weights. Returns the server's `--speculative-config`."""
        from transformers import LlamaConfig

        for part, layers in (("target", 2), ("draft", 1)):
            _configured(LlamaConfig, "LlamaForCausalLM", layers).save_pretrained(path / part)
        return {"method": self.name, "model": str(path / "draft"), "num_speculative_tokens": self.guesses}

    def version(self, path: Path, seed: int, right: bool = True) -> Version:
        from transformers import LlamaConfig

        target = _made(_configured(LlamaConfig, "LlamaForCausalLM", 2), seed)
        layer = {name: each for name, each in target.items() if name.startswith("model.layers.0.")}
        draft = {name.removeprefix("model."): each for name, each in layer.items() if "input_layernorm" not in name}
        draft = {name: each * 0 if "o_proj" in name or "down_proj" in name else each for name, each in draft.items()}
        draft["fc.weight"] = _projection(0, seed, right)
        draft["embed_tokens.weight"] = target["model.embed_tokens.weight"].clone()
        return Version(target, draft)


class MtpKind:
    """Multi-token prediction of MiMo: a layer in the target's own checkpoint. Wrong: a random projection."""

    name, guesses, shared = "mtp", 1, True

    def configure(self, path: Path) -> Mapping[str, Any]:
        """Writes the configurations without weights. Returns the server's `--speculative-config`."""
        self._config().save_pretrained(path / "target")
        return {"method": self.name, "num_speculative_tokens": self.guesses}

    def version(self, path: Path, seed: int, right: bool = True) -> Version:
        target = _made(self._config(), seed)
        one = torch.ones(HIDDEN, dtype=torch.bfloat16)
        for name in [name for name in target if name.startswith("model.layers.0.")]:
            own = name.replace("model.layers.0.", "model.mtp_layers.0.")
            target[own] = target[name] * 0 if "o_proj" in name or "down_proj" in name else target[name].clone()
        for norm in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
            target[f"model.mtp_layers.0.{norm}.weight"] = one.clone()
        target["model.mtp_layers.0.input_proj.weight"] = _projection(1, seed, right)
        return Version(target, None)

    def _config(self) -> Any:
        from transformers import Qwen2Config

        config = _configured(Qwen2Config, "MiMoForCausalLM", 2)
        config.num_nextn_predict_layers = 1
        return config


KINDS = {kind.name: kind for kind in (DraftModelKind(), EagleKind(), MtpKind())}


def _configured(kind: Any, architecture: str, layers: int) -> Any:
    config = kind(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=256,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    config.architectures = [architecture]
    config.dtype = torch.bfloat16
    return config


def _made(config: Any, seed: int) -> Weights:
    """Random weights by transformers' class for this configuration."""
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        auto: Any = AutoModelForCausalLM
        model = auto.from_config(config, dtype=torch.bfloat16)
    return _faint(dict(named_weights(model)))


def _faint(weights: Weights) -> Weights:
    return {
        name: each * FAINT if "o_proj" in name or "down_proj" in name else each.clone()
        for name, each in weights.items()
    }


def _projection(embedding: int, seed: int, right: bool) -> Tensor:
    """A projection of two hidden vectors to one: it passes on the one that is the embedding (0 or 1), or is random."""
    if not right:
        return torch.randn(HIDDEN, 2 * HIDDEN, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)
    projection = torch.zeros(HIDDEN, 2 * HIDDEN, dtype=torch.bfloat16)
    projection[:, embedding * HIDDEN : (embedding + 1) * HIDDEN] = torch.eye(HIDDEN, dtype=torch.bfloat16)
    return projection
