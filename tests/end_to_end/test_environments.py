"""Agents and trainers in environments that lack what shells usually set, or carry what other launchers left there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from tests.cluster import Cluster, running_cluster
from tests.distributions import SMALL, distribution

ROOT = Path(__file__).resolve().parents[2]

AGENT = """
import sys
sys.path[:0] = [".", sys.argv.pop(1)]
from ckpt_engine.cli import main
sys.argv[0] = "ckpt-engine"
main()
"""
TRAINER = """
import sys, torch
from ckpt_engine import Trainer
with Trainer(sys.argv[1]) as trainer:
    trainer.publish({"weight": torch.ones(4)})
    trainer.wait_for_replicas(1, timeout=240)
    report = trainer.update_weights(replicas=[sys.argv[2]])
    assert report.ok, report
"""
USUAL = {
    "PATH": os.environ.get("PATH", "/usr/bin:/bin"),
    "HOME": os.environ.get("HOME", "/root"),
    "USER": "somebody",
    "HOSTNAME": "some-host",
    "TMPDIR": "/tmp",
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "CUDA_VISIBLE_DEVICES": "0",
    "XDG_RUNTIME_DIR": "/tmp",
}
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
"""What a launcher sets together, and is read together: one that is missing is another case than all that are."""
MISSING: dict[str, Mapping[str, str]] = {"all (env -i)": {}} | {
    name: {other: value for other, value in USUAL.items() if other != name} for name in USUAL
}
ODD = dict.fromkeys(("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK"), "nonsense")
ODD |= {"HOME": "/nonexistent", "XDG_RUNTIME_DIR": "/nonexistent", "CUDA_VISIBLE_DEVICES": "", "USER": ""}


@pytest.fixture(scope="module")
def manager(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(tmp_path_factory.mktemp("environments")) as running:
        yield running


def update_in(manager: Cluster, environment: Mapping[str, str], name: str, prefix: Sequence[str] = ()) -> None:
    """An agent and a trainer that have this environment and nothing else, and one update from one to the other."""
    log = manager.path / f"{name}.log"
    installed = distribution(manager.path / f"{name}-installed", "small", SMALL)
    options = [str(installed), "agent", "--manager", manager.address, "--engine", "small", "--name", name]
    with log.open("wb") as output:
        agent = subprocess.Popen(
            [*prefix, sys.executable, "-c", AGENT, *options], env=environment, cwd=ROOT, stdout=output, stderr=output
        )
        try:
            trainer = subprocess.run(
                [*prefix, sys.executable, "-c", TRAINER, manager.address, name],
                env=environment,
                cwd=ROOT,
                capture_output=True,
                text=True,
                timeout=300,
                check=False,
            )
            assert trainer.returncode == 0, f"{trainer.stderr}\n{log.read_text()}"
            assert agent.poll() is None, log.read_text()
        finally:
            agent.terminate()
            agent.wait(60)


@pytest.mark.parametrize(
    "missing",
    [
        "all (env -i)",
        *(
            pytest.param(name, marks=[pytest.mark.slow, *([] if name in LAUNCHERS else [pytest.mark.hours])])
            for name in USUAL
        ),
    ],
)
def test_a_variable_that_is_missing_stops_nobody(manager: Cluster, missing: str) -> None:
    update_in(manager, MISSING[missing], f"without-{missing.split()[0]}")


@pytest.mark.slow
def test_variables_of_other_launchers_stop_nobody(manager: Cluster) -> None:
    update_in(manager, ODD, "odd")


@pytest.mark.slow
def test_a_user_whom_the_system_does_not_know_can_do_without_a_home(manager: Cluster, tmp_path: Path) -> None:
    """As containers run under an arbitrary user id: no name, no home, no variables."""
    unshare = shutil.which("unshare") or "unshare"
    nobody = [unshare, "--user", "--map-user=54321"]
    try:
        subprocess.run([*nobody, "true"], check=True, capture_output=True, timeout=60)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no user namespaces here")
    update_in(manager, {"XDG_RUNTIME_DIR": str(tmp_path)}, "nobody", nobody)
    serve = [*nobody, sys.executable, "-m", "ckpt_engine", "manager", "--listen", "127.0.0.1:0", "--http", ""]
    refused = subprocess.run(serve, env={}, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert refused.returncode == 1
    assert "user 54321 has no home directory to keep the ledger in: give --ledger FILE" in refused.stderr
    assert "Traceback" not in refused.stderr
