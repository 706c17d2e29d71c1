"""What people see who ask: choices, other names, nothing heavy loaded, and everything in 80 columns."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pytest
from click.testing import Result

from ckpt_engine.cli import COMMANDS, OPERATIONS
from ckpt_engine.commands import choices
from ckpt_engine.core.dtypes import ITEMSIZES
from ckpt_engine.core.enums import enum_word
from ckpt_engine.core.prediction import MEMORIES
from ckpt_engine.core.sleeping import TAGS
from ckpt_engine.core.transports import worker_kinds
from ckpt_engine.engine.kinds import engine_names
from ckpt_engine.options import PAUSE_MODES, PREFETCH, UNTIL
from ckpt_engine.planning.places import LINKS
from ckpt_engine.v1 import manager_pb2

Run = Callable[..., Result]

HEAVY = ("torch", "numba", "transformers")
ASKED = [
    ["-h"],
    *([name, "-h"] for name in COMMANDS),
    ["replica", "retry", "-h"],
    ["lineage", "list", "--help"],
    ["replica", "sleep", "-h"],
]

_LOOK = f"""
import os, sys
sys.argv = ["ckpt-engine", *sys.argv[1:]]
from ckpt_engine.cli import main
try:
    main()
except SystemExit as ended:
    assert not ended.code, ended.code
loaded = [name for name in {HEAVY!r} if name in sys.modules]
assert not loaded, loaded
"""


def python(code: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "COLUMNS": "80", **environment},
        check=False,
    )


def test_help_loads_nothing_heavy() -> None:
    """All of them in one process: what one of them loads stays loaded."""
    looks = f"""
import sys
from typer.testing import CliRunner
from ckpt_engine.cli import app_for
for asked in {ASKED!r}:
    result = CliRunner().invoke(app_for(asked), asked)
    assert result.exit_code == 0, (asked, result.output)
    loaded = [name for name in {HEAVY!r} if name in sys.modules]
    assert not loaded, (asked, loaded)
"""
    done = python(looks)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("asked", ASKED, ids=" ".join)
def test_help_fits_into_eighty_columns(run: Run, asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = run(*asked).stdout
    assert max(map(len, shown.splitlines())) <= 80
    assert "…" not in shown
    assert not [line for line in shown.splitlines()[1:] if line.endswith("...")], "nothing is cut off"


def test_choices_are_those_that_there_are(run: Run) -> None:
    modes = {enum_word(manager_pb2.Mode, number) for number in manager_pb2.Mode.values() if number}
    assert {each.value for each in choices.Mode} == modes
    assert {each.value for each in choices.PauseMode} == set(PAUSE_MODES)
    assert {each.value for each in choices.Policy} == set(PREFETCH)
    assert {each.value for each in choices.Until} == set(UNTIL)
    assert {each.value for each in choices.Tag} == set(TAGS)
    assert {each.value for each in choices.TrainerMemory} == set(MEMORIES)
    assert {each.value for each in choices.GpuLink} == set(LINKS)
    assert {each.value for each in choices.Dtype} <= set(ITEMSIZES)
    shown = run("agent", "-h").stdout
    assert "|".join(each.value for each in choices.Mode) in shown
    assert "|".join(engine_names()) in shown
    assert "|".join(worker_kinds()) in shown


def test_operations_are_found_where_people_look(run: Run) -> None:
    listed = run("-h").stdout
    for noun, operations in OPERATIONS.items():
        for name in operations:
            assert f"{noun} {name}" in listed
            assert name in run(noun, "-h").stdout
    assert "127.0.0.1:50051" in run("agent", "-h").stdout
    assert "7070" not in run("agent", "-h").stdout


def test_a_shell_completes_what_a_command_takes() -> None:
    typed = {"_CKPT_ENGINE_COMPLETE": "complete_bash", "COMP_CWORD": "3"}
    done = python(_LOOK, COMP_WORDS="ckpt-engine agent --mode ", **typed)
    assert done.stdout.split() == ["standalone", "hybrid", "colocated"]
    done = python(_LOOK, COMP_WORDS="ckpt-engine update --check", **{**typed, "COMP_CWORD": "2"})
    assert done.stdout.split() == ["--checkpoint", "--check-finite"]


def test_an_argument_of_the_engine_without_its_mark(run: Run) -> None:
    result = run("agent", "--manager", "127.0.0.1:1", "--engine", "vllm", "--tensor-parallel", "2")
    assert result.exit_code == 2
    words = "No such option: --tensor-parallel. An argument of the engine stands behind --: -- --tensor-parallel ..."
    assert words in result.stderr


def test_engines_prints_for_people(run: Run) -> None:
    shown = run("engines", "vllm").stdout
    assert shown.startswith("vllm\n  here: ")
    assert "sglang" not in shown
    assert "CAPABILITIES" not in shown
    assert max(map(len, run("engines").stdout.splitlines())) <= 80
