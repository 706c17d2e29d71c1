"""How a process of this package starts another one: with its own modules, and none of the working directory."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping


def module_command(module: str, *arguments: str) -> list[str]:
    """The command that runs a module. It imports nothing from the working directory, as `python -m` would."""
    return [sys.executable, "-P", "-m", module, *arguments]


def module_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment with this process's module paths added: not all modules may be installed."""
    return {**environment, "PYTHONPATH": os.pathsep.join(each for each in sys.path if each)}
