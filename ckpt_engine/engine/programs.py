"""Recognises what an engine's command starts: which kind of engine, with which Python. It starts nothing, and does not
read an engine's own options, as adapters do (command.py).
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Collection, Sequence
from pathlib import Path

_PYTHON = re.compile(r"python[0-9.]*")
_OURS = "ckpt_engine_adapters"
_FIRST_BYTES = 4096
"""Bytes of a script that are read: enough for the line that names its Python, one of the first."""


def program_at(command: Sequence[str]) -> int:
    """Index of the program in a command, after `env` and its variables. Beyond the last word if there is none."""
    at = 0
    if command and Path(command[0]).name == "env":
        at = 1
        while at < len(command) and "=" in command[at]:
            at += 1
    return at


def variables_of(command: Sequence[str]) -> dict[str, str]:
    """The environment variables that a command sets by `env` in front of its program."""
    return dict(word.split("=", 1) for word in command[: program_at(command)] if "=" in word)


def kind_of(command: Sequence[str], kinds: Collection[str]) -> str:
    """The kind of engine that a command starts, by its program or its Python's module: `vllm serve ...`,
    `python -m sglang.launch_server ...`. Empty: none of `kinds`, or the command has only options."""
    at = program_at(command)
    if at == len(command):
        return ""
    name = Path(command[at]).name
    if _PYTHON.fullmatch(name):
        module = command[command.index("-m", at) + 1 :][:1] if "-m" in command[at:] else []
        parts = module[0].split(".") if module else []
        name = next(iter(parts[1:] if parts[:1] == [_OURS] else parts), "")
    return name if name in kinds else ""


def python_of(command: Sequence[str]) -> str:
    """The Python of a command: its program, or the one that its program's script names. Empty: unknown."""
    program = next(iter(command[program_at(command) :]), "")
    if not program or program.startswith("-") or _PYTHON.fullmatch(Path(program).name):
        return "" if program.startswith("-") else program
    path = shutil.which(program)
    if path is None:
        return ""
    try:
        with open(path, "rb") as file:
            text = file.read(_FIRST_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""
    return _python_of_script(text)


def missing_program(command: Sequence[str]) -> str:
    """The program of a command, if there is none of that name here. Empty: it is there, or the command sets PATH."""
    at = program_at(command)
    program = next(iter(command[at:]), "")
    unknown = not program or program.startswith("-") or any(word.startswith("PATH=") for word in command[:at])
    return "" if unknown or shutil.which(program) else program


def _python_of_script(text: str) -> str:
    """The Python in a script's `#!` line, directly or through env; or in the shell line that installers write instead
    if its path is too long for `#!`."""
    first, _, rest = text.partition("\n")
    if not first.startswith("#!"):
        return ""
    words = first[2:].split()
    words = words[program_at(words) :]
    if words and _PYTHON.fullmatch(Path(words[0]).name):
        return words[0]
    exec_line = re.match(r"""'''exec' "?([^"\n]*?python[0-9.]*)"?[ \n]""", rest)
    return exec_line[1] if exec_line else ""
