"""What adapters declare is what the documentation shows."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ckpt_engine.engine.declarations import COMMAND, declared
from ckpt_engine.engine.kinds import engine_names

PAGE = Path(__file__).parents[2] / "docs" / "engines" / "README.md"


def test_the_page_of_engines_is_what_their_adapters_declare() -> None:
    command = [sys.executable, "-m", "ckpt_engine", *COMMAND.split()[1:]]
    written = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert PAGE.read_text() == written, f"{PAGE} is out of date: {COMMAND} > {PAGE}"


@pytest.mark.parametrize("kind", engine_names())
def test_a_declaration_is_whole(kind: str) -> None:
    """Whoever reads it can choose: a default that works, versions that were run, sentences that end."""
    of = declared()[kind]
    assert of.default_pause_mode in of.pause_modes
    assert of.versions
    assert of.layouts
    assert all(sentence.endswith(".") for sentence in (*of.notes, *of.cannot))
