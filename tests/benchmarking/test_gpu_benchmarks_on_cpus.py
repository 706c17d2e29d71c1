"""The CPU branches of benchmarks that are for GPUs: real engines with a small model, real updates, whole results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.directory import CPU, measure
from benchmarks.gpu.under_load import Load, Server, World, world_of
from benchmarks.gpu.under_load import measure as measure_load
from ckpt_engine.host.relay_directory import DIRECTORY
from tests.engines.vllm_server import needs_vllm
from tests.timeline.trace_format import read

SMALL = Load(streams=4, tokens=100, updates=2, warmup=1, every=1.0, quiet=2.0, idle=2)


@pytest.mark.parametrize(
    "engine",
    [
        pytest.param("reference", marks=pytest.mark.slow),
        pytest.param("vllm", marks=[*needs_vllm, pytest.mark.slow]),
    ],
)
def test_updates_under_load(tmp_path: Path, engine: str) -> None:
    written: list[dict[str, Any]] = []
    with world_of(engine, True, False, tmp_path) as world:
        found = measure_load(world, SMALL, tmp_path, lambda result: written.append(json.loads(json.dumps(result))))
    assert written[-1] == json.loads(json.dumps(found))
    mine = found["ours"]
    assert len(mine["lost_tokens"]["each"]) == len(mine["worst_gap_milliseconds"]["each"]) == SMALL.updates
    assert mine["rate"]["both"] > 0
    assert mine["requests"]["asked"] >= SMALL.streams
    assert mine["requests"]["failed"] == 0, mine["requests"]
    pause = mine["loaded"]["pause_seconds"]["median"]
    assert max(mine["worst_gap_milliseconds"]["each"]) > 0
    assert pause > 0
    assert mine["loaded"]["rest_of_pause_seconds"]["median"] <= pause
    assert {"stage_quiesce", "stage_resume"} <= mine["loaded"].keys()
    assert any(key.startswith("step, manager:") for key in mine["idle"])


def test_a_server_that_fails_is_told_and_the_next_one_is_tried(tmp_path: Path) -> None:
    """Servers of which every update fails."""
    asked: list[str] = []

    def failing(name: str) -> Server:
        def update() -> dict[str, float]:
            asked.append(name)
            raise ConnectionError(f"{name} does not answer")

        return Server(name, "http://127.0.0.1:9", update, lambda: f"the log of {name}")

    written: list[dict[str, Any]] = []
    world = World([failing("ours"), failing("rival")], lambda seed: None, "tiny", {})
    with pytest.raises(AssertionError, match=r"ours does not answer[\s\S]*the log of rival"):
        measure_load(world, SMALL, tmp_path, lambda result: written.append(dict(result)))
    assert asked == ["ours", "rival"]
    assert len(written[-1]["failed"]) == 2


@pytest.mark.slow
def test_a_checkpoint_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DIRECTORY, str(tmp_path / "relays"))
    found = json.loads(json.dumps(measure(tmp_path, tmp_path, CPU, rounds=2, warmup=1)))
    assert found["bytes"] > 200_000_000
    for way in ("files", "relay"):
        assert found[way]["share_of_ceiling"] > 0
        assert found[way]["medians"]["GB_s_each"]["rounds"] == 2
    assert "fill_seconds" in found["relay"]["medians"]
    assert not list(tmp_path.glob("checkpoint*")), "17 GB on a GPU host"


@pytest.mark.slow
def test_a_traced_update(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu.traced", "-o", str(tmp_path), "--cpu", "--updates", "2"]
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        command, cwd=root, env=os.environ.copy(), capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "prediction.json").read_text())
    rows = {row["stage"]: row for row in found["by_rates_of_this_machine"]}
    for stage in ("seal", "transfer", "verify"):
        row = rows[stage]
        assert row["took_over_predicted"] == pytest.approx(row["took"] / row["predicted"], rel=1e-3)
        assert row["within_30_percent"] == (abs(row["took_over_predicted"] - 1) <= 0.3)
    assert rows["quiesce"]["predicted"] is None
    trace = read((tmp_path / "trace.json").read_text())
    assert trace.named("transfer", "replica r")
    assert trace.named("transfer", "prediction")
