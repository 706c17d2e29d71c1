"""How a tensor may be split, read off its checkpoint name. Pure.

The names are those of the architectures in shapes.py. Megatron-like trainers and engines split them alike: linear
layers by their outputs or their inputs, the vocabulary by its rows, experts one by one or each like a linear layer.
"""

from __future__ import annotations

import re
from typing import NamedTuple

COLUMNS = frozenset({"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "q_b_proj", "kv_b_proj", "w1", "w3"})
ROWS = frozenset({"o_proj", "down_proj", "w2"})
VOCABULARY = frozenset({"embed_tokens", "lm_head"})
PAIRS = frozenset({"k_proj", "v_proj"})
WHOLE = frozenset({"q_a_proj", "kv_a_proj_with_mqa", "gate"})
"""Linear layers that every worker has whole."""

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_EXPERT = re.compile(r"\.experts\.(?:(\d+)\.|(gate_up_proj|down_proj)$)")


class Role(NamedTuple):
    """A tensor's role in its model."""

    axis: int | None = None  # along which tensor parallelism splits it; None: every worker has it whole
    vocabulary: bool = False  # its rows are tokens
    pairs: bool = False  # its rows are key-value heads
    layer: int | None = None  # None: it belongs to no layer
    first: bool = False  # if it belongs to no layer: it comes before all layers, not after them
    expert: int | None = None  # its number; None: it belongs to no expert
    fused: bool = False  # it has all experts of a layer
    halves: bool = False  # its axis has two parts, each of which is split
    known: bool = True  # False: a matrix of unknown name


def role_of(name: str, dimensions: int) -> Role:
    """The role of the tensor of this name. dimensions: of its shape."""
    found = _LAYER.search(name)
    layer = int(found[1]) if found else None
    expert = _EXPERT.search(name)
    if expert and expert[2]:
        halves = expert[2] == "gate_up_proj"
        return Role(axis=1 if halves else 2, layer=layer, fused=True, halves=halves)
    number = int(expert[1]) if expert else None
    parts = name.split(".")
    kind, module = parts[-1], parts[-2] if len(parts) > 1 else ""
    if module in VOCABULARY:
        return Role(axis=0, vocabulary=True, first=module == "embed_tokens")
    if module in COLUMNS:
        return Role(axis=0, pairs=module in PAIRS, layer=layer, expert=number)
    if module in ROWS:
        return Role(axis=None if kind == "bias" else 1, layer=layer, expert=number)
    known = dimensions < 2 or module in WHOLE
    return Role(layer=layer, expert=number, known=known)
