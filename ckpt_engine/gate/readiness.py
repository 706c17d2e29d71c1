"""Reads what a probe asks at `/ckpt_engine/ready`, and compares the version that it asks for with the engine's. Pure.

It does not decide whether requests are let in, held or refused (holding.py), and does not speak HTTP (gate.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import parse_qsl

from ckpt_engine.v1 import weights_pb2

OLDER_VERSION = "older_version"
OTHER_LINEAGE = "other_lineage"
NO_VERSION = "no_version"
"""Why a probe that asks for a version gets a 503 from an engine that serves: `reason` in the body."""

_SWITCH = {"1": True, "true": True, "0": False, "false": False}
_KNOWN = ("strict", "at_least", "lineage")
_MOST_VERSION = 2**63 - 1


@dataclass(frozen=True, slots=True)
class ReadyQuestion:
    """What must hold for the answer 200."""

    strict: bool = False  # requests are let in now; otherwise it is enough that they are held during an update
    at_least: int | None = None  # the lowest version that is enough; None: any
    lineage: str = ""  # of the version; empty: any

    @classmethod
    def from_query(cls, query: str) -> ReadyQuestion:
        """Reads the query of a URL. Raises ValueError saying what is wrong: a probe with a misspelt parameter would
        otherwise count an engine as ready that is not."""
        found: dict[str, str] = {}
        for name, value in parse_qsl(query, keep_blank_values=True):
            if name not in _KNOWN:
                raise ValueError(f"there is no parameter {name!r}; known are {', '.join(_KNOWN)}")
            if name in found:
                raise ValueError(f"{name} is given twice")
            found[name] = value
        strict, at_least = found.get("strict", "0"), found.get("at_least")
        if strict not in _SWITCH:
            raise ValueError(f"strict must be 1 or 0, not {strict!r}")
        if at_least is not None and not (at_least.isascii() and at_least.isdigit() and int(at_least) <= _MOST_VERSION):
            raise ValueError(f"at_least must be the number of a version, such as 12, not {at_least!r}")
        if found.get("lineage") == "":
            raise ValueError("lineage has no value: name a lineage, or leave the parameter out")
        return cls(_SWITCH[strict], None if at_least is None else int(at_least), found.get("lineage", ""))

    def unmet(self, identity: weights_pb2.Identity | None) -> tuple[str, str]:
        """Why an engine that has this version is not what the probe asks for: the reason for programs, and words for
        people. Both are empty if it is. None: the engine has no version."""
        goal = "" if self.at_least is None else f"version {self.at_least} or a later one"
        if self.lineage:
            goal = f"{goal or 'a version'} of lineage {self.lineage!r}"
        if not goal:
            return "", ""
        if identity is None:
            return NO_VERSION, f"{goal} is asked for, and it serves no version"
        held = f"version {identity.version} of lineage {identity.lineage!r}"
        if self.lineage and identity.lineage != self.lineage:
            return OTHER_LINEAGE, f"{goal} is asked for, and it has {held}"
        if self.at_least is not None and identity.version < self.at_least:
            return OLDER_VERSION, f"{goal} is asked for, and it has {held}"
        return "", ""
