"""Which versions of an engine an adapter drives, and which one is installed: here, or in the Python of a command.

Importing it imports no engine.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from ckpt_engine.engine.adapter import AdapterAvailability
from ckpt_engine.engine.programs import python_of

_ASK_SECONDS = 20.0


@dataclass(frozen=True)
class Supported:
    """The versions of an engine that an adapter drives.

    A tested version is used without further checks. An untested version that is newer than the first tested one is
    checked on its host before its first update (machines/agent/check.py). An older one is refused.
    """

    engine: str  # its name in messages
    tested: tuple[str, ...]  # ascending; whole versions ("0.5.16"), or prefixes that end with a dot ("0.26.")
    module: str  # the name under which Python imports the engine
    distributions: tuple[str, ...]  # the packages on an index that can contain that module

    def refusal(self, version: str) -> str:
        """Why `version` cannot be used at all; empty: it can, or has to be checked first."""
        if not _numbers(version):
            return f"{self.engine} reports {version!r}, which is not a version; {self._supported}"
        if _numbers(version) < _numbers(self.tested[0]):
            return f"{self.engine} {version} is not supported; {self._supported}"
        return ""

    def missing(self, python: str) -> str:
        """The message for a Python that has no such engine. python: its path."""
        return f"{self.engine} is not installed for {python}; {self._supported}"

    @property
    def _supported(self) -> str:
        """What is supported, and what to do."""
        return (
            f"it must be {self.tested[0].rstrip('.')} or newer: pip install 'ckpt-engine[{self.module}]', or activate "
            "the environment that has it"
        )

    def untested(self, version: str) -> str:
        """A sentence that says that `version` is untested; empty: it is tested."""
        if any(version.startswith(each) if each.endswith(".") else version == each for each in self.tested):
            return ""
        tested = ", ".join(f"{each}x" if each.endswith(".") else each for each in self.tested)
        return f"{self.engine} {version} is not among the tested versions ({tested})"

    def installed(self) -> AdapterAvailability:
        """What is installed in this Python environment. Other environments are not searched."""
        if importlib.util.find_spec(self.module) is None:
            return AdapterAvailability(False, "", self.missing(sys.executable))
        for distribution in self.distributions:
            with suppress(importlib.metadata.PackageNotFoundError):
                version = importlib.metadata.version(distribution)
                refusal, untested = self.refusal(version), self.untested(version)
                said = f"{untested}: it is checked before its first update" if untested else "installed"
                return AdapterAvailability(not refusal, version, refusal or said)
        reason = f"{self.module} can be imported, but has no metadata with its version: install it with pip"
        return AdapterAvailability(False, "", reason)

    def refused_command(self, command: Sequence[str]) -> str:
        """Why the engine that `command` would start cannot be used; empty: nothing speaks against it.

        Asks the command's Python for the engine's metadata, in the calling thread; takes a tenth of a second. Refuses
        nothing if that Python cannot be found, or has the engine without metadata.
        """
        python = python_of(command)
        if not python:
            return ""
        script = (
            "import importlib.metadata as m, importlib.util as u\n"
            f"for name in {self.distributions!r}:\n"
            "    try: print('version', m.version(name)); break\n"
            "    except m.PackageNotFoundError: pass\n"
            f"else: print('unknown' if u.find_spec({self.module!r}) else 'missing')\n"
        )
        try:
            asked = subprocess.run(
                [python, "-c", script], capture_output=True, text=True, timeout=_ASK_SECONDS, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            return ""
        match asked.stdout.split() if asked.returncode == 0 else []:
            case ["version", version]:
                return self.refusal(version)
            case ["missing"]:
                return self.missing(python)
        return ""


def _numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version, to compare it by: (0, 26, 1) for "0.26.1rc2"."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in found[0].split(".")) if found else ()
