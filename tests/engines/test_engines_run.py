"""`engines/run` in a small checkout: several at once, and sources that change. It needs no engine for that."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster import eventually

SCRIPT = Path(__file__).parents[2] / "engines" / "run"
PROJECT = """
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"
[project]
name = "ckpt-engine"
version = "1"
[tool.setuptools]
packages = ["ckpt_engine"]
"""
SAY = 'cat "$CKPT_ENGINE_OVERLAY/ckpt_engine/said.py"'
WAIT = f"touch begun; while [ ! -e go ]; do sleep 0.1; done; {SAY}"


def checkout(path: Path) -> None:
    for folder in ("engines", "ckpt_engine", "adapters"):
        (path / folder).mkdir()
    shutil.copy(SCRIPT, path / "engines")
    (path / ".venv").symlink_to(sys.prefix)
    (path / "pyproject.toml").write_text(PROJECT)
    (path / "ckpt_engine" / "__init__.py").touch()
    for name in ("README.md", "LICENSE"):
        (path / name).touch()


def begin(path: Path, command: str) -> subprocess.Popen[str]:
    words = [str(path / "engines" / "run"), "--", "sh", "-c", command]
    return subprocess.Popen(words, cwd=path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def said(run: subprocess.Popen[str]) -> str:
    output, errors = run.communicate(timeout=300)
    assert run.returncode == 0, errors
    assert errors == ""
    return output


@pytest.mark.slow
def test_runs_at_a_time_keep_what_each_began_with(tmp_path: Path) -> None:
    checkout(tmp_path)
    source = tmp_path / "ckpt_engine" / "said.py"
    source.write_text("'first'")
    early = begin(tmp_path, WAIT)
    try:
        eventually("it has begun", 300, lambda: (tmp_path / "begun").exists() or early.poll() is not None)
        source.write_text("'second'")
        both = [begin(tmp_path, SAY) for _ in range(2)]
        assert [said(each) for each in both] == ["'second'"] * 2
    finally:
        (tmp_path / "go").touch()
    assert said(early) == "'first'", "its overlay is still there, and as it was"
    assert len(list((tmp_path / "build").iterdir())) == 2, "one for each state of the sources, and no rest of making it"
