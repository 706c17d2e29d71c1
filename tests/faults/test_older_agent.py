"""An agent of an older release, with its engine and workers, beside a manager and a trainer of this one.

Nothing was released yet, so the older one is what this repository was at a commit of 2026-11-27: before versions had
parts, deployments, scrubs and changed bytes between relays, which the wire has had fields for since. It is run from the
files of that commit.
"""

from __future__ import annotations

import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest

from tests.faults.members import Member
from tests.faults.prober import Expected
from tests.faults.proxy import Proxy
from tests.faults.world import World
from tests.line_process import ROOT

OLDER = "7227397ae1d9"


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with that commit's files."""
    folder = tmp_path_factory.mktemp("older")
    archive = folder / "older.tar"
    done = subprocess.run(["git", "archive", "-o", archive, OLDER], cwd=ROOT, capture_output=True, timeout=60)
    if done.returncode:
        pytest.skip(f"this copy of the repository lacks the commit {OLDER}: {done.stderr.decode().strip()}")
    with tarfile.open(archive) as files:
        files.extractall(folder, filter="data")
    return folder


class OlderWorld(World):
    """A world whose agents are older."""

    def __init__(self, older: Path, *arguments: Any) -> None:
        self._older = older
        super().__init__(*arguments)

    def _agent(self, name: str, port: int, workers: int, proxy: Proxy, attached: bool) -> Member:
        command = ["-m", "ckpt_engine", "agent", "--manager", proxy.address, "--engine", "reference"]
        command += ["--model", str(self._model), "--name", name, "--port", str(port), "--engine-output"]
        told = {**self._environment, "PYTHONPATH": f"{self._older}:{self._older / 'adapters'}"}
        command += ["--", "--tensor-parallel", str(workers)]
        return Member(command, self.path / f"{name}.log", told, cwd=self._older)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_an_older_agent_is_updated_by_a_newer_manager(
    tmp_path: Path, models: tuple[Path, Path, Expected], older: Path
) -> None:
    with OlderWorld(older, tmp_path, *models, {"one": 1}) as world:
        assert not world.update_all()
        (worker,) = world.engine("one")[1:]
        assert Path(worker.cwd()) == older
        assert not world.update_all()
        world.restart_manager()
        assert not world.update_all(), "also if it says hello with what it holds"
        assert world.take_violations() == []
