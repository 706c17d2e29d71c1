"""Every test has a directory of relays of its own, told to the processes that it starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckpt_engine.host.relay_directory import DIRECTORY
from tests.agent.plain_manager import plain_manager

__all__ = ["plain_manager"]


@pytest.fixture(autouse=True)
def relay_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "relays"
    monkeypatch.setenv(DIRECTORY, str(folder))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return folder
