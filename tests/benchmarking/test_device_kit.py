"""What runs a list of benchmarks on a bare GPU host: it goes on after a failure, ends what hangs with all that it has
started, and packs what there is."""

from __future__ import annotations

import json
import os
import tarfile
from pathlib import Path

import psutil
import pytest

from benchmarks.gpu.device.__main__ import ARCHIVE, MARK, missing, run_all
from benchmarks.gpu.device.steps import STEPS, Step

WRITES = (
    "import pathlib,sys; pathlib.Path(sys.argv[1], 'found.json').write_text('{}'); print('RESULT 42'); print('end')"
)
HANGS = """
import os, pathlib, signal, subprocess, sys, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
open(sys.argv[1] + "/pid", "w").write(str(child.pid))
below = pathlib.Path(os.environ["TMPDIR"], "pytest-of-x", "fleet", "graphs")
below.mkdir(parents=True)
(below / "graphs.log").write_text("the server's last words")
time.sleep(600)
"""


def step(name: str, code: str, limit: int = 60) -> Step:
    return Step(name, "", ("-c", code, "{out}"), 1, limit)


@pytest.mark.slow
def test_a_run_goes_on_and_packs_what_there_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.gpu.device.__main__.GRACE_SECONDS", 2.0)
    steps = [step("fails", "raise SystemExit('no GPU here')"), step("hangs", HANGS, 5), step("well", WRITES)]
    assert not run_all(steps, tmp_path / "out", 300.0, cpu=True)
    assert [path.name for path in (tmp_path / "out").iterdir()] == [ARCHIVE]
    with tarfile.open(tmp_path / "out" / ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    results = tmp_path / "results"
    told = {each["step"]: each["ended"] for each in json.loads((results / "steps.json").read_text())}
    assert told == {"fails": "failed (1)", "hangs": "not over in 5 s", "well": "ok"}
    assert (results / "well" / "found.json").is_file()
    assert "no GPU here" in (results / "fails" / "log.txt").read_text()
    assert json.loads((results / "machine.json").read_text())["processors"] == len(os.sched_getaffinity(0))
    assert not psutil.pid_exists(int((results / "hangs" / "pid").read_text())), (
        "what it started in a session of its own"
    )
    assert (results / "hangs" / "servers" / "fleet-graphs-graphs.log").read_text() == "the server's last words"
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:3]] == ["fails", "hangs", "well"]
    assert lines[2].endswith("RESULT 42")
    assert lines[3].startswith("1 of 3 well, 0 left out")
    assert MARK not in os.environ


def test_what_cannot_run_here_or_in_time_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CKPT_ENGINE_VLLM_PYTHON", raising=False)
    assert missing(Step("two", "", (), 1, 1, gpus=2), 1, cpu=False) == "needs 2 GPUs, this host shows 1"
    assert missing(Step("a", "", (), 1, 1, engine="vllm"), 1, cpu=False) == "CKPT_ENGINE_VLLM_PYTHON is not set"
    assert run_all([step("late", WRITES)], tmp_path, 0.0, cpu=True), "nothing ran, so nothing failed"
    with tarfile.open(tmp_path / ARCHIVE) as archive:
        file = archive.extractfile("results/steps.json")
        assert file is not None
        assert [each["ended"] for each in json.loads(file.read())] == ["left out"]


def test_the_list_names_what_is_there() -> None:
    """Files, modules and cases of the commands exist; limits are above what is expected; names differ."""
    root = Path(__file__).resolve().parents[2]
    assert len({each.name for each in STEPS}) == len(STEPS)
    page = (root / "benchmarks" / "gpu" / "device" / "README.md").read_text()
    for each in STEPS:
        assert each.seconds < each.limit <= 600
        assert f"| `{each.name}` | {'~' if each.guessed else ''}{each.seconds} | {each.limit} |" in page
        for word in each.command:
            if word.startswith("benchmarks.gpu."):
                assert (root / f"{word.replace('.', '/')}.py").is_file()
            if word.startswith(("benchmarks/", "tests/")):
                assert (root / word).exists(), word
