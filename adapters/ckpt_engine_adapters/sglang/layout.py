"""Which checkpoint tensors other workers of the same SGLang server load: those of other pipeline stages, other experts.

SGLang itself knows: layers of other stages stand as placeholders in the model, and each layer of experts maps global
expert numbers to its own. It decides nothing about what this worker loads; the recorded loader does, and only what it
leaves is asked for here.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from sglang.srt.layers.utils import PPMissingLayer
from torch import nn

_EXPERT = re.compile(r"\.(\d+)\.")


class Elsewhere:
    """For one worker's model, which stays as it is."""

    def __init__(self, model: nn.Module) -> None:
        self._map: Callable[[str], str | None] | None = getattr(
            getattr(model, "hf_to_sglang_mapper", None), "_map_name", None
        )
        modules = dict(model.named_modules())
        self._stages = tuple(f"{name}." for name, module in modules.items() if isinstance(module, PPMissingLayer))
        self._experts: dict[str, Callable[[int], int]] = {}
        for name, module in modules.items():
            local: Any = getattr(module, "_map_global_expert_id_to_local_expert_id", None)
            if local is not None:
                self._experts[name] = local

    def why(self, name: str) -> str | None:
        """See LoadTarget.elsewhere."""
        mapped = name if self._map is None else self._map(name)
        for candidate in dict.fromkeys((name, mapped)):
            if candidate is None:
                continue
            if candidate.startswith(self._stages):
                return "another pipeline stage"
            for prefix, local in self._experts.items():
                found = _EXPERT.match(candidate, len(prefix)) if candidate.startswith(prefix) else None
                if found is not None and local(int(found.group(1))) < 0:
                    return "an expert of another rank"
        return None
