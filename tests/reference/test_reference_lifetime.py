"""How a reference engine begins and ends, and its model: loaded, refused, discarded."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import weakref
from pathlib import Path

import httpx
import pytest
import torch

from ckpt_engine_adapters.reference.model import ReferenceModel, UnsupportedModelError
from tests.reference.engine_process import CALL_SECONDS, engine
from tests.tiny_model import make_tiny_qwen3
from tests.waiting import assert_gone

SERVER = (sys.executable, "-m", "ckpt_engine_adapters.reference.server")


def test_closed_before_the_first_install_and_gone_when_a_worker_dies(checkpoint: Path, tmp_path: Path) -> None:
    with engine(checkpoint, tmp_path / "log", "--tensor-parallel", "2") as running:
        answer = httpx.post(running.url + "/generate", json={"input_ids": [1]}, timeout=CALL_SECONDS)
        assert answer.status_code == 503
        assert "holds no weights yet" in answer.json()["detail"]
        first, second = running.worker_pids()
        os.kill(second, signal.SIGKILL)
        assert running.process.wait(timeout=60) == 1
        assert f"worker 1 (pid {second}) was killed by signal 9" in running.log().splitlines()[-1]
        assert_gone(first)


def test_workers_die_with_the_api_process(checkpoint: Path, tmp_path: Path) -> None:
    with engine(checkpoint, tmp_path / "log") as running:
        workers = running.worker_pids()
        running.process.kill()
        running.process.wait(timeout=60)
        for pid in workers:
            assert_gone(pid)


def test_a_server_that_cannot_start_says_why(checkpoint: Path, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        result = _run("--model", str(checkpoint), "--port", port)
    assert (result.returncode, "Address already in use" in result.stderr) == (1, True)
    result = _run("--model", str(tmp_path))
    assert (result.returncode, "no config.json" in result.stderr) == (2, True)


def test_a_model_that_does_not_fit_is_refused_in_words(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="num_attention_heads 4 does not divide by 3"):
        ReferenceModel(checkpoint, torch.bfloat16, world_size=3)
    model = ReferenceModel(checkpoint, torch.bfloat16)
    with pytest.raises(FileNotFoundError, match="holds no safetensors file"):
        model.load_directory(checkpoint)
    with pytest.raises(ValueError, match=r"model.norm.weight: the model's shape is \(128,\), the given one \(64,\)"):
        model.load_weights([("model.norm.weight", torch.zeros(64))])
    with pytest.raises(ValueError, match="no such parameter"):
        model.load_weights([("model.extra.weight", torch.zeros(64))])


def test_a_model_loads_its_directory_and_survives_the_loss_of_its_memory(tmp_path: Path) -> None:
    original = make_tiny_qwen3(tmp_path, tied=True)
    model = ReferenceModel(tmp_path, torch.bfloat16, initialise=False)
    model.load_directory(tmp_path)
    expected = model.next_logits([1, 2, 3], model.new_cache())
    memory = [weakref.ref(parameter) for parameter in model.module.parameters()]
    assert torch.equal(expected, original(torch.tensor([[1, 2, 3]])).logits[0, -1].float())

    model.discard()
    assert model.parameter_bytes() == 0
    assert all(reference() is None for reference in memory)
    model.restore()
    assert model.next_logits([1, 2, 3], model.new_cache()).isnan().all()
    model.load_directory(tmp_path)  # the tied head is not in there: it must still be the embedding
    assert torch.equal(model.next_logits([1, 2, 3], model.new_cache()), expected)


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*SERVER, *arguments], capture_output=True, text=True, timeout=120)
