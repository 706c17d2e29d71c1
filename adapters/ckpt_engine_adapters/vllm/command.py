"""What a vLLM command line says, as far as we must know it. Pure; shared by the driver and the plugin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

WORKERS_VARIABLE = "CKPT_ENGINE_VLLM_WORKERS"
"""How many workers the whole server has. The worker of a dense model under data parallelism cannot know it: vLLM tells
each of its engine cores that it is alone."""

_PARALLEL = (
    ("--tensor-parallel-size", "-tp"),
    ("--pipeline-parallel-size", "-pp"),
    ("--data-parallel-size", "-dp"),
)


_BYPASS = "it would answer requests that the gate does not see"
REFUSED = {"--grpc": _BYPASS, "--grpc-port": _BYPASS}
REFUSED_ENVIRONMENT = {"VLLM_USE_RUST_FRONTEND": _BYPASS}


def check_command(command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Raises ValueError, in words for the user: this server could not be kept behind the gate."""
    options = command_options(command)
    for name, reason in REFUSED.items():
        if name in options:
            raise ValueError(f"{name} cannot be used with ckpt-engine: {reason}")
    for name, reason in REFUSED_ENVIRONMENT.items():
        value = environment.get(name, "")
        if value.lower() not in ("", "0", "false"):
            raise ValueError(f"{name}={value} cannot be used with ckpt-engine: {reason}")


def command_options(command: Sequence[str]) -> dict[str, str]:
    """Options with their values, as `--name value` or `--name=value`; the value of a flag is empty."""
    found = {}
    for index, argument in enumerate(command):
        if not argument.startswith("-"):
            continue
        name, equals, value = argument.partition("=")
        if not equals:
            following = command[index + 1] if index + 1 < len(command) else ""
            value = "" if following.startswith("--") else following
        found[name.replace("_", "-")] = value
    return found


def worker_count(command: Sequence[str]) -> int:
    """Workers that the command asks for: tensor x pipeline x data parallel.

    Raises ValueError: a size is no number.
    """
    options = command_options(command)
    workers = 1
    for names in _PARALLEL:
        workers *= int(next((options[name] for name in names if name in options), "1"))
    return workers
