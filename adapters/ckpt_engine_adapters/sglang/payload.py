"""Encodes tensors in the form of SGLang's `/update_weights_from_tensor`. Runs in the agent; nothing is decoded here.

The form is a pickle, since the engine's API insists on one. It goes to an engine on this host behind its token and
contains only our instruction; SGLang decodes it with an allow-list. Our own code never loads a pickle.
"""

from __future__ import annotations

import base64
import pickle  # engine API insists
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def serialized(named_tensors: Sequence[tuple[str, Tensor]]) -> str:
    """Encodes `named_tensors` (plain CPU tensors) for one tensor parallel rank."""
    return base64.b64encode(pickle.dumps(list(named_tensors))).decode()
