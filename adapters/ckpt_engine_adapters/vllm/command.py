"""Reads a vLLM command line, as far as we need it. Pure; shared by the driver and the plugin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path

from ckpt_engine.engine.command import BYPASS, Options, check_refused, command_options, size
from ckpt_engine.engine.programs import program_at

WORKERS_VARIABLE = "CKPT_ENGINE_VLLM_WORKERS"
"""How many workers the whole server has. The worker of a dense model under data parallelism cannot know it: vLLM tells
each of its engine cores that it is alone."""

REFUSED = {
    "--grpc": ((), BYPASS),
    "--grpc-port": ((), BYPASS),
    "--ec-transfer-config": (
        (),
        "pictures would be answered from what another server or an older version made of them",
    ),
}
REFUSED_ENVIRONMENT = {"VLLM_USE_RUST_FRONTEND": BYPASS}

AXES = ("--tensor-parallel-size", "--pipeline-parallel-size", "--data-parallel-size")
"""Options whose product is the number of workers."""

_ALIASES = {
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-dp": "--data-parallel-size",
    "-dpn": "--data-parallel-rank",
    "-dpr": "--data-parallel-start-rank",
    "-dph": "--data-parallel-hybrid-lb",
    "-dpe": "--data-parallel-external-lb",
    "-dpm": "--data-parallel-multi-port-external-lb",
    "-n": "--nnodes",
    "-r": "--node-rank",
}


def options_of(command: Sequence[str]) -> Options:
    """See command_options."""
    return command_options(command, _ALIASES)


def model_of_serve(command: Sequence[str]) -> tuple[int, str] | None:
    """Index and name of the model in a `vllm serve` command, with an empty name if it has none; None: another
    command."""
    at = program_at(command)
    if [Path(word).name for word in command[at : at + 2]] != ["vllm", "serve"]:
        return None
    model = next(iter(command[at + 2 :]), "")
    return at + 2, "" if model.startswith("-") else model


def check_options(options: Options, environment: Mapping[str, str]) -> None:
    """See check_refused."""
    check_refused(options, REFUSED, environment, REFUSED_ENVIRONMENT)


def worker_count(options: Options) -> int:
    """The number of workers by the options: tensor x pipeline x data parallel. Raises ValueError if a size is no
    number."""
    return prod(size(options, axis) for axis in AXES)
