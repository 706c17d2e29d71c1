"""verl on Ray with replicas of a RayCluster in the same job: the example with its worker group, as a user runs it."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.frameworks.ray_environment import ray_environment
from tests.tiny_model import make_tiny_qwen3

EXAMPLE = Path(__file__).parents[2] / "examples" / "ray" / "verl_workers.py"
STEPS = 4


@pytest.mark.slow
def test_what_a_worker_group_trains_is_served(tmp_path: Path) -> None:
    """Two ranks of FSDP2. After each step a replica's next token is that of the trainer's own forward."""
    make_tiny_qwen3(tmp_path / "model")
    command = [os.environ["CKPT_ENGINE_VERL_PYTHON"], EXAMPLE, "--insecure", "--model", tmp_path / "model"]
    with ray_environment() as environment, (tmp_path / "log").open("w+") as log:
        status = subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=tmp_path).wait(900)
        log.seek(0)
        printed = log.read()
    assert status == 0, printed[-8000:]
    steps = re.findall(r"step (\d): (\d+) by the trainer, \[(\d+)\] served", printed)
    assert [int(number) for number, _, _ in steps] == list(range(STEPS)), printed[-8000:]
    assert [own for _, own, _ in steps] == [served for _, _, served in steps]
    assert printed.count("2 of 2 replicas") >= STEPS, printed[-8000:]
    assert len(EXAMPLE.read_text().splitlines()) <= 64
