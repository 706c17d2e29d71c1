"""The demo as people run it, and that nothing of it is left, however it ends."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.demo.demo_run import Run
from tests.postgresql import program

needs_postgresql = pytest.mark.skipif(
    program("initdb") is None, reason="PostgreSQL's server is not installed here (Debian: postgresql)"
)


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_interrupted_it_leaves_nothing(runs: list[Run], number: signal.Signals) -> None:
    runs.append(run := Run())
    run.wait_for("ckpt_engine.demo.train", 150)
    run.wait_for("ckpt_engine_adapters.reference.server", 150)
    os.kill(run.process.pid, number)
    out, err = run.finish(120)
    assert run.process.returncode == 130, err
    assert "interrupted" in err
    assert not out
    assert run.left() == ({}, [])


@pytest.mark.slow
def test_killed_it_leaves_no_process(runs: list[Run]) -> None:
    runs.append(run := Run())
    run.wait_for("ckpt_engine.demo.train", 150)
    run.wait_for("ckpt_engine_adapters.reference.server", 150)
    run.process.kill()
    run.finish(60)
    assert run.left()[0] == {}


@pytest.mark.slow
@pytest.mark.parametrize("word", ["ckpt_engine.demo.train", "ckpt_engine_adapters.reference.server"])
def test_it_fails_when_a_part_of_it_dies(runs: list[Run], word: str) -> None:
    runs.append(run := Run())
    os.kill(run.wait_for(word, 150), signal.SIGKILL)
    out, err = run.finish(120)
    assert run.process.returncode == 1, err
    result = json.loads(out)
    assert result["ok"] is False
    assert "SIGKILL" in result["problem"] or "exited" in result["problem"]
    kept = Path(result["problem"].rpartition("The logs are in ")[2])
    assert "manager.log" in [log.name for log in kept.iterdir()]
    assert run.left() == ({}, [str(kept)]), "nothing but the logs, which it names"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "updates"),
    [
        ((), 6),
        pytest.param(("--tensor-parallel", "--updates", "2"), 2, marks=pytest.mark.hours),
        pytest.param(("--standby", "--updates", "2"), 2, marks=needs_postgresql),
    ],
)
def test_replicas_come_to_recite_the_text(runs: list[Run], arguments: tuple[str, ...], updates: int) -> None:
    runs.append(run := Run(*arguments))
    out, err = run.finish(600)
    assert run.process.returncode == 0, err
    result = json.loads(out.splitlines()[-1])
    assert result["ok"] is result["verified"] is result["final_text_matches"] is True
    assert result["replicas"] == 2
    assert result["updates"] == updates
    assert len(result["timings"]["update_seconds"]) == result["updates"]
    assert run.left() == ({}, [])
