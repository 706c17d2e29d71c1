"""The dtypes in which weights are to be served, from those that models keep: float32 masters for engines of bfloat16.

It decides which tensors of a publication are served narrower than they are stored, so that no model has to narrow. It
does not decide when: that is fixed before a publication is sealed for the first time. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from ckpt_engine.core.dtypes import widens

_NUMBER = re.compile(r"\d+")

Kept = Mapping[str, str]
"""By `kind_of` a tensor's name, the dtype that a model keeps of it; only where that is narrower than what is served."""


def kind_of(name: str) -> str:
    """The name with # for each number: of all layers, and of all experts, one."""
    return _NUMBER.sub("#", name)


def kept_of(casts: Iterable[tuple[str, str, str]]) -> dict[str, str]:
    """What a model keeps that could not be loaded; empty if serving that would not do for all of it.

    casts: of each tensor its name, what is served and what the model keeps.
    """
    found = {}
    for name, have, want in casts:
        if not widens(want, have):
            return {}
        found[kind_of(name)] = want
    return found


def narrowed(name: str, dtype: str, model_dtypes: Kept) -> str:
    """In which dtype a tensor is served that is stored as ``dtype``: what is kept of its kind, if that is narrower."""
    narrow = model_dtypes.get(kind_of(name), dtype)
    return narrow if widens(narrow, dtype) else dtype
