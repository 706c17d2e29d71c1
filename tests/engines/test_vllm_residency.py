"""vLLM's own layers without post-processing, as on CUDA: weights go straight into the live tensors, none is staged."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.engines.vllm_server import OVERLAY, PYTHON, needs_vllm
from tests.tiny_model import make_tiny_qwen3

pytestmark = [*needs_vllm, pytest.mark.timeout(300)]

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.parametrize("kind", ["untied", "tied"])
def test_what_nothing_repacks_is_resident(tmp_path: Path, kind: str) -> None:
    make_tiny_qwen3(tmp_path, 4, tied=kind == "tied")
    environment = {**os.environ, "PYTHONPATH": f"{OVERLAY}:{REPOSITORY}", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [PYTHON, "-m", "tests.engines.resident_install", str(tmp_path), kind],
        capture_output=True,
        text=True,
        timeout=240,
        env={**environment, "VLLM_CPU_KVCACHE_SPACE": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["problem"] == ""
    assert (found["staged"], found["verified_as_loaded"], found["moved"], found["differ"]) == ([], 0, [], [])
    assert found["verified"] > found["tensors"]
    assert found["deriving"] == 0, "ordinary attention makes nothing of weights"
