"""The demo as people run it, and that nothing of it is left, however it ends."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

MARK = "CKPT_ENGINE_DEMO_TEST"
PACKAGES = Path(__file__).resolve().parents[2]


class Run:
    """One run of the command, with a mark in the environment of every process that it starts."""

    def __init__(self, *arguments: str) -> None:
        self.mark = uuid.uuid4().hex
        # Not pytest's directory: the paths of sockets below it must be short.
        self.directory = Path(tempfile.mkdtemp(prefix="d-"))
        environment = {
            **os.environ,
            MARK: self.mark,
            "TMPDIR": str(self.directory),
            "PYTHONPATH": os.pathsep.join(
                [str(PACKAGES), str(PACKAGES / "adapters"), os.environ.get("PYTHONPATH", "")]
            ),
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "ckpt_engine", "demo", "--json", *arguments],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # A job that a shell runs in the background ignores it, and so would the demo.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    def processes(self) -> dict[int, str]:
        """Living processes with the mark: pid to command line."""
        found = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    if f"{MARK}={self.mark}".encode() in (entry / "environ").read_bytes():
                        found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        return found

    def wait_for(self, word: str, seconds: float) -> int:
        """The pid of a process with this word in its command line, once there is one that is not a launcher."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and self.process.poll() is None:
            for pid, command in self.processes().items():
                if word in command and "launcher.py" not in command:
                    return pid
            time.sleep(0.05)
        pytest.fail(f"no process with {word} within {seconds} s: {self.processes()}")

    def finish(self, seconds: float) -> tuple[str, str]:
        return self.process.communicate(timeout=seconds)

    def left(self) -> tuple[dict[int, str], list[str]]:
        """Processes and files."""
        end = time.monotonic() + 60
        while self.processes() and time.monotonic() < end:
            time.sleep(0.1)
        return self.processes(), [str(path) for path in self.directory.iterdir()]


@pytest.fixture
def runs() -> Iterator[list[Run]]:
    started: list[Run] = []
    yield started
    for run in started:
        run.process.kill()
        run.process.wait(10)
        for pid in run.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(run.directory, ignore_errors=True)


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
    end = time.monotonic() + 60
    while run.processes() and time.monotonic() < end:
        time.sleep(0.2)
    assert run.processes() == {}


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
@pytest.mark.parametrize("arguments", [(), ("--tensor-parallel", "--updates", "2")])
def test_replicas_come_to_recite_the_text(runs: list[Run], arguments: tuple[str, ...]) -> None:
    runs.append(run := Run(*arguments))
    out, err = run.finish(600)
    assert run.process.returncode == 0, err
    result = json.loads(out.splitlines()[-1])
    assert result["ok"] is result["verified"] is result["final_text_matches"] is True
    assert result["replicas"] == 2
    assert result["updates"] == (2 if arguments else 6)
    assert len(result["timings"]["update_seconds"]) == result["updates"]
    assert run.left() == ({}, [])
