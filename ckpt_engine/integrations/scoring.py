"""Scores token ids under a model of transformers, plain or sharded by FSDP2, for `Trainer(probe=...)`.

It computes one forward pass a sequence and leaves the model as it was: its modes of training, its shards, its random
numbers. It keeps nothing, and decides nothing about figures.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ckpt_engine.trainer.probe import Score, TokenScores


def model_score(model: Any) -> Score:
    """The `score` of a Probe: log-probabilities and likeliest tokens under `model`, in float32 from its logits.

    model: called as `model(input_ids=[1, tokens], use_cache=False)`, and has `.logits` [1, tokens, vocabulary]. With
    FSDP2 every rank calls it, with the same sequences. It computes in the model's own dtype; to score in that of a
    mixed precision, call it within the same `torch.autocast` as the training's forward pass.
    """

    def score(sequences: Sequence[Sequence[int]]) -> list[TokenScores]:
        device = next(model.parameters()).device
        with _as_it_was(model), torch.no_grad():
            return [_scored(model, torch.tensor([list(tokens)], device=device)) for tokens in sequences]

    return score


def _scored(model: Any, tokens: torch.Tensor) -> TokenScores:
    """The scores of one sequence. tokens: int64 [1, tokens]."""
    logits = model(input_ids=tokens, use_cache=False).logits
    logits = logits.full_tensor() if hasattr(logits, "full_tensor") else logits
    found = torch.log_softmax(logits[0, :-1].float(), dim=-1)
    values = found.gather(-1, tokens[0, 1:].to(found.device).unsqueeze(-1)).squeeze(-1)
    return TokenScores(values.tolist(), found.argmax(dim=-1).tolist())


@contextmanager
def _as_it_was(model: Any) -> Iterator[None]:
    """Evaluates meanwhile (no dropout); afterwards each module is in its own mode again. FSDP2 gathers its root for a
    forward pass and frees it in the backward pass, which there is none of: it is sharded again here."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training
            if hasattr(module, "reshard"):
                module.reshard()
