"""What linters and the type checker say, beside the other tests instead of before them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TOOLS = [("ruff", "check", "."), ("ruff", "format", "--check", "."), ("mypy",)]


@pytest.mark.parametrize("tool", TOOLS, ids=" ".join)
def test_nothing_is_found_by(tool: tuple[str, ...]) -> None:
    found = subprocess.run([sys.executable, "-m", *tool], cwd=ROOT, capture_output=True, text=True, timeout=550)
    assert found.returncode == 0, found.stdout + found.stderr
