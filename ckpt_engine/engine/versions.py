"""Which versions of an engine an adapter drives, and whether one of them is installed beside us.

Importing it imports no engine.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from ckpt_engine.engine.adapter import AdapterAvailability

FORCE = "CKPT_ENGINE_FORCE_ENGINE_VERSION"
"""Set to 1 to drive a version that nobody has tested."""


@dataclass(frozen=True)
class Supported:
    """The versions of an engine that tests and benchmarks run against; others are refused by name unless forced.

    engine: what people call it. versions: whole ones ("0.5.16"), or beginnings that end with a dot ("0.26.").
    """

    engine: str
    versions: tuple[str, ...]

    def allows(self, version: str) -> tuple[bool, str]:
        """Whether `version` may be driven, and a sentence that says why not, or why nevertheless."""
        if any(version.startswith(each) if each.endswith(".") else version == each for each in self.versions):
            return True, ""
        tested = ", ".join(f"{each}x" if each.endswith(".") else each for each in self.versions)
        if os.environ.get(FORCE) == "1":
            return True, f"{self.engine} {version} is driven because {FORCE}=1; tested are {tested}"
        return False, f"{self.engine} {version} is not supported: tested are {tested}; set {FORCE}=1 to try"

    def installed(self, module: str, distributions: Sequence[str]) -> AdapterAvailability:
        """What is installed beside us; engines in another environment are found only by running them.

        module: that the engine is imported as, and the extra that brings it. distributions: that may have brought it.
        """
        if importlib.util.find_spec(module) is None:
            reason = f"{module} is not installed in this environment (extra: ckpt-engine[{module}])"
            return AdapterAvailability(False, "", reason)
        for distribution in distributions:
            with suppress(importlib.metadata.PackageNotFoundError):
                version = importlib.metadata.version(distribution)
                supported, reason = self.allows(version)
                return AdapterAvailability(supported, version, reason or "installed")
        return AdapterAvailability(False, "", f"{module} can be imported, but has no metadata that tells its version")
