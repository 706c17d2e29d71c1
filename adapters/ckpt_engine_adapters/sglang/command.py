"""What an SGLang command line says, as far as we must know it, and what we add. Pure; shared by driver and wrapper."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from ckpt_engine.engine.command import BYPASS, Options, check_refused, command_options, size, value
from ckpt_engine.engine.programs import program_at, python_of

LOADER = "ckpt_engine_adapters.sglang.loader.load"
"""Our entry in SGLang's schedulers, for `--custom-weight-loader` and as `load_format` of each order."""

WRAPPER = "ckpt_engine_adapters.sglang.launch"
"""Starts SGLang's server behind our gate."""

WORKERS_VARIABLE = "CKPT_ENGINE_SGLANG_WORKERS"
"""How many workers the whole server has, for our half inside the schedulers."""

_SERVER = "sglang.launch_server"
_TYPE = "--model-type"
_TYPES = ("auto", "llm")

_DRAFT = "an update would leave the draft model behind"
REFUSED: Mapping[str, tuple[tuple[str, ...], str]] = {
    "--tokenizer-worker-num": (("1",), "its further API processes are not behind the gate"),
    "--grpc-mode": ((), BYPASS),
    "--smg-grpc-mode": ((), BYPASS),
    "--grpc-port": ((), BYPASS),
    "--use-ray": ((), BYPASS),
    "--encoder-only": ((), BYPASS),
    "--pipeline-parallel-size": (("1",), "its stages take new weights one after the other, with tokens in between"),
    "--disaggregation-mode": (("null",), "caches of old weights would travel between servers"),
    "--hicache-storage-backend": ((), "stored caches of old weights would outlive an update"),
    "--speculative-algorithm": (("NGRAM",), _DRAFT),
    "--speculative-draft-model-path": ((), _DRAFT),
}
"""Option to the values that are harmless (none: there is none), and why others are refused."""

REFUSED_ENVIRONMENT: Mapping[str, str] = {
    "SGLANG_RUST_SERVER": BYPASS,
    "SGLANG_GRPC_PORT": BYPASS,
}

_ALIASES = {
    "--tp-size": "--tensor-parallel-size",
    "--tp": "--tensor-parallel-size",
    "--pp-size": "--pipeline-parallel-size",
    "--pp": "--pipeline-parallel-size",
    "--dp-size": "--data-parallel-size",
    "--dp": "--data-parallel-size",
    "--model": "--model-path",
    "--speculative-draft-model": "--speculative-draft-model-path",
}


def options_of(command: Sequence[str]) -> Options:
    """See command_options."""
    return command_options(command, _ALIASES)


def check_options(options: Options, environment: Mapping[str, str]) -> None:
    """See check_refused."""
    check_refused(options, REFUSED, environment, REFUSED_ENVIRONMENT)
    if size(options, "--data-parallel-size") > 1 and "--enable-dp-attention" not in options:
        raise ValueError(
            "--data-parallel-size needs --enable-dp-attention: SGLang takes weights only where all its workers are of "
            "one replica; start one replica for each copy instead"
        )


def worker_count(options: Options) -> int:
    """Workers that the options ask for. Data-parallel attention adds none: it divides the tensor parallel ranks."""
    return size(options, "--tensor-parallel-size") * size(options, "--pipeline-parallel-size")


def server_arguments(given: Sequence[str]) -> list[str]:
    """SGLang's arguments, and with them our loader and `--skip-server-warmup`.

    Loaders that the user names are kept. The warm-up would ask the server for tokens. The gate refuses that until there
    are weights, and SGLang would then exit.
    """
    options = options_of(given)
    added = []
    loaders = options.get("--custom-weight-loader", ())
    if LOADER not in loaders:
        added += ["--custom-weight-loader", *loaders, LOADER]  # the last one of two counts
    if "--skip-server-warmup" not in options:
        added.append("--skip-server-warmup")
    return [*given, *added]


def wrapped(command: Sequence[str]) -> list[str]:
    """`command`, with our wrapper instead of SGLang's server module.

    Options alone become a whole command. For `sglang serve MODEL`, the Python of that script runs our wrapper, with the
    model as an option. Raises ValueError if the command does not show how SGLang starts.
    """
    given = list(command)
    if not given or given[0].startswith("-"):
        return [sys.executable, "-m", WRAPPER, *given]
    at = program_at(given)
    if [Path(word).name for word in given[at : at + 2]] == ["sglang", "serve"]:
        if not (python := python_of(given)):
            raise ValueError(f"{given[at]} cannot be found, or does not name its Python: write `PYTHON -m {_SERVER}`")
        return [*given[:at], python, "-m", WRAPPER, *_served(given[at + 2 :])]
    for index, argument in enumerate(given[:-1]):
        if argument == "-m" and given[index + 1] in (_SERVER, WRAPPER):
            return [*given[: index + 1], WRAPPER, *given[index + 2 :]]
    raise ValueError(
        f"{' '.join(given[:3])} ... does not say how SGLang starts: write `python -m {_SERVER}` or `sglang serve` with "
        "its options, or its options alone, so that the server can be started behind the gate"
    )


def _served(arguments: Sequence[str]) -> list[str]:
    """Options for SGLang's server module that mean the same as these arguments of `sglang serve`.

    `sglang serve` also takes the model as its first argument, and has an option for the kind of model. Raises
    ValueError for a kind that is not a language model."""
    options = options_of(arguments)
    if _TYPE in options and value(options, _TYPE) not in _TYPES:
        raise ValueError(f"{_TYPE} {value(options, _TYPE)} cannot be used with ckpt-engine: only language models can")
    model = [] if not arguments or arguments[0].startswith("-") else ["--model-path", arguments[0]]
    rest: list[str] = []
    skip = False
    for argument in arguments[1:] if model else arguments:
        if not skip and not argument.startswith(f"{_TYPE}="):
            rest += [argument] if argument != _TYPE else []
        skip = argument == _TYPE
    return [*model, *rest]
