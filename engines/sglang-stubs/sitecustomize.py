"""Lets the genuine SGLang server run where three of its packages cannot: on PYTHONPATH for its environment on a CPU.

Without AMX, SGLang's layers take paths of plain torch on a CPU, so its CUDA kernels, torchvision and soundfile are only
imported, never called. Each becomes a module whose attributes are mocks. Scheduler, HTTP server, loaders and models are
SGLang's own. Only for tests and demonstrations; no part of the package.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from unittest.mock import MagicMock

ABSENT = frozenset({"sgl_kernel", "soundfile", "torchvision"})


class Mocks(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the absent packages and everything below them."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in ABSENT:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = MagicMock(name=spec.name)
        module.__spec__, module.__path__, module.__version__ = spec, [], "0.0.0"
        return module

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing to run."""


sys.meta_path.append(Mocks())
