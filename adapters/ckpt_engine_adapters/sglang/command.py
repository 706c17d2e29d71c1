"""What an SGLang command line says, as far as we must know it, and what we add. Pure; shared by driver and wrapper."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

LOADER = "ckpt_engine_adapters.sglang.loader.load"
"""Our entry in SGLang's schedulers, for `--custom-weight-loader` and as `load_format` of each order."""

WRAPPER = "ckpt_engine_adapters.sglang.launch"
"""Starts SGLang's server behind our gate."""

WORKERS_VARIABLE = "CKPT_ENGINE_SGLANG_WORKERS"
"""How many workers the whole server has, for our half inside the schedulers."""

_SERVER = "sglang.launch_server"

_BYPASS = "it would answer requests that the gate does not see"
_DRAFT = "an update would leave the draft model behind"
REFUSED: Mapping[str, tuple[tuple[str, ...], str]] = {
    "--tokenizer-worker-num": (("1",), "its further API processes are not behind the gate"),
    "--grpc-mode": ((), _BYPASS),
    "--smg-grpc-mode": ((), _BYPASS),
    "--grpc-port": ((), _BYPASS),
    "--use-ray": ((), _BYPASS),
    "--encoder-only": ((), _BYPASS),
    "--pipeline-parallel-size": (("1",), "its stages take new weights one after the other, with tokens in between"),
    "--disaggregation-mode": (("null",), "caches of old weights would travel between servers"),
    "--hicache-storage-backend": ((), "stored caches of old weights would outlive an update"),
    "--speculative-algorithm": (("NGRAM",), _DRAFT),
    "--speculative-draft-model-path": ((), _DRAFT),
}
"""Option to the values that are harmless (none: there is none), and why others are refused."""

REFUSED_ENVIRONMENT: Mapping[str, str] = {
    "SGLANG_RUST_SERVER": _BYPASS,
    "SGLANG_GRPC_PORT": _BYPASS,
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


def command_options(command: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Options by their long names with the values that follow each, as `--name value ...` or `--name=value`."""
    found: dict[str, tuple[str, ...]] = {}
    name = ""
    for argument in command:
        if argument.startswith("--"):
            name, equals, value = argument.partition("=")
            name = name.replace("_", "-")
            name = _ALIASES.get(name, name)
            found[name] = (value,) if equals else ()
        elif name:
            found[name] = (*found[name], argument)
    return found


def check_options(options: Mapping[str, tuple[str, ...]], environment: Mapping[str, str]) -> None:
    """Raises ValueError, in words for the user: this server could not be kept behind the gate, or not be updated."""
    for name, (harmless, reason) in REFUSED.items():
        if name in options and (options[name] or ("",))[0] not in harmless:
            raise ValueError(f"{' '.join((name, *options[name]))} cannot be used with ckpt-engine: {reason}")
    for name, reason in REFUSED_ENVIRONMENT.items():
        if environment.get(name, "").lower() not in ("", "0", "false"):
            raise ValueError(f"{name}={environment[name]} cannot be used with ckpt-engine: {reason}")
    if size(options, "--data-parallel-size") > 1 and "--enable-dp-attention" not in options:
        raise ValueError(
            "--data-parallel-size needs --enable-dp-attention: SGLang takes weights only where all its workers are of "
            "one replica; start one replica for each copy instead"
        )


def size(options: Mapping[str, tuple[str, ...]], name: str) -> int:
    """The number that a size option has; 1 without it. Raises ValueError: it is no number."""
    return int((options.get(name) or ("1",))[0])


def worker_count(options: Mapping[str, tuple[str, ...]]) -> int:
    """Workers that the options ask for. Under data-parallel attention the tensor parallel ranks are divided again."""
    return size(options, "--tensor-parallel-size") * size(options, "--pipeline-parallel-size")


def server_arguments(given: Sequence[str]) -> list[str]:
    """SGLang's own arguments with what our half needs: the loader, and no warm-up.

    Loaders that the user names are kept. The warm-up would ask the server for tokens, which the gate refuses until
    there are weights, and SGLang would then end itself.
    """
    options = command_options(given)
    added = []
    loaders = options.get("--custom-weight-loader", ())
    if LOADER not in loaders:
        added += ["--custom-weight-loader", *loaders, LOADER]  # the last one of two counts
    if "--skip-server-warmup" not in options:
        added.append("--skip-server-warmup")
    return [*given, *added]


def wrapped(command: Sequence[str]) -> list[str]:
    """`command` with our wrapper in the place of SGLang's own module; a command of options only gets all of it.

    Raises ValueError: what it starts cannot be seen from the command.
    """
    given = list(command)
    if not given or given[0].startswith("-"):
        return [sys.executable, "-m", WRAPPER, *given]
    for index, argument in enumerate(given[:-1]):
        if argument == "-m" and given[index + 1] in (_SERVER, WRAPPER):
            return [*given[: index + 1], WRAPPER, *given[index + 2 :]]
    raise ValueError(
        f"{' '.join(given[:3])} ... does not say how SGLang starts: write `python -m {_SERVER}` with its options, or "
        "its options alone, so that the server can be started behind the gate"
    )
