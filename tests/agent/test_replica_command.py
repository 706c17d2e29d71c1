"""What `ckpt-engine agent` refuses before it starts anything, in words that help."""

from __future__ import annotations

import re

import pytest
import typer
from typer.testing import CliRunner

from ckpt_engine.cli import app_for


@pytest.fixture
def command() -> typer.Typer:
    return app_for(["agent"])


WRONG = [
    (["--engine", "sglong"], "'sglong' is not one of 'reference', 'sglang', 'transformers', 'vllm'"),
    (["--engine", "reference", "--mode", "hybrit"], "'hybrit' is not one of 'standalone', 'hybrid', 'colocated'"),
    (["--engine", "vllm", "--tensor-parallel", "2"], "An argument of the engine stands behind --"),
    (["--engine", "reference", "--manager", "nowhere"], "must be HOST:PORT, not 'nowhere'"),
    (["--engine", "reference", "--url", "http://127.0.0.1:1", "--", "--dtype", "float32"], "--url attaches to"),
    (["--engine", "reference", "--url", "http://127.0.0.1:1", "--model", "x"], "--url attaches to"),
    (["--engine", "reference", "--restart", "sometimes"], "on-failure"),
    (["--engine", "reference", "--advertise", "http://10.0.0.1:80"], "without scheme and port, not 'http://10.0.0.1"),
    (["--engine", "reference", "--transport", "pigeon"], "is not one of cuda_ipc, relay_memory, shared_memory, file"),
]


@pytest.mark.parametrize(("arguments", "words"), WRONG)
def test_what_cannot_work_is_refused(
    command: typer.Typer, arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    result = CliRunner().invoke(command, ["agent", "--manager", "127.0.0.1:1", *arguments])
    assert result.exit_code == 2, result.output
    assert words in re.sub(r"[\s│]+", " ", result.output)


def test_a_refusal_of_the_adapter_ends_the_command(command: typer.Typer) -> None:
    arguments = ["agent", "--manager", "127.0.0.1:1", "--engine", "reference", "--", "--port", "1"]
    result = CliRunner().invoke(command, arguments)
    assert result.exit_code == 1
    assert "leave --port out of the engine's arguments" in result.output
