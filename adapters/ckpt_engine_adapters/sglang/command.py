"""Reads an SGLang command line, as far as we need it, and adds our options. Pure; shared by driver and wrapper."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from ckpt_engine.engine.command import BYPASS, Options, check_refused, command_options, size, value
from ckpt_engine.engine.programs import program_at, python_of
from ckpt_engine.engine.versions import Supported

SUPPORTED = Supported("SGLang", ("0.5.16", "0.5.23"), "sglang", ("sglang",))

LOADER = "ckpt_engine_adapters.sglang.loader.load"
"""Our entry in SGLang's schedulers, for `--custom-weight-loader` and as `load_format` of each order."""

WRAPPER = "ckpt_engine_adapters.sglang.launch"
"""Starts SGLang's server behind our gate."""

WORKERS_VARIABLE = "CKPT_ENGINE_SGLANG_WORKERS"
"""How many workers the whole server has, for our half inside the schedulers."""

_SERVER = "sglang.launch_server"
_TYPE = "--model-type"
_TYPES = ("auto", "llm")

_STORES = "stored caches of old weights would outlive an update"
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
    "--hicache-storage-backend": ((), _STORES),
    "--enable-lmcache": ((), _STORES),
    "--enable-flexkv": ((), _STORES),
    "--enable-unified-cache-external-linker": ((), _STORES),
    "--radix-cache-backend": ((), "it is not known to keep requests with different keys apart"),
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
    """The number of workers by the options. Data-parallel attention only divides the tensor parallel ranks again."""
    return size(options, "--tensor-parallel-size") * size(options, "--pipeline-parallel-size")


def server_arguments(arguments: Sequence[str]) -> list[str]:
    """Adds to SGLang's own arguments what our half needs: the loader, and no warm-up.

    The user's loaders are kept. A warm-up would ask the server for tokens, which the gate refuses until there are
    weights, and SGLang would then end itself.
    """
    options = options_of(arguments)
    additions = []
    loaders = options.get("--custom-weight-loader", ())
    if LOADER not in loaders:
        additions += ["--custom-weight-loader", *loaders, LOADER]  # the last one of two counts
    if "--skip-server-warmup" not in options:
        additions.append("--skip-server-warmup")
    return [*arguments, *additions]


def wrapped(command: Sequence[str]) -> list[str]:
    """Puts our wrapper in the place of SGLang's own module in a command; before options alone it puts the whole
    command. `sglang serve MODEL` becomes our wrapper, run by the Python of that script, with the model as an option.

    Raises ValueError if the command does not show what it starts.
    """
    words = list(command)
    if not words or words[0].startswith("-"):
        return [sys.executable, "-m", WRAPPER, *words]
    at = program_at(words)
    if [Path(word).name for word in words[at : at + 2]] == ["sglang", "serve"]:
        if not (python := python_of(words)):
            raise ValueError(
                SUPPORTED.lacks_program(words)
                or f"{words[at]} does not name its Python in its first line: write `PYTHON -m {_SERVER}`"
            )
        return [*words[:at], python, "-m", WRAPPER, *_served(words[at + 2 :])]
    for index, argument in enumerate(words[:-1]):
        if argument == "-m" and words[index + 1] in (_SERVER, WRAPPER):
            return [*words[: index + 1], WRAPPER, *words[index + 2 :]]
    raise ValueError(
        f"{' '.join(words[:3])} ... does not say how SGLang starts: write `python -m {_SERVER}` or `sglang serve` with "
        "its options, or its options alone, so that the server can be started behind the gate"
    )


def _served(arguments: Sequence[str]) -> list[str]:
    """Turns the arguments of `sglang serve` into options of SGLang's server module: there the model may come first, and
    an option names the kind of model. Raises ValueError for a kind that is not a language model."""
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
