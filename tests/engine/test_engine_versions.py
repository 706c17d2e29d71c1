"""Versions of engines that adapters drive, and what they say of others."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckpt_engine.engine.versions import FORCE, Supported

ENGINE = Supported("Small", ("0.26.", "1.5"))


@pytest.mark.parametrize("version", ["0.26.0", "0.26.1rc2", "1.5"])
def test_tested_versions_are_driven(version: str) -> None:
    assert ENGINE.allows(version) == (True, "")


@pytest.mark.parametrize("version", ["0.2", "0.260.1", "1.5.1", "10.26.0", ""])
def test_others_are_refused_unless_forced(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    supported, reason = ENGINE.allows(version)
    assert not supported
    assert reason == f"Small {version} is not supported: tested are 0.26.x, 1.5; set {FORCE}=1 to try"
    monkeypatch.setenv(FORCE, "1")
    assert ENGINE.allows(version) == (True, f"Small {version} is driven because {FORCE}=1; tested are 0.26.x, 1.5")


def test_what_is_installed_is_told_with_its_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = ENGINE.installed("small_engine_of_tests", ("small-gpu", "small-cpu"))
    assert (found.ok, found.version) == (False, "")
    assert found.reason.endswith("(extra: ckpt-engine[small_engine_of_tests])")
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "small_engine_of_tests.py").touch()
    found = ENGINE.installed("small_engine_of_tests", ("small-gpu", "small-cpu"))
    assert (found.ok, found.reason) == (
        False,
        "small_engine_of_tests can be imported, but has no metadata that tells its version",
    )
    metadata = tmp_path / "small_cpu-1.5.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: small-cpu\nVersion: 1.5\n")
    found = ENGINE.installed("small_engine_of_tests", ("small-gpu", "small-cpu"))
    assert (found.ok, found.version, found.reason) == (True, "1.5", "installed")
