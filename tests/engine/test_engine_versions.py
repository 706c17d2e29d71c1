"""Versions of engines that adapters drive, and what they say of others."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ckpt_engine.engine.versions import Supported

MODULE = "small_engine_of_tests"
ENGINE = Supported("Small", ("0.26.", "1.5"), MODULE, ("small-gpu", "small-cpu"))


@pytest.mark.parametrize("version", ["0.26.0", "0.26.1rc2", "1.5"])
def test_tested_versions_are_driven_as_they_are(version: str) -> None:
    assert (ENGINE.refusal(version), ENGINE.untested(version)) == ("", "")


@pytest.mark.parametrize("version", ["0.260.1", "1.5.1", "10.26.0", "0.27.0.dev3+cpu"])
def test_others_are_driven_once_they_are_checked(version: str) -> None:
    assert ENGINE.refusal(version) == ""
    assert ENGINE.untested(version) == f"Small {version} is not among the tested versions (0.26.x, 1.5)"


@pytest.mark.parametrize("version", ["0.2", "0.25.9", "", "main"])
def test_what_cannot_work_is_refused(version: str) -> None:
    assert "must be 0.26 or newer" in ENGINE.refusal(version)


def _install(folder: Path, version: str) -> None:
    (folder / f"{MODULE}.py").touch()
    metadata = folder / f"small_cpu-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: small-cpu\nVersion: {version}\n")


def test_what_is_installed_is_told_with_its_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = ENGINE.installed()
    assert (found.ok, found.version) == (False, "")
    assert found.reason == ENGINE.missing(sys.executable)
    for words in ("Small is not installed", "0.26 or newer", f"pip install 'ckpt-engine[{MODULE}]'"):
        assert words in found.reason
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / f"{MODULE}.py").touch()
    found = ENGINE.installed()
    assert not found.ok
    assert "no metadata" in found.reason
    _install(tmp_path, "1.5")
    found = ENGINE.installed()
    assert (found.ok, found.version, found.reason) == (True, "1.5", "installed")


def test_an_untested_version_that_is_installed_says_that_it_will_be_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    _install(tmp_path, "1.6")
    found = ENGINE.installed()
    assert (found.ok, found.version) == (True, "1.6")
    assert "not among the tested versions" in found.reason
    assert "checked before its first update" in found.reason


def test_a_command_is_refused_by_what_is_installed_where_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    command = [sys.executable, "-m", MODULE]
    assert ENGINE.refused_command(command) == ENGINE.installed().reason, "in the doctor's words"
    (tmp_path / f"{MODULE}.py").touch()
    assert ENGINE.refused_command(command) == "", "it is there, in a version that nothing tells"
    _install(tmp_path, "0.25.1")
    refused = ENGINE.refused_command(command)
    for words in ("Small 0.25.1 is not supported", "0.26 or newer", f"pip install 'ckpt-engine[{MODULE}]'"):
        assert words in refused
    monkeypatch.syspath_prepend(tmp_path)
    assert ENGINE.installed().reason == refused, "in the doctor's words"


@pytest.mark.parametrize(
    "beginning",
    ["#!{python}\n", "#!/bin/sh\n'''exec' \"{python}\" \"$0\" \"$@\"\n' '''\n"],
    ids=["path", "long path"],
)
def test_a_script_that_pip_installed_is_refused_by_the_python_that_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, beginning: str
) -> None:
    script = tmp_path / "bin" / "small"
    script.parent.mkdir()
    script.write_text(beginning.format(python=sys.executable) + "import small\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{script.parent}:/usr/bin:/bin")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert "Small is not installed" in ENGINE.refused_command(["small", "serve"])
    _install(tmp_path, "0.25.1")
    assert "Small 0.25.1 is not supported" in ENGINE.refused_command(["small", "serve"])
    assert "Small 0.25.1 is not supported" in ENGINE.refused_command([str(script), "serve"])


def test_a_command_whose_python_cannot_be_told_is_not_refused(tmp_path: Path) -> None:
    (tmp_path / "words").write_text("no script")
    (tmp_path / "words").chmod(0o755)
    for command in ([str(tmp_path / "words")], ["env", "PATH=/elsewhere", "small", "serve"], ["env"], ["--port"], []):
        assert ENGINE.refused_command(command) == ""


@pytest.mark.parametrize("program", ["small", "/no/such/python"])
def test_a_program_that_is_not_there_is_refused_with_what_to_install(program: str) -> None:
    for command in ([program, "serve"], ["env", "A=1", program]):
        refused = ENGINE.refused_command(command)
        assert f"there is no program {program!r} here" in refused
        assert f"pip install 'ckpt-engine[{MODULE}]', or activate the environment that has it" in refused
