"""The actor that asks a replica for verl, alone, in a process that has verl's package."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path


def test_a_replica_that_is_said_to_serve_and_does_not_is_given_up(tmp_path: Path) -> None:
    """Also while other requests find its URL again and again."""
    path = f"{os.environ['CKPT_ENGINE_OVERLAY']}:{Path(__file__).parents[1]}"
    command = [os.environ["CKPT_ENGINE_VERL_PYTHON"], "-m", "frameworks.asking_run"]
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr[-4000:]
    busy, broken, deep = [line for line in ran.stdout.splitlines() if "Error" in line]
    for said, why in ((busy, "answers 503: busy"), (broken, "broke off")):
        assert "replica one did not serve within 0.5 s: http://127.0.0.1:" in said
        assert why in said
    assert "the replica's event is not JSON (it is nested too deeply)" in deep
