"""Distributions that tests install: a folder with a real `.dist-info`, on the path of processes that are to find it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

SMALL = {"ckpt_engine.engines": {"small": "tests.agent.small_engine:ENGINE"}}
"""The entry points of the small engine."""


def distribution(path: Path, name: str, points: Mapping[str, Mapping[str, str]]) -> Path:
    """Installs metadata below `path`, which is made and returned: what a wheel would leave there, without modules.

    points: group of entry points to their names and what each one names.
    """
    about = path / f"{name.replace('-', '_')}-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = [line for group, of in points.items() for line in (f"[{group}]", *(f"{each} = {of[each]}" for each in of))]
    (about / "entry_points.txt").write_text("\n".join(lines))
    return path
