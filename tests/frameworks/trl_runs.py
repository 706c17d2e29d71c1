"""Runs programs with TRL's Python, and what both they and their tests know."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.cluster import Cluster

MARK = "ckpt-engine: "
CLOSE = 1e-4
"""Nats: float32 logits that another program computes."""

KILLED_AT, SAVED_EVERY, LIFE_STEPS = 7, 5, 8
"""Steps of the run that is killed and goes on."""


def say(
    cluster: Cluster,
    path: Path,
    *arguments: str,
    then: Sequence[str] = (),
    status: int = 0,
    environment: dict[str, str] | None = None,
) -> list[dict[str, Any]]:
    """What a program says that TRL's Python runs: after `arguments`, manager, model, `path` and what comes `then`.

    status: that it ends with. environment: added to what it needs.
    """
    command = [
        os.environ["CKPT_ENGINE_TRL_PYTHON"],
        *arguments,
        cluster.address,
        str(cluster.path / "model"),
        str(path),
    ]
    given = {
        **os.environ,
        "PYTHONPATH": f"{os.environ['CKPT_ENGINE_OVERLAY']}:{Path(__file__).parents[2]}",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TRL_EXPERIMENTAL_SILENCE": "1",
        **(environment or {}),
    }
    ended = subprocess.run([*command, *then], env=given, capture_output=True, text=True, timeout=600, cwd=path)
    assert ended.returncode == status, f"{ended.returncode}\n{ended.stdout[-3000:]}\n{ended.stderr[-6000:]}"
    return [json.loads(line.partition(MARK)[2]) for line in ended.stdout.splitlines() if MARK in line]
