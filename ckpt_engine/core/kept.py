"""The dtypes in which weights are served, from those that models keep: float32 masters for engines of bfloat16.

It decides which tensors of a publication are served narrower than they are stored, so that no model has to narrow them.
It does not decide when: that is fixed before a publication is first sealed. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from ckpt_engine.core.dtypes import widens

_NUMBER = re.compile(r"\d+")

Kept = Mapping[str, str]
"""By `kind_of` a tensor's name, the dtype in which models keep it; only where that is narrower than the served one."""


def kind_of(name: str) -> str:
    """The name with # for each number: one for all layers and all experts."""
    return _NUMBER.sub("#", name)


def kept_dtypes(casts: Iterable[tuple[str, str, str]]) -> dict[str, str]:
    """The kept dtypes of tensors that a model could not load; empty if serving these would not fix all of them.

    casts: of each such tensor its name, the served dtype and the model's.
    """
    found = {}
    for name, have, want in casts:
        if not widens(want, have):
            return {}
        found[kind_of(name)] = want
    return found


def narrow_dtype(name: str, dtype: str, model_dtypes: Kept) -> str:
    """The dtype in which to serve a tensor that is stored as ``dtype``: the one of the models, if that is narrower."""
    narrow = model_dtypes.get(kind_of(name), dtype)
    return narrow if widens(narrow, dtype) else dtype
