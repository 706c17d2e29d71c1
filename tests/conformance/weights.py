"""The versions that the suite publishes, and what each must answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tests.tiny_model import (
    DECISIVE_GAP,
    ROUNDING,
    decisive_prompts,
    make_tiny_qwen3,
    named_weights,
    reference_tokens,
    regrets,
)

TOKENS = 32
O_PROJ = "model.layers.1.self_attn.o_proj.weight"
K_PROJ = "model.layers.0.self_attn.k_proj.weight"
UP_PROJ = "model.layers.0.mlp.up_proj.weight"


class Models:
    """Tiny models by seed, made once. `path` gets their directories."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._made: dict[int, Any] = {}
        self._expected: dict[int, tuple[list[int], list[int]]] = {}
        make_tiny_qwen3(self.bare, weights=False)

    @property
    def bare(self) -> Path:
        """A directory without weights: whatever is served was installed."""
        return self.path / "bare"

    def __getitem__(self, seed: int) -> Any:
        if seed not in self._made:
            self._made[seed] = make_tiny_qwen3(self.path / str(seed), seed, weights=False)
        return self._made[seed]

    def checkpoint(self, seed: int) -> Path:
        """A directory with this version's safetensors."""
        path = self.path / f"checkpoint-{seed}"
        if not path.exists():
            make_tiny_qwen3(path, seed)
        return path

    def expected(self, seed: int) -> tuple[list[int], list[int]]:
        """A prompt at which rounding decides nothing, and the greedy tokens of transformers."""
        if seed not in self._expected:
            prompt = decisive_prompts(self[seed], 1, TOKENS)[0]
            found = reference_tokens(self[seed], prompt, TOKENS)
            assert found.gap > DECISIVE_GAP
            self._expected[seed] = prompt, found.tokens
        return self._expected[seed]

    def live(self, seed: int) -> Any:
        """A model of its own with these weights, to be published and trained in place."""
        return make_tiny_qwen3(self.path / "live", seed, weights=False)


def load(live: Any, model: Any) -> None:
    """As an optimizer would: the values change where they lie."""
    with torch.no_grad():
        for mine, theirs in zip(live.parameters(), model.parameters(), strict=True):
            mine.copy_(theirs)


def weights_of(model: Any) -> dict[str, torch.Tensor]:
    return dict(named_weights(model))


Change = Callable[[dict[str, torch.Tensor]], Mapping[str, torch.Tensor]]

BAD: dict[str, tuple[Change, str]] = {
    "missing": (lambda w: {name: each for name, each in w.items() if name != O_PROJ}, O_PROJ),
    "one leg of a fused tensor missing": (lambda w: {name: each for name, each in w.items() if name != K_PROJ}, K_PROJ),
    "unknown": (lambda w: {**w, "model.layers.0.extra.weight": torch.zeros(4, dtype=torch.bfloat16)}, "extra"),
    "wrong shape": (lambda w: {**w, O_PROJ: torch.zeros(64, 128, dtype=torch.bfloat16)}, O_PROJ),
    "transposed": (lambda w: {**w, UP_PROJ: w[UP_PROJ].t()}, UP_PROJ),
    "wrong dtype": (lambda w: {**w, O_PROJ: w[O_PROJ].half()}, O_PROJ),
    "unsupported dtype": (lambda w: {**w, O_PROJ: w[O_PROJ].to(torch.complex64)}, O_PROJ),
    "empty": (lambda w: {}, ""),
}
"""What an engine's own loader may take without a word, and the tensor that a refusal must name."""


def of_one_version(models: Sequence[Any], prompt: Sequence[int], tokens: Sequence[int]) -> bool:
    """Whether one of the models makes all these tokens, up to rounding."""
    found = [regrets(model, list(prompt), list(tokens)) for model in models]
    return min(max(each) for each in found) < ROUNDING


def of_either_version(models: Sequence[Any], prompt: Sequence[int], tokens: Sequence[int]) -> bool:
    """Whether each token is what one of the models makes after those before it: so caches were computed anew."""
    found = [regrets(model, list(prompt), list(tokens)) for model in models]
    return max(min(each) for each in zip(*found, strict=True)) < ROUNDING
