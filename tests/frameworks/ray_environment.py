"""The environment of a run that starts a Ray of its own, in that of a framework; what has it ends with it."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from tests.frameworks.trl_runs import MARK


@contextmanager
def ray_environment() -> Iterator[dict[str, str]]:
    """The variables of a run. At the end the run, and what Ray has started for it, are killed: they have its folder of
    sockets in their environment."""
    # A path of its own, and a short one: Ray makes sockets in it.
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as sockets:
        try:
            yield {
                **os.environ,
                # Not the folder above: verl's package brings a `tests` of its own.
                "PYTHONPATH": f"{os.environ['CKPT_ENGINE_OVERLAY']}:{Path(__file__).parents[1]}",
                "RAY_TMPDIR": sockets,
                "RAY_AUTH_TOKEN": secrets.token_hex(32),
                "RAY_USAGE_STATS_ENABLED": "0",
                "RAY_worker_niceness": "0",  # 15 by default: next to other tests its actors would hardly run
                "OMP_NUM_THREADS": "1",
                "HF_HUB_OFFLINE": "1",
            }
        finally:
            for each in psutil.process_iter():
                with contextlib.suppress(psutil.Error):
                    if each.environ().get("RAY_TMPDIR") == sockets:
                        each.kill()


def messages(printed: str) -> list[dict[str, Any]]:
    """What a run has printed for its test."""
    return [json.loads(line.partition(MARK)[2]) for line in printed.splitlines() if line.startswith(MARK)]
