"""Keeps vLLM on a CPU away from its attention kernel for AMX: imported at the start of each Python of its environment.

On processors that have AMX, vLLM 0.32 takes that kernel for bfloat16, and now and then it ends a worker with an illegal
instruction (in `cpu_attention_with_kv_cache`), at the first requests after a start. The one for AVX-512 does not.
Only for tests and demonstrations; no part of the package.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType

ASKED = "torch.cpu"


class WithoutAmx(importlib.abc.MetaPathFinder):
    """Loads `torch.cpu` as it is, then has it say that there is no AMX."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != ASKED:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                load(module)
                module._is_amx_tile_supported = lambda: False  # type: ignore[attr-defined]

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, WithoutAmx())
