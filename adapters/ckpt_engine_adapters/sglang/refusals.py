"""Launch arguments of SGLang with which every update is refused, since no test has proven such updates right."""

from __future__ import annotations

from typing import Any

_WITHOUT_WEIGHTS = ("NGRAM", "LOOKAHEAD")
"""Kinds of speculative decoding without a draft model."""


def refusals(arguments: Any) -> list[str]:
    """Reasons to refuse updates, a sentence each; empty: updates are possible. arguments: SGLang's ServerArgs."""
    reasons = []
    algorithm = getattr(arguments, "speculative_algorithm", None)
    if algorithm and str(algorithm).upper() not in _WITHOUT_WEIGHTS:
        reasons.append(
            f"it has a draft model (--speculative-algorithm {algorithm}), which an update would leave with old "
            "weights; start it without one"
        )
    if getattr(arguments, "torchao_config", None):
        reasons.append(f"--torchao-config {arguments.torchao_config} repacks weights where no update could follow")
    if getattr(arguments, "cpu_offload_gb", 0) or getattr(arguments, "offload_group_size", -1) > 0:
        reasons.append("it offloads weights to the host (--cpu-offload-gb, --offload-group-size)")
    if getattr(arguments, "enable_eplb", False):
        reasons.append("it moves experts between ranks while it runs (--enable-eplb)")
    if getattr(arguments, "enable_lora", None) or getattr(arguments, "lora_paths", None):
        reasons.append("it serves adapters (--enable-lora, --lora-paths)")
    return reasons
