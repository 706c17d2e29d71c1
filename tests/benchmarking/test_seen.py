"""What ran on a GPU becomes a page: what was skipped is not on it, and what failed says so."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.gpu.seen import COMMAND, page, runs

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "engines" / "seen.md"

TESTS = """
import pytest

def test_a_model_class(record_property, name):
    record_property("architecture", "Qwen3ForCausalLM")
    record_property("arguments", "--enable-lora" if name == "LoRA" else "")
    if name == "broken":
        assert "this" == "that | other"
    if name == "absent":
        pytest.skip("no such GPU")
    record_property("verified", 10)
    record_property("verified as loaded", 2)
    record_property("by vLLM's loader", [])
    record_property("published in float32", ["a.A_log"] if name == "hybrid" else [])
    record_property("equal tokens", 96)
    record_property("largest difference of a log-probability", 0.0)

def pytest_generate_tests(metafunc):
    if "name" in metafunc.fixturenames:
        metafunc.parametrize("name", ["hybrid", "LoRA", "broken", "absent"])

def test_vllm_sleeps():
    pass
"""


def test_the_page_tells_what_ran_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "test_vllm_some.py").write_text(TESTS)
    (tmp_path / "conftest.py").write_text("from tests.gpu.conftest import pytest_addoption, pytest_configure\n")
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), "--seen", "seen.json"]
    done = subprocess.run(
        [sys.executable, *command, "test_vllm_some.py"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    run = json.loads((tmp_path / "seen.json").read_text())
    assert run["about"]["torch"]
    run["about"] |= {"device": "NVIDIA H200", "vllm": "0.33.0", "date": "2026-11-23"}
    written = page([run])
    assert "## vLLM 0.33.0, 2026-11-23\n\nNVIDIA H200, torch" in written
    assert "| hybrid (1 tensors published in float32) | `Qwen3ForCausalLM` | - | 96 | 0 | 10; 2 |" in written
    assert "| LoRA | `Qwen3ForCausalLM` | `--enable-lora` | 96 | 0 | 10; 2 |" in written
    assert "| broken | `Qwen3ForCausalLM` | - | **failed**: AssertionError: assert 'this' == 'that / other'" in written
    assert "that | other" not in written, "a cell of a table"
    assert "absent" not in written
    assert "| `test_vllm_some.py` vllm sleeps | passed | 0 |" in written


def test_the_page_is_what_was_kept() -> None:
    assert PAGE.read_text() == page([*runs()]), f"{PAGE} is out of date: {COMMAND} > {PAGE}"
