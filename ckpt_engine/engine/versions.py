"""The versions of an engine that an adapter drives, and the installed one: beside us, or where a command would run it.

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
from ckpt_engine.engine.programs import missing_program, python_of

_ASK_SECONDS = 20.0


@dataclass(frozen=True)
class Supported:
    """The versions of an engine that an adapter drives.

    A tested version is driven without a check. A newer one, or one in between, is checked before its first update
    (machines/agent/check.py). One below the first tested version cannot work.
    """

    engine: str  # its name in messages
    tested: tuple[str, ...]  # ascending; whole versions ("0.5.16"), or prefixes that end with a dot ("0.26.")
    module: str  # the name under which Python imports the engine
    distributions: tuple[str, ...]  # the packages on an index that can contain that module

    def refusal(self, version: str) -> str:
        """Why `version` cannot be driven at all; empty: it can, or a check decides."""
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
        """The supported versions, and how to get one."""
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
        """Whether the engine is installed beside us. An engine in another environment is found only by its Python."""
        if importlib.util.find_spec(self.module) is None:
            return AdapterAvailability(False, "", self.missing(sys.executable))
        for distribution in self.distributions:
            with suppress(importlib.metadata.PackageNotFoundError):
                version = importlib.metadata.version(distribution)
                refusal, untested = self.refusal(version), self.untested(version)
                note = f"{untested}: it is checked before its first update" if untested else "installed"
                return AdapterAvailability(not refusal, version, refusal or note)
        reason = f"{self.module} can be imported, but has no metadata that tells its version"
        return AdapterAvailability(False, "", reason)

    def lacks_program(self, command: Sequence[str]) -> str:
        """The message for a command whose program is not here; empty: it is, or may be."""
        program = missing_program(command)
        return f"there is no program {program!r} here; {self.engine} has it: {self._supported}" if program else ""

    def refused_command(self, command: Sequence[str]) -> str:
        """Why the engine that `command` starts cannot be driven: there is no such program, or the metadata of the
        command's Python. Empty: it may be.

        Takes a tenth of a second, on the calling thread. Nothing is refused if the command's Python is unknown, or
        imports the engine from a place without metadata.
        """
        if refusal := self.lacks_program(command):
            return refusal
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
            answer = subprocess.run(
                [python, "-c", script], capture_output=True, text=True, timeout=_ASK_SECONDS, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            return ""
        match answer.stdout.split() if answer.returncode == 0 else []:
            case ["version", version]:
                return self.refusal(version)
            case ["missing"]:
                return self.missing(python)
        return ""


def _numbers(version: str) -> tuple[int, ...]:
    """(0, 26) of "0.26.1rc2" compares as a person would, for as many parts as are numbers."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()
