"""Finds checkpoint tensors that a worker rightly leaves: other workers of the same server load them (other pipeline
stages, other experts), or its model was made without their module (the tower of a vision model that serves text only).

The engine's model has that information: it has placeholders for layers of other stages and for modules that it does
without, and each layer of experts maps global expert numbers to its own. This module looks it up by checkpoint name. It
does not decide what this worker loads; the recorded loader does, and only tensors that it leaves are looked up. Nor
does it decide whether any worker has to take what is absent in this one (`core/complete.py` does).

vLLM and SGLang have inherited both from one origin, under the same names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

_EXPERT = re.compile(r"\.(\d+)\.")


class Elsewhere:
    """Looks up what one worker's model leaves. Changes nothing in the model."""

    def __init__(
        self,
        model: nn.Module,
        mapper: str,
        missing: tuple[type[nn.Module], ...],
        without: Callable[[nn.Module], str | None] = lambda _: None,
    ) -> None:
        """mapper: the model's attribute that maps a checkpoint's names to its own, if it has one. missing: classes of
        placeholders for layers of other pipeline stages. without: names the module that a placeholder stands for, if
        the model was made without it ("vision tower"); None for any other module."""
        self._map: Callable[[str], str | None] | None = getattr(getattr(model, mapper, None), "_map_name", None)
        # Some checkpoints omit the name of the only child that has the layers: "h.0" for "transformer.h.0".
        self._outer = tuple(f"{name}." for name, _ in model.named_children())
        modules = dict(model.named_modules())
        self._stages = tuple(f"{name}." for name, module in modules.items() if isinstance(module, missing) and name)
        names = {name: without(module) for name, module in modules.items() if name}
        self._without = {f"{name}.": word for name, word in names.items() if word is not None}
        self._experts: dict[str, Callable[[int], int]] = {}
        for name, module in modules.items():
            local: Any = getattr(module, "_map_global_expert_id_to_local_expert_id", None)
            if local is not None:
                self._experts[name] = local

    def why(self, name: str) -> str | None:
        """See LoadTarget.elsewhere."""
        if not self._stages and not self._experts:
            return None
        for candidate in self._names(name):
            if candidate.startswith(self._stages):
                return "another pipeline stage"
            for prefix, local in self._experts.items():
                match = _EXPERT.match(candidate, len(prefix)) if candidate.startswith(prefix) else None
                if match is not None and _is_elsewhere(local, int(match.group(1))):
                    return "an expert of another rank"
        return None

    def absent(self, name: str) -> str | None:
        """See LoadTarget.absent."""
        if not self._without:
            return None
        for candidate in self._names(name):
            for prefix, word in self._without.items():
                if candidate.startswith(prefix):
                    return f"was made without its {word}"
        return None

    def _names(self, name: str) -> Iterator[str]:
        """The model's possible names for the checkpoint tensor `name`."""
        model_name = name if self._map is None else self._map(name)
        for each in dict.fromkeys((name, model_name)):
            if each is not None:
                yield each
                yield from (outer + each for outer in self._outer)


def _is_elsewhere(local: Callable[[int], int], expert: int) -> bool:
    try:
        return local(expert) < 0
    except (IndexError, KeyError):
        return False
