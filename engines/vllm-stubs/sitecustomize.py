"""Makes vLLM run on a CPU with what the index has: imported at the start of each Python of its environment.

On processors that have AMX, vLLM 0.32 takes an attention kernel for bfloat16 which now and then ends a worker with an
illegal instruction (in `cpu_attention_with_kv_cache`), at the first requests after a start. The one for AVX-512 does
not. So `torch.cpu` says that there is no AMX.

torchvision resizes the pictures of vision models in plain torch. The index has it with kernels for CUDA only, which do
not load beside a torch for CPUs; its import then fails at two operators that are not there. So these are declared.
Only for tests and demonstrations; no part of the package.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType


def _without_amx(load: Callable[[ModuleType], None], module: ModuleType) -> None:
    load(module)
    module._is_amx_tile_supported = lambda: False  # type: ignore[attr-defined]


def _with_operators(load: Callable[[ModuleType], None], module: ModuleType) -> None:
    import torch.library

    torch.library.define("torchvision::nms", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    torch.library.define("torchvision::qnms", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    load(module)


CHANGED = {"torch.cpu": _without_amx, "torchvision": _with_operators}


class Changing(importlib.abc.MetaPathFinder):
    """Loads the modules of CHANGED as these say."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in CHANGED:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module
            spec.loader.exec_module = lambda module: CHANGED[name](load, module)  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, Changing())
