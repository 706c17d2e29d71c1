"""How a process of this package starts another one: with the modules that it has itself, whatever lies around it."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping


def module_command(module: str, *arguments: str) -> list[str]:
    """What runs a module. It takes none from the working directory, as `python -m` would by itself."""
    return [sys.executable, "-P", "-m", module, *arguments]


def module_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The same, and where this process finds its modules: not all of them may be installed."""
    return {**environment, "PYTHONPATH": os.pathsep.join(each for each in sys.path if each)}
