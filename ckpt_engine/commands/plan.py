"""``ckpt-engine plan``: predicts an update of a model on a cluster, without the cluster."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from ckpt_engine.commands.choices import Dtype, GpuLink, Policy, TrainerMemory, Until
from ckpt_engine.commands.engine_choice import Engine
from ckpt_engine.commands.progress import refusal_exit
from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.core.stage_memory import NONE
from ckpt_engine.engine.kinds import DEFAULT, UnknownAdapterError


def plan(
    model: Annotated[
        Path, typer.Argument(help="A model's config.json, its directory, or its safetensors files or index.")
    ],
    trainer: Annotated[
        str,
        typer.Option(
            metavar="LAYOUT",
            help="fsdp=N, or tp=N,pp=N,ep=N; either with ,dp=N for copies of the model; or files, for a checkpoint.",
        ),
    ] = "fsdp=1",
    replicas: Annotated[int, typer.Option(min=1, help="Number of replicas.")] = 1,
    engine: Annotated[Engine, typer.Option(help="Engine of the replicas.")] = DEFAULT,
    tp: Annotated[int, typer.Option(min=1, help="Tensor parallelism of a replica.")] = 1,
    pp: Annotated[int, typer.Option(min=1, help="Pipeline parallelism of a replica.")] = 1,
    ep: Annotated[int, typer.Option(min=1, help="Expert parallelism: so many groups of its tp workers.")] = 1,
    dtype: Annotated[Dtype | None, typer.Option(help="Dtype of served weights. Default: the files'.")] = None,
    trainer_memory: Annotated[TrainerMemory, typer.Option(help="Where the trainer's weights lie.")] = TrainerMemory.GPU,
    cpu: Annotated[bool, typer.Option("--cpu", help="Workers have no GPUs.")] = False,
    trainer_hosts: Annotated[
        int | None, typer.Option(min=1, help="Hosts of the trainer's ranks. Default: as few as possible.")
    ] = None,
    hosts: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Hosts of the replicas, none of them the trainer's. Default: the trainer's hosts, if their GPUs "
            "suffice; else as few as possible.",
        ),
    ] = None,
    same_gpus: Annotated[bool, typer.Option("--same-gpus", help="Workers are on the trainer's GPUs.")] = False,
    gpus_per_host: Annotated[int, typer.Option(min=1, help="GPUs that a host has.")] = 8,
    gpu_link: Annotated[GpuLink, typer.Option(help="How GPUs of a host reach each other.")] = GpuLink.NVLINK,
    network: Annotated[
        str, typer.Option(metavar="RATE", help="Rate of each host's network, such as 100Gbit/s. Default: 5.6GB/s.")
    ] = "",
    relays: Annotated[bool, typer.Option("--relays/--no-relays", help="A relay on each host.")] = True,
    everything: Annotated[bool, typer.Option("--everything", help="Relays hold the whole model.")] = False,
    relay_memory: Annotated[str, typer.Option(metavar="SIZE", help="Memory of each relay, such as 200GiB.")] = "",
    host_memory: Annotated[str, typer.Option(metavar="SIZE", help="Memory of each host, such as 2TiB.")] = "",
    stage_memory: Annotated[
        str,
        typer.Option(metavar="SIZE|auto|0", help="Stage memory of each worker; auto: as much as a version wants."),
    ] = NONE,
    prefetch: Annotated[
        Policy, typer.Option(help="Whether relays bring the weights before anything is paused.")
    ] = Policy.AUTO,
    until: Annotated[Until, typer.Option(help="When the trainer's call returns.")] = Until.INSTALLED,
    rates: Annotated[Path | None, typer.Option(help="A JSON file of rates that you measured: docs/plan.md.")] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print every edge, as one JSON object.")] = False,
) -> None:
    """Predict an update: bytes of each edge, memory, seconds, and what is impossible.

    Needs no GPU, no engine and no manager: the manager's own planner works on shapes and layouts.

    ckpt-engine plan Qwen3-8B/config.json --trainer fsdp=4 --replicas 2 --tp 2

    ckpt-engine plan DeepSeek-V3 --trainer fsdp=256 --replicas 64 --tp 8 --ep 8 --network 400Gbit/s --host-memory 3TiB

    Exits with 1 if something is impossible, and says why.
    """
    from ckpt_engine.planning.foresight import foresee
    from ckpt_engine.planning.question import PlanOptions, question_of, rates_of, setting_of
    from ckpt_engine.planning.record import as_json
    from ckpt_engine.planning.update import plan_update
    from ckpt_engine.planning.words import as_text

    options = PlanOptions(
        model=model,
        trainer=trainer,
        replicas=replicas,
        engine=engine,
        tp=tp,
        pp=pp,
        ep=ep,
        dtype="" if dtype is None else dtype.value,
        trainer_memory=trainer_memory.value,
        cpu=cpu,
        trainer_hosts=trainer_hosts,
        hosts=hosts,
        same_gpus=same_gpus,
        gpus_per_host=gpus_per_host,
        gpu_link=gpu_link.value,
        network=network,
        relays=relays,
        everything=everything,
        relay_memory=relay_memory,
        host_memory=host_memory,
        stage_memory=stage_memory,
        prefetch=prefetch.value,
        until=until.value,
        rates=rates,
    )
    try:
        question, link_rates = question_of(options), rates_of(options)
        answer = plan_update(question)
        forecast = foresee(answer, link_rates, options.engine, until is Until.HELD)
        setting = setting_of(options, question)
    except CkptEngineError as error:
        raise refusal_exit("plan", error, json_output) from error
    except UnknownAdapterError as error:
        raise typer.BadParameter(str(error), param_hint="--engine") from error
    typer.echo(json.dumps(as_json(answer, forecast, setting)) if json_output else as_text(answer, forecast, setting))
    if answer.impossible:
        raise typer.Exit(1)
