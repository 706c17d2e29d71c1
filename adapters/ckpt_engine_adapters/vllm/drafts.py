"""The draft model of a vLLM worker (speculative decoding): whether there is one, and which module it is.

It decides what of vLLM's ways to guess tokens has weights, and whether they are in the target's checkpoint. It does not
decide how a model is loaded: a draft is one, and gets a target of its own (`target.py`).
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import FrameType
from typing import Any

from torch import nn
from vllm.config import ModelConfig, VllmConfig

_WITHOUT_WEIGHTS = frozenset({"ngram", "ngram_gpu", "suffix"})
"""Ways of speculative decoding that guess from the text alone."""

_FOLLOWED = frozenset({"draft_model", "eagle", "mtp"})
"""Ways of speculative decoding whose models vLLM loads as it loads any other."""


@dataclass(frozen=True)
class DraftModel:
    """A draft model of this worker."""

    model: nn.Module
    config: ModelConfig
    description: str  # for people
    of_target_checkpoint: bool  # its loader takes names of the target's checkpoint


def describe_draft(vllm_config: VllmConfig) -> str:
    """The server's draft model, for people; empty: it has none."""
    speculative = vllm_config.speculative_config
    if speculative is None or speculative.method in _WITHOUT_WEIGHTS:
        return ""
    return f"method {speculative.method}, model {speculative.model or 'of the same checkpoint'}"


def draft_of_caller(vllm_config: VllmConfig) -> DraftModel | str | None:
    """The draft model of the vLLM worker that makes its weight transfer engine now; None: this worker has none, and
    another pipeline stage may. A text says why updates of the server's draft cannot be followed.

    vLLM gives a weight transfer engine only the target, so that the worker is found among the callers.
    """
    description = describe_draft(vllm_config)
    if not description:
        return None
    speculative: Any = vllm_config.speculative_config
    if speculative.method not in _FOLLOWED:
        return f"this server has a draft ({description}), and no test has seen an update of that kind"
    worker = _calling_worker()
    if worker is None:
        return f"this server has a draft model ({description}), which this version of vLLM does not show"
    model = worker.get_draft_model()
    if model is None:
        return None
    shares = speculative.method == "mtp" and speculative.model in (None, vllm_config.model_config.model)
    return DraftModel(model, speculative.draft_model_config, description, shares)


def _calling_worker() -> Any:
    """The worker that has called us, if it can show its draft model."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        caller = frame.f_locals.get("self")
        if callable(getattr(type(caller), "get_draft_model", None)) and hasattr(caller, "model_runner"):
            return caller
        frame = frame.f_back
    return None
