"""How a reference engine begins and ends: closed until weights are installed, gone with any of its processes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from tests.reference.engine_process import CALL_SECONDS, alive, engine
from tests.tiny_model import make_tiny_qwen3

SERVER = (sys.executable, "-m", "ckpt_engine_adapters.reference.server")


def test_closed_before_the_first_install_and_gone_when_a_worker_dies(checkpoint: Path, tmp_path: Path) -> None:
    with engine(checkpoint, tmp_path / "log", "--tensor-parallel", "2") as running:
        answer = httpx.post(running.url + "/generate", json={"input_ids": [1]}, timeout=CALL_SECONDS)
        assert answer.status_code == 503
        assert "holds no weights yet" in answer.json()["detail"]
        first, second = running.worker_pids()
        os.kill(second, signal.SIGKILL)
        assert running.process.wait(timeout=10) == 1
        assert running.log().splitlines()[-1] == (
            f"reference engine: worker 1 (pid {second}) was killed by signal 9; the server exits"
        )
        _wait_dead(first)


def test_workers_die_with_the_api_process_and_a_signal_is_an_orderly_end(checkpoint: Path, tmp_path: Path) -> None:
    for number, status in ((signal.SIGKILL, -9), (signal.SIGTERM, 0)):
        with engine(checkpoint, tmp_path / "log") as running:
            workers = running.worker_pids()
            running.process.send_signal(number)
            assert running.process.wait(timeout=10) == status
            for pid in workers:
                _wait_dead(pid)


def test_a_model_that_cannot_be_loaded_ends_the_server_with_a_reason(tmp_path: Path) -> None:
    make_tiny_qwen3(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        result = _run("--model", str(tmp_path / "model"), "--port", port)
    assert (result.returncode, "Address already in use" in result.stderr) == (1, True)
    result = _run("--model", str(tmp_path / "model"), "--port", "0", "--tensor-parallel", "3")
    assert result.returncode == 1
    assert "num_attention_heads 4 does not divide by 3" in result.stderr
    assert result.stderr.splitlines()[-1].endswith("the server exits")
    result = _run("--model", str(tmp_path))
    assert (result.returncode, "no config.json" in result.stderr) == (2, True)


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*SERVER, *arguments], capture_output=True, text=True, timeout=60)


def _wait_dead(pid: int) -> None:
    deadline = time.monotonic() + 10
    while alive(pid):
        if time.monotonic() > deadline:
            pytest.fail(f"process {pid} still runs")
        time.sleep(0.02)
