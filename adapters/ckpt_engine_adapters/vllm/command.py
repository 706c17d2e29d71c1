"""Reads a vLLM command line, as far as we need it. Pure; shared by the driver and the plugin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

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

_OWN = "adapters of its own would take slots and names from those that are published (--adapter)"
_NOT_WITH_ADAPTERS = {
    "--lora-modules": ((), _OWN),
    "--default-mm-loras": ((), _OWN),
    "--fully-sharded-loras": ((), "its slots are cut in a way that is not verified (--adapter)"),
    "--pipeline-parallel-size": (
        ("1",),
        "each worker reads whole adapters, and would have slots of its stage only (--adapter)",
    ),
    "--enable-moe-shared-loras": ((), "adapters of experts are not supported (--adapter)"),
    "--enable-tower-connector-lora": ((), "adapters of towers are not supported (--adapter)"),
}
_NOT_WITH_ADAPTERS_ENVIRONMENT = {
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": _OWN,
    "VLLM_ENABLE_RESPONSES_API_STORE": (
        "responses in the background outlive the requests that keep their adapter's version in use (--adapter)"
    ),
}

_SPLITS = (
    "pipeline_parallel_size",
    "prefill_context_parallel_size",
    "decode_context_parallel_size",
    # Of a dense model vLLM tells each engine core that it is alone; those of experts know of each other.
    "data_parallel_size",
    "nnodes",
)
"""Fields of vLLM's ParallelConfig by which workers differ in a way that adapters have not been tried with."""

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


def check_adapters(options: Options, environment: Mapping[str, str], versions: Mapping[str, int]) -> None:
    """Raises ValueError unless a vLLM command can serve these adapters. versions: how many it keeps of each. What the
    command does not say, as in a file of vLLM's (--config), each worker checks (`check_adapter_workers`)."""
    if "--enable-lora" not in options:
        raise ValueError("--adapter: vLLM has slots for adapters only with --enable-lora")
    check_refused(options, _NOT_WITH_ADAPTERS, environment, _NOT_WITH_ADAPTERS_ENVIRONMENT)
    slots = size(options, "--max-loras")
    name, needed = max(versions.items(), key=lambda each: each[1])
    if slots < needed:
        raise ValueError(
            f"--max-loras {slots}: {needed} versions of the adapter {name} may be in use at a time; start vLLM with "
            f"--max-loras {needed} or more"
        )


def check_adapter_workers(parallel: Any, environment: Mapping[str, str]) -> None:
    """Raises ValueError unless the workers of a vLLM server that has started can serve adapters. parallel: vLLM's
    ParallelConfig."""
    check_refused({}, {}, environment, _NOT_WITH_ADAPTERS_ENVIRONMENT)
    splits = {name: int(getattr(parallel, name, 1)) for name in _SPLITS}
    splits["experts"] = 2 if getattr(parallel, "enable_expert_parallel", False) else 1
    for name, number in splits.items():
        if number > 1:
            raise ValueError(f"{name} {number} cannot be used with adapters: how it cuts them is not verified")
