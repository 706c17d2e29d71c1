"""Makes a question to plan from the options of a command line: layouts, places and sizes, checked together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from ckpt_engine.core.arguments import choice
from ckpt_engine.core.json_text import load_json
from ckpt_engine.core.names import some
from ckpt_engine.core.prediction import Rates
from ckpt_engine.core.problems import invalid, not_found
from ckpt_engine.core.sizes import bytes_of, rate_of
from ckpt_engine.core.stage_memory import NONE, stage_bytes
from ckpt_engine.core.transports import is_collective
from ckpt_engine.engine.adapter import load_adapter
from ckpt_engine.engine.kinds import DEFAULT, engine_kind
from ckpt_engine.options import PREFETCH, UNTIL
from ckpt_engine.planning import foresight
from ckpt_engine.planning.model import Model, read_model
from ckpt_engine.planning.places import Cluster, place
from ckpt_engine.planning.roles import role_of
from ckpt_engine.planning.splits import VOCABULARY_MULTIPLE, Fsdp, Parallel, Split, parallel
from ckpt_engine.planning.update import Holding, PlanQuestion

FILES = "files"
MOST = 8192
"""Most ranks, and most workers in all: a plan of more would take minutes, and say nothing new."""

MOST_GPUS = 64
"""Most GPUs of a host."""


@dataclass(frozen=True)
class PlanOptions:
    """The options of `ckpt-engine plan`, with texts as they were typed."""

    model: Path
    trainer: str = "fsdp=1"
    replicas: int = 1
    engine: str = DEFAULT
    tp: int = 1
    pp: int = 1
    ep: int = 1
    dtype: str = ""
    trainer_memory: str = "gpu"
    cpu: bool = False
    trainer_hosts: int | None = None
    hosts: int | None = None
    same_gpus: bool = False
    gpus_per_host: int = 8
    gpu_link: str = "nvlink"
    network: str = ""
    relays: bool = True
    everything: bool = False
    relay_memory: str = ""
    host_memory: str = ""
    stage_memory: str = NONE
    prefetch: str = "auto"
    until: str = "installed"
    rates: Path | None = None


def question_of(options: PlanOptions) -> PlanQuestion:
    """Makes a question of options. Raises INVALID_ARGUMENT or NOT_FOUND if they make no plan."""
    _check(options)
    model = read_model(options.model, options.dtype or None)
    if options.trainer == FILES and model.quantised:
        raise invalid(
            f"--trainer files: config.json is of a checkpoint that is quantised ({model.quantised}), and does not say "
            "how large its files are: give the directory with its safetensors files, or name a trainer's layout"
        )
    trainer = _trainer(options.trainer, model)
    replica = _replica(options, model)
    for what, count in (("--trainer", trainer.count), ("--replicas", options.replicas * replica.count)):
        if count > MOST:
            raise invalid(f"{what}: {count} processes in all are more than the {MOST} that are planned for")
    holding = cast(Holding, "files" if options.trainer == FILES else options.trainer_memory)
    return PlanQuestion(
        model=model,
        trainer=trainer,
        replica=replica,
        replicas=options.replicas,
        cluster=_cluster(options, trainer, replica, holding),
        holding=holding,
        readers="host" if options.cpu else "gpu",
        relays=options.relays,
        everything=options.everything,
        prefetch=choice("--prefetch", options.prefetch, PREFETCH),
        until=choice("--until", options.until, UNTIL),
        relay_memory=bytes_of(options.relay_memory, "--relay-memory") if options.relay_memory else None,
        host_memory=bytes_of(options.host_memory, "--host-memory") if options.host_memory else None,
        stage_memory=stage_bytes(options.stage_memory),
    )


def rates_of(options: PlanOptions) -> Rates:
    """The rates for predictions. Raises INVALID_ARGUMENT or NOT_FOUND for a file without valid rates."""
    network = rate_of(options.network, "--network") if options.network else None
    content: object | None = None
    if options.rates is not None:
        if not options.rates.is_file():
            raise not_found(f"--rates: {options.rates} is not a file; docs/plan.md shows what it has")
        try:
            content = load_json(options.rates.read_text())
        except (OSError, ValueError) as error:
            raise invalid(f"--rates: {options.rates} cannot be read as JSON: {error}") from error
    return foresight.rates_of(content, options.engine, network, options.replicas)


def setting_of(options: PlanOptions, question: PlanQuestion) -> Mapping[str, str]:
    """The setting of a plan in words, by topic, with the assumptions about what is not known here."""
    trainer, replica, cluster = question.trainer, question.replica, question.cluster
    ranks, seats = {place.host for place in cluster.ranks}, {place.host for each in cluster.workers for place in each}
    where = {"gpu": "on GPUs", "host": "in memory of the host", "files": "in files"}[question.holding]
    links = {"nvlink": "NVLink", "pcie": "PCIe", "none": "nothing"}
    parts = (("tp", options.tp), ("pp", options.pp), ("ep", options.ep))
    layout = ", ".join(f"{name}={count}" for name, count in parts if count > 1 or name == "tp")
    owner = "of the trainer's" if seats <= ranks else "of their own"
    on = "the trainer's GPUs" if options.same_gpus else f"{_count(len(seats), 'host')} {owner}"
    reach = f"{_count(cluster.gpus, 'GPU')} a host, which reach each other over {links[cluster.link]}"
    gpus = "no GPUs" if options.cpu else reach
    return {
        "trainer": f"{options.trainer}: {_count(trainer.count, 'rank')} on {_count(len(ranks), 'host')}, "
        f"weights {where}, sealed where they lie (nothing is copied or cast; on a CPU that takes move=True)",
        "replicas": f"{options.replicas} of {options.engine} {layout}: {_count(replica.count, 'worker')} each, "
        f"on {on}; {gpus}",
        "needs": "what each worker reads follows from rules for tensor names, not from the engine's own loader, which "
        "is recorded when a replica is prepared",
        "relays": "one on each host" if question.relays else "none",
        **_counted_whole(options, question.model),
    }


def _counted_whole(options: PlanOptions, model: Model) -> Mapping[str, str]:
    """Names matrices that no rule can split, if workers split any."""
    names = [each.name for each in model.tensors if not role_of(each.name, len(each.shape)).known]
    if not names or options.tp == 1:
        return {}
    return {"counted whole in each worker": f"{some(names)}, which no rule splits; an engine may"}


def _count(number: int, name: str) -> str:
    return f"{number} {name}{'s' * (number > 1)}"


def _check(options: PlanOptions) -> None:
    for option, number in (
        ("--replicas", options.replicas),
        ("--tp", options.tp),
        ("--pp", options.pp),
        ("--ep", options.ep),
        ("--gpus-per-host", options.gpus_per_host),
    ):
        if number < 1:
            raise invalid(f"{option} must be at least 1, got {number}")
    if options.cpu and options.trainer_memory == "gpu" and options.trainer != FILES:
        raise invalid("--cpu: workers without GPUs read no GPU memory; add --trainer-memory host, or leave --cpu out")
    if options.same_gpus and (options.hosts is not None or options.cpu or options.trainer == FILES):
        raise invalid("--same-gpus puts workers on the trainer's GPUs: leave out --hosts and --cpu, and name a trainer")
    if is_collective(options.trainer_memory):
        raise invalid("collectives are not planned for; see docs/collective.md")
    if options.gpus_per_host > MOST_GPUS:
        raise invalid(f"--gpus-per-host {options.gpus_per_host}: a host has {MOST_GPUS} at most")


def _trainer(text: str, model: Model) -> Split:
    """Parses a trainer's layout: "fsdp=8", "fsdp=8,dp=2", "tp=4,pp=2,ep=4", "files"."""
    if text == FILES:
        return Fsdp(1)
    counts: dict[str, int] = {}
    for part in text.split(","):
        name, _, number = part.strip().partition("=")
        if name not in ("fsdp", "tp", "pp", "ep", "dp") or not number.isdecimal() or not int(number) or name in counts:
            raise invalid(
                f"--trainer {text!r}: write fsdp=N, or tp=N with pp=N and ep=N, either with dp=N for copies of it all; "
                "or files, for a directory of safetensors files"
            )
        counts[name] = int(number)
    if "fsdp" in counts:
        others = sorted(counts.keys() & {"tp", "pp", "ep"})
        if others:
            raise invalid(f"--trainer {text!r}: fsdp together with {' and '.join(others)} is not planned for; name one")
        return Fsdp(counts["fsdp"], counts.get("dp", 1))
    tensor, pipeline, experts, copies = (counts.get(name, 1) for name in ("tp", "pp", "ep", "dp"))
    if tensor % experts and tensor * copies % experts == 0:
        raise invalid(
            f"--trainer {text!r}: expert parallelism wider than tp is not planned for (Megatron deals experts to "
            f"tp * dp ranks): for a plan of all but that, name an ep that divides tp={tensor}"
        )
    return parallel("trainer", model, tensor, pipeline, experts, copies, 1, False)


def _replica(options: PlanOptions, model: Model) -> Parallel:
    able = load_adapter(options.engine).CAPABILITIES.layouts
    for name, count in (("tp", options.tp), ("pp", options.pp), ("ep", options.ep)):
        if count > 1 and name.upper() not in able:
            raise invalid(
                f"--{name} {count}: ckpt-engine drives {options.engine} with {', '.join(able)} only "
                f"(`ckpt-engine engines {options.engine}`)"
            )
    kind = engine_kind(options.engine)
    layout = kind.layout
    if layout.experts_fill_stages and options.ep not in (1, options.tp):
        raise invalid(
            f"--ep {options.ep}: {kind.title} deals experts to all workers of a stage, so --ep is 1 or as --tp "
            f"({options.tp})"
        )
    if options.tp > 1 and model.heads is None:
        raise invalid(
            f"--tp {options.tp}: put the model's config.json beside its files, which says how many heads it has"
        )
    multiple = VOCABULARY_MULTIPLE * options.tp if layout.vocabulary_for_workers else VOCABULARY_MULTIPLE
    split = parallel("replicas", model, options.tp, options.pp, options.ep, 1, multiple, layout.repeats_heads)
    return replace(split, everywhere=model.architecture in layout.vocabulary_on_each_stage)


def _cluster(options: PlanOptions, trainer: Split, replica: Split, holding: Holding) -> Cluster:
    for option, number in (("--hosts", options.hosts), ("--trainer-hosts", options.trainer_hosts)):
        if number is not None and number < 1:
            raise invalid(f"{option} must be at least 1, got {number}")
    return place(
        trainer.count,
        options.replicas,
        replica.count,
        gpus=options.gpus_per_host,
        link=options.gpu_link,
        trainer_hosts=options.trainer_hosts,
        replica_hosts=options.hosts,
        shared_gpus=options.same_gpus,
        rank_gpus=holding == "gpu",
        worker_gpus=not options.cpu,
    )
