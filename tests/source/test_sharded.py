"""Sharded trainers: real gloo ranks publish their shards, and together these are the model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch import nn

from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.source.open import open_source


@pytest.mark.slow
def test_all_ranks_together_hold_the_model(tmp_path: Path) -> None:
    world = 4
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ranks = []
    for rank in range(world):
        with (tmp_path / f"log.{rank}").open("wb") as log:
            ranks.append(
                subprocess.Popen(
                    [sys.executable, "-m", "tests.source.sharded_rank", str(rank), str(world), str(tmp_path)],
                    cwd=Path(__file__).parents[2],
                    env=environment,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            )
    try:
        codes = [process.wait(timeout=120) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    logs = "\n".join((tmp_path / f"log.{rank}").read_text()[-3000:] for rank in range(world))
    assert codes == [0] * world, logs


def test_flattened_parameters_are_refused() -> None:
    model = nn.Module()
    model.register_parameter("_flat_param", nn.Parameter(nn.Linear(2, 2).weight.detach().clone()))
    with pytest.raises(CkptEngineError, match="FSDP1"):
        open_source(model)
