"""Turns logits into a token: greedily, or by sampling that depends only on the seed and the token's index."""

from __future__ import annotations

import torch

_SEED_STEP = 0x9E3779B97F4A7C15  # odd, so that (seed, index) pairs do not meet on small numbers
_GREEDY_BELOW = 1e-5  # as in vLLM; logits divided by much less than this overflow
_SEED_MASK = (1 << 63) - 1


def choose(logits: torch.Tensor, temperature: float, seed: int, index: int) -> tuple[int, float] | None:
    """The next token and its log-probability under the model (temperature 1), or None if a logit is NaN.

    logits: float32 [vocabulary]. temperature: below 1e-5 it is greedy. seed, index: of the request, and of the token in
    its output. Equal ones draw equal tokens from equal logits, so a paused request continues as if it had not been
    paused.
    """
    if bool(torch.isnan(logits).any()):
        return None
    if temperature < _GREEDY_BELOW:
        token = int(logits.argmax())
    else:
        generator = torch.Generator().manual_seed((seed + (index + 1) * _SEED_STEP) & _SEED_MASK)
        token = int(torch.multinomial(torch.softmax(logits / temperature, dim=-1), 1, generator=generator))
    return token, float(torch.log_softmax(logits, dim=-1)[token])
