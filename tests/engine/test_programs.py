"""What is seen in a command that starts an engine: of which kind it is, and which Python it runs with."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ckpt_engine.engine.programs import kind_of, python_of
from ckpt_engine_adapters.reference import driver as reference
from ckpt_engine_adapters.sglang import driver as sglang
from ckpt_engine_adapters.transformers_serve import driver as transformers_serve
from ckpt_engine_adapters.vllm import driver as vllm

KINDS = ("reference", "sglang", "vllm")


@pytest.mark.parametrize(
    ("command", "kind"),
    [
        ("vllm serve Qwen/Qwen3-0.6B --port 8000", "vllm"),
        ("/opt/venv/bin/vllm serve m", "vllm"),
        ("env CUDA_VISIBLE_DEVICES=0 A=b vllm serve m", "vllm"),
        ("python -m vllm.entrypoints.openai.api_server --model m", "vllm"),
        ("python3.11 -u -m vllm.entrypoints.openai.api_server", "vllm"),
        ("/opt/python3 -m sglang.launch_server --tp 2", "sglang"),
        ("sglang serve m", "sglang"),
        ("python -m ckpt_engine_adapters.reference.server --model m", "reference"),
        ("python -m ckpt_engine_adapters.sglang.launch", "sglang"),
        ("--tensor-parallel-size 2 --served-model-name vllm", ""),
        ("python serve.py vllm", ""),
        ("python -m", ""),
        ("tgi serve", ""),
        ("env A=1", ""),
        ("", ""),
    ],
)
def test_the_kind_of_an_engine_is_told_from_its_command(command: str, kind: str) -> None:
    assert kind_of(command.split(), KINDS) == kind


def test_the_python_of_a_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))

    def script(name: str, text: str) -> None:
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)

    script("plain", "#!/opt/venv/bin/python3\nimport sys\n")
    script("through-env", "#!/usr/bin/env A=1 python3.12\n")
    script("long", "#!/bin/sh\n'''exec' \"/a very/long/path/python3\" \"$0\" \"$@\"\n' '''\nimport sys\n")
    script("shell", "#!/bin/sh\nexec python3 x\n")
    script("binary", "\x7fELF")
    found = {name: python_of([name, "serve"]) for name in ("plain", "through-env", "long", "shell", "binary", "absent")}
    assert found == {
        "plain": "/opt/venv/bin/python3",
        "through-env": "python3.12",
        "long": "/a very/long/path/python3",
        "shell": "",
        "binary": "",
        "absent": "",
    }
    assert python_of(["env", "A=1", str(tmp_path / "plain")]) == "/opt/venv/bin/python3"
    assert python_of(["/opt/python3.11", "-m", "x"]) == "/opt/python3.11"
    assert python_of(["--tp", "2"]) == python_of([]) == ""


def test_vllm_serve_gets_its_model_where_it_wants_it() -> None:
    typed = ("vllm", "serve", "Qwen/Qwen3-0.6B", "--port", "8001", "--tensor-parallel-size", "2")
    plan = vllm.launch_plan(typed, 1234, "")
    assert plan.argv[: len(typed)] == typed, "untouched"
    assert "--model" not in plan.argv
    assert (plan.url, plan.workers) == ("http://127.0.0.1:8001", 2)
    assert vllm.launch_plan(("/opt/bin/vllm", "serve", "--port", "1"), 1, "dir").argv[:3] == (
        "/opt/bin/vllm",
        "serve",
        "dir",
    )
    assert "dir" not in vllm.launch_plan(("vllm", "serve", "--model", "mine"), 1, "dir").argv
    with pytest.raises(ValueError, match="two models: --model dir, and mine behind --"):
        vllm.launch_plan(("vllm", "serve", "mine"), 1, "dir")


def test_sglang_serve_becomes_our_wrapper_in_the_python_of_that_script(tmp_path: Path) -> None:
    script = tmp_path / "sglang"
    script.write_text("#!/opt/venv/bin/python3\n")
    script.chmod(0o755)
    plan = sglang.launch_plan((str(script), "serve", "mine", "--model-type", "llm", "--tp", "2"), 1234, "")
    assert plan.argv[:7] == (
        *("/opt/venv/bin/python3", "-m", "ckpt_engine_adapters.sglang.launch"),
        *("--model-path", "mine", "--tp", "2"),
    )
    assert plan.workers == 2
    with pytest.raises(ValueError, match="--model-type diffusion cannot be used"):
        sglang.launch_plan((str(script), "serve", "--model-type=diffusion"), 1234, "mine")


@pytest.mark.parametrize("engine", ["vllm", "sglang", "transformers"])
def test_an_engine_whose_program_is_not_here_is_told_with_what_to_install(engine: str) -> None:
    module = {"vllm": vllm, "sglang": sglang, "transformers": transformers_serve}[engine]
    try:
        refused = module.refused_command(module.launch_plan((f"/absent/{engine}", "serve", "mine"), 1234, "").argv)
    except ValueError as error:
        refused = str(error)
    assert f"there is no program '/absent/{engine}' here" in refused
    assert f"pip install 'ckpt-engine[{engine}]'" in refused


def test_the_reference_engine_may_be_typed_whole(tmp_path: Path) -> None:
    module = "ckpt_engine_adapters.reference.server"
    plan = reference.launch_plan(("python3", "-m", module, "--model", "m", "--tensor-parallel", "2"), 1234, "")
    assert plan.argv[:3] == ("python3", "-m", module)
    assert plan.workers == 2
    assert reference.launch_plan(("--model", "m"), 1234, "").argv[:3] == (sys.executable, "-m", module)
    with pytest.raises(ValueError, match="must be `python -m"):
        reference.launch_plan(("python3", "serve.py"), 1234, "m")
