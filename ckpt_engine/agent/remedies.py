"""Recognises known causes in an engine's last lines, and says what to do about them. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import PurePath

_MISSING = re.compile(r"No module named '?([A-Za-z_][\w.]*)'?")
_OURS = ("ckpt_engine", "ckpt_engine_adapters")


def remedy(argv: Sequence[str], lines: Sequence[str]) -> str:
    """What to do about an engine that ended with these lines; empty: unknown, or the lines say enough."""
    missing = next((match[1] for line in reversed(lines) if (match := _MISSING.search(line))), "")
    if not missing:
        return ""
    python = next((word for word in argv if "python" in PurePath(word).name), argv[0])
    package = missing.partition(".")[0]
    if package in _OURS:
        return (
            f"{python} has no ckpt-engine, whose plugin the engine loads: install it into the engine's environment as "
            "well, or name the Python of one that has both behind --"
        )
    return (
        f"{python} has no {package}: activate the engine's environment, or name its Python behind -- "
        "(-- /path/to/environment/bin/python -m ...)"
    )
