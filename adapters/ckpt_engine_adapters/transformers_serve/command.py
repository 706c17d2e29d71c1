"""Reads a `transformers serve` command line, as far as we need it, and puts our wrapper in its place. Pure; shared by
driver and wrapper.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from ckpt_engine.engine.command import Options, check_refused, command_options
from ckpt_engine.engine.programs import program_at, python_of
from ckpt_engine.engine.versions import Supported

SUPPORTED = Supported("transformers", ("5.23.0",), "transformers", ("transformers",))

WRAPPER = "ckpt_engine_adapters.transformers_serve.launch"
"""Starts transformers' server behind our gate."""

BATCHING = "--continuous-batching"

_MODULE = "transformers.cli.transformers"

REFUSED: Mapping[str, tuple[tuple[str, ...], str]] = {
    f"--no{BATCHING[1:]}": ((), "without continuous batching nothing can pause what computes"),
    "--quantization": ((), "it repacks weights where no update could follow"),
    "--non-blocking": ((), "its server would end with the command"),
}
"""Option to the values that are harmless (none: there is none), and why others are refused."""


def check_command(arguments: Sequence[str]) -> None:
    """Checks the arguments of `serve`. Raises ValueError with a message for the user if its server could not be
    updated."""
    check_refused(options_of(arguments), REFUSED, {}, {})
    if not (model := model_of(arguments)):
        raise ValueError(
            "no model: give `ckpt-engine agent --model DIR`, or name it directly after `serve`; a server that loads "
            "models by the names in requests cannot be updated"
        )
    if model.endswith(".gguf"):
        raise ValueError(f"{model} cannot be used with ckpt-engine: no test has loaded a GGUF file and updated it")


def options_of(arguments: Sequence[str]) -> Options:
    """See command_options."""
    return command_options(arguments)


def model_of(arguments: Sequence[str]) -> str:
    """The model of the arguments of `serve`, which must come first; empty: they name none."""
    first = next(iter(arguments), "-")
    return "" if first.startswith("-") else first


def server_arguments(arguments: Sequence[str]) -> list[str]:
    """Adds to the arguments of `serve` what our half needs: continuous batching."""
    return [*arguments, *([] if BATCHING in options_of(arguments) else [BATCHING])]


def wrapped(command: Sequence[str]) -> tuple[list[str], list[str]]:
    """Splits a command into what starts our wrapper and the arguments of `serve`. Before options alone the wrapper is
    run by this Python, else by that of the command.

    Raises ValueError if the command does not show what it starts.
    """
    words = list(command)
    if not words or words[0].startswith("-"):
        return [sys.executable, "-m", WRAPPER], words
    at = program_at(words)
    if [Path(word).name for word in words[at : at + 2]] == ["transformers", "serve"]:
        if not (python := python_of(words)):
            raise ValueError(
                SUPPORTED.lacks_program(words)
                or f"{words[at]} does not name its Python in its first line: write `PYTHON -m {_MODULE} serve`"
            )
        return [*words[:at], python, "-m", WRAPPER], words[at + 2 :]
    for index, word in enumerate(words[:-1]):
        if word == "-m" and words[index + 1] == WRAPPER:
            return words[: index + 2], words[index + 2 :]
        if word == "-m" and words[index + 1 : index + 3] == [_MODULE, "serve"]:
            return [*words[: index + 1], WRAPPER], words[index + 3 :]
    raise ValueError(
        f"{' '.join(words[:3])} ... does not say how transformers starts: write `transformers serve` with its model "
        "and options, or the options alone, so that the server can be started behind the gate"
    )
