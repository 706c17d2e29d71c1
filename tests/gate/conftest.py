"""The directory of the engine that a test's process is."""

from pathlib import Path

import pytest

from ckpt_engine.gate.directory import ENVIRONMENT, EngineDirectory


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EngineDirectory:
    """Its page has no worker yet."""
    made = EngineDirectory.create(tmp_path)
    monkeypatch.setenv(ENVIRONMENT, str(made.path))
    return made
