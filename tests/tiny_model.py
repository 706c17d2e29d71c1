"""A tiny random Qwen3 whose greedy tokens two correct implementations cannot disagree on.

Random weights make near-ties between the two best tokens, and then rounding decides. So weights are drawn wide
(`initializer_range=0.2`), some rows of the output head are longer than others, and prompts are chosen whose smallest
top-2 gap over all steps is far above rounding.
Imports of transformers are inside the functions: importing this module is cheap.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch

VOCABULARY = 512
DECISIVE_GAP = 0.25  # logits; two bfloat16 runs that sum in another order differ by 0.04 (standard deviation) here

ROUNDING = 1.0
"""Logits. What `regrets` finds of right tokens lies below it: mostly 0.06, where two ranks add up their halves and over
hundreds of tokens sometimes 0.25. Tokens of other weights have a regret of 15 or more within 200 tokens."""


class Reference(NamedTuple):
    """What transformers itself generates: greedy tokens, and the smallest distance between the two best logits."""

    tokens: list[int]
    gap: float


def make_tiny_qwen3(
    path: Path | str,
    seed: int = 0,
    *,
    layers: int = 2,
    hidden: int = 128,
    vocabulary: int = VOCABULARY,
    intermediate: int = 256,
    tied: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    weights: bool = True,
) -> Any:
    """Writes a Hugging Face directory (config.json, and model.safetensors if `weights`); returns the model.

    Two calls with equal arguments make equal weights; another `seed` makes another version of the same model.
    The norm weights are random too: at 1.0 a norm that was never loaded would not be noticed.
    """
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, Qwen3Config

    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    config.architectures = ["Qwen3ForCausalLM"]
    config.dtype = dtype
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        auto: Any = AutoModelForCausalLM
        model = auto.from_config(config, dtype=dtype).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" in name:
                    parameter.copy_(1.0 + 0.2 * torch.randn(parameter.shape))
            model.get_output_embeddings().weight.mul_(torch.exp(0.4 * torch.randn(vocabulary, 1)))
    directory = Path(path)
    directory.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(directory)
    if weights:
        save_file(dict(named_weights(model)), directory / "model.safetensors", metadata={"format": "pt"})
    return model


def named_weights(model: Any) -> list[tuple[str, torch.Tensor]]:
    """The model's checkpoint tensors under their checkpoint names, tied ones once, sorted by name."""
    return sorted((name, parameter.detach()) for name, parameter in model.named_parameters())


def reference_tokens(model: Any, prompt: list[int], count: int) -> Reference:
    """Greedy tokens of transformers' own `generate` after `prompt`, exactly `count` of them."""
    return _generate(model, torch.tensor([prompt]), count)[0]


def regrets(model: Any, prompt: list[int], output: list[int]) -> list[float]:
    """How far each greedy token of `output` is from the best one, in logits of one pass over all of them.

    Correct output stays within rounding of 0 also where two tokens tie; tokens of other weights do not.
    """
    tokens = torch.tensor([prompt + output])
    with torch.no_grad():
        logits = model(tokens).logits[0, len(prompt) - 1 : -1].float()
    chosen = logits.gather(1, torch.tensor(output).unsqueeze(1)).squeeze(1)
    regret: list[float] = (logits.amax(dim=1) - chosen).tolist()
    return regret


def decisive_prompts(model: Any, number: int, count: int = 32, length: int = 6) -> list[list[int]]:
    """`number` prompts of `length` tokens whose greedy continuation of `count` tokens nowhere comes near a tie.

    Continuations of a few repeated tokens are left out: they would hide a wrong cache. Takes about 0.2 s.
    Raises ValueError when fewer than `number` of 2,048 candidates keep `DECISIVE_GAP`.
    """
    generator = torch.Generator().manual_seed(number)
    found: list[list[int]] = []
    for _ in range(16):
        candidates = torch.randint(0, model.config.vocab_size, (128, length), generator=generator)
        results = _generate(model, candidates, count)
        found += [
            row.tolist()
            for row, result in zip(candidates, results, strict=True)
            if result.gap > DECISIVE_GAP and len(set(result.tokens)) > count // 4
        ]
        if len(found) >= number:
            return found[:number]
    raise ValueError(f"only {len(found)} of 2,048 prompts keep a top-2 gap of {DECISIVE_GAP} for {count} tokens")


def _generate(model: Any, prompts: torch.Tensor, count: int) -> list[Reference]:
    with torch.no_grad():
        result = model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=False,
            max_new_tokens=count,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
    best = torch.stack(result.logits, dim=1).float().topk(2, dim=-1).values
    gaps = (best[..., 0] - best[..., 1]).amin(dim=1)
    tokens = result.sequences[:, prompts.shape[1] :]
    return [Reference(row.tolist(), float(gap)) for row, gap in zip(tokens, gaps, strict=True)]
