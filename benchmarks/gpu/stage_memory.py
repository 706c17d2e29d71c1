"""Updates by way of the host's relay, with stage memory in the workers and without, in one run: what the pause covers.

    python -m benchmarks.gpu.stage_memory -o FILE                    # a GPU with vLLM (room for three servers: an H200)
    python -m benchmarks.gpu.stage_memory -o FILE --only whole none  # two of them
    python -m benchmarks.gpu.stage_memory -o FILE --engine reference --cpu --streams 4   # a small model

Three servers share GPU 0 with the trainer: `none` has no stage memory, `whole` has room for the version, `half` for
half of it. Each is updated alone, without clients and under streams, in pause mode `in_place`, as in under_load.py,
which says what most numbers are; then some times with `until="held"`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.gpu.clients_view import FIELDS
from benchmarks.gpu.measure import CopyCeiling, Series, rounded, versions
from benchmarks.gpu.qwen3_8b import BYTES, Tree, renew, write_config
from benchmarks.gpu.under_load import (
    ABOUT,
    RELAY_BYTES,
    UP_SECONDS,
    Load,
    Server,
    World,
    loaded,
    relays_below,
    steps_of,
    touching,
)
from ckpt_engine import Trainer
from ckpt_engine.core.prediction import PAUSED
from ckpt_engine.v1 import manager_pb2
from tests.cluster import Cluster, Replica, running_cluster
from tests.gpu.gpu_server import start_gpu_vllm
from tests.tiny_model import make_tiny_qwen3

SHARES = {"none": 0.0, "whole": 1.0, "half": 0.5}
"""Servers, and how much of a version their stage memory holds."""

SLACK = 1.02
"""Of stage memory, for what alignment takes."""

SECONDS = 120.0
HELD = 5
"""Updates of each server with `until="held"`."""

FIELDS_HERE = FIELDS | {
    "early_bytes, early_seconds": "of each update: what lay in stage memory before the pause, and what that took",
    "staging_rate": "tokens a second of all streams while workers brought into stage memory, by the quiet rate",
    "held_seconds, held_pause_seconds": 'of updates with until="held", without clients: until the call returned; the '
    "pause that followed",
    "half_as_predicted": "the pause of half, by the mean of the two others",
}


@dataclass
class Updates:
    """Makes updates of one server, and keeps when its workers brought into stage memory."""

    trainer: Trainer
    replica: Replica
    size: int
    windows: list[tuple[float, float]] = field(default_factory=list)
    """Begin and end, on the clock of the clients."""

    def update(self) -> dict[str, float]:
        """One by way of the relay; its seconds."""
        began = time.perf_counter()
        report = self.trainer.update_weights(
            timeout=SECONDS, prefetch="always", pause_mode="in_place", replicas=[self.replica.name]
        )
        end = time.perf_counter()
        assert report.ok, f"{report}\n{self.replica.tail()}"
        assert report.verified
        assert report.nbytes == self.size, f"{report.nbytes} of {self.size} bytes: {report}"
        (outcome,) = report.replicas
        assert {use.transport for use in outcome.transports} == {"relay_memory"}, outcome.transports
        entered = {each.stage: each.after for each in outcome.message.entered}
        begun = end - outcome.sync_seconds
        if manager_pb2.STAGE_READY in entered:
            self.windows.append((begun + entered[manager_pb2.STAGE_READY], begun + entered[manager_pb2.STAGE_QUIESCE]))
        workers = outcome.message.workers
        staged = sum(outcome.stages.get(stage, 0.0) for stage in PAUSED)
        return {
            "pause_seconds": outcome.pause_seconds,
            "call_seconds": end - began,
            "report_seconds": report.seconds,
            "sync_seconds": outcome.sync_seconds,
            "early_bytes": float(sum(worker.early_bytes for worker in workers)),
            "early_seconds": max(worker.early_seconds for worker in workers),
            **{f"stage_{name}": value for name, value in outcome.stages.items()},
            "rest_of_pause_seconds": outcome.pause_seconds - staged,
            **steps_of(report),
        }

    def held(self) -> dict[str, float]:
        """One whose call returns when the relay holds the version; its seconds."""
        began = time.perf_counter()
        held = self.trainer.update_weights(
            timeout=SECONDS, prefetch="always", until="held", pause_mode="in_place", replicas=[self.replica.name]
        )
        seconds = time.perf_counter() - began
        assert held.held, str(held)
        report = self.trainer.wait(held.version, timeout=SECONDS)
        assert report.ok, f"{report}\n{self.replica.tail()}"
        return {"held_seconds": seconds, "held_pause_seconds": report.replicas[0].pause_seconds}


@contextlib.contextmanager
def world_of(path: Path, names: list[str], cpu: bool, reference: bool) -> Iterator[tuple[World, dict[str, Updates]]]:
    """The servers, all started at once, and what updates them."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(relays_below(path))
        cluster = stack.enter_context(running_cluster(path / "cluster"))
        model: torch.nn.Module
        if cpu:
            model = make_tiny_qwen3(path / "model", 1, weights=False)
            config, memory = path / "model", "64MB"
        else:
            config, memory = write_config(path / "model"), f"{RELAY_BYTES}B"
        size = sum(parameter.nbytes for parameter in model.parameters()) if cpu else BYTES
        start = _started_reference(cpu) if reference else _started_vllm
        replicas = {}
        for name in names:
            stage = f"{int(SHARES[name] * SLACK * size)}B" if SHARES[name] else "0"
            replicas[name] = start(cluster, name, config, ("--stage-memory", stage))
        threads = {"OMP_NUM_THREADS": str(min(16, len(os.sched_getaffinity(0))))}
        relay = cluster.relay("a", "--deltas", "never", "--memory", memory, environment=threads)
        if not cpu:
            model = Tree("cuda:0")
            renew(model, 1)
        for replica in replicas.values():
            replica.registered(UP_SECONDS)
        relay.registered()
        trainer = stack.enter_context(Trainer(cluster.address, lineage="stage-memory"))
        trainer.publish(model, move=True)
        updates = {name: Updates(trainer, replica, size) for name, replica in replicas.items()}
        servers = [Server(name, replicas[name].url, each.update, replicas[name].tail) for name, each in updates.items()]
        about: dict[str, Any] = {"bytes": size, "stage_memory": {name: SHARES[name] for name in names}}
        if not cpu:
            about |= {
                "host_to_device_GB_s": CopyCeiling("cpu", "cuda:0", 2 << 30).sustained(),
                "copy_ceiling_GB_s": CopyCeiling("cuda:0", "cuda:0", 2 << 30).sustained(),
                "versions": versions("vllm"),
            }
        yield World(servers, touching(model), str(config) if reference else "tiny", about), updates


Start = Callable[[Cluster, str, Path, tuple[str, ...]], Replica]


def _started_vllm(cluster: Cluster, name: str, config: Path, options: tuple[str, ...]) -> Replica:
    return start_gpu_vllm(cluster, name, config, options=options, visible="0")


def _started_reference(cpu: bool) -> Start:
    def start(cluster: Cluster, name: str, config: Path, options: tuple[str, ...]) -> Replica:
        arguments = () if cpu else ("--device", "cuda")
        return cluster.replica(name, "reference", config, *arguments, options=options)

    return start


def staging_rate(requests: list[Mapping[str, Any]], windows: list[tuple[float, float]], quiet: float) -> float:
    """Tokens a second that came in the windows, by the quiet rate; 0 without windows."""
    seconds = sum(end - begin for begin, end in windows)
    tokens = sum(
        count
        for request in requests
        for when, count in request["tokens"]
        if any(begin < when <= end for begin, end in windows)
    )
    return tokens / seconds / quiet if seconds else 0.0


def measured(server: Server, updates: Updates, world: World, load: Load, path: Path) -> dict[str, Any]:
    """One server's numbers: see FIELDS_HERE, and under_load's ABOUT."""
    found = loaded(server, world, load, path)
    requests = json.loads((path / f"{server.name}.requests.json").read_text())
    found["staging_rate"] = staging_rate(requests, updates.windows[-load.updates :], found["rate"]["both"])
    held = Series()
    for seed in range(1, HELD + 1):
        world.touch(1000 + seed)
        held.add(**updates.held())
    return rounded(found | {"held": held.last(HELD)})


def _print(name: str, found: dict[str, Any]) -> None:
    def told(what: str) -> str:
        return f"{found[what]['median']:.1f} (worst {max(found[what]['each']):.1f})"

    def both(what: str) -> str:
        idle, busy = found["idle"][what], found["loaded"][what]
        return f"idle {1e3 * idle['median']:.1f} (worst {1e3 * idle['worst']:.1f}), loaded {1e3 * busy['median']:.1f}"

    print(
        f"RESULT {name}: pause {both('pause_seconds')} ms; lost {told('lost_milliseconds')} ms, near "
        f"{told('near_lost_milliseconds')} ms; worst gap {told('worst_gap_milliseconds')} ms, quiet "
        f"{told('quiet_worst_gap_milliseconds')} ms; rate while staging {found['staging_rate']:.4f} of "
        f"{found['rate']['both']:.0f} tokens/s; call {both('call_seconds')} ms; early {both('early_seconds')} ms, "
        f"{found['loaded']['early_bytes']['median'] / 1e9:.2f} GB; held "
        f"{1e3 * found['held']['held_seconds']['median']:.1f} ms, its pause "
        f"{1e3 * found['held']['held_pause_seconds']['median']:.1f} ms; requests {found['requests']}",
        flush=True,
    )
    for key, each in found["loaded"].items():
        if key.startswith(("stage_", "step", "rest")):
            idle = found["idle"].get(key, each)["median"]
            print(f"  {key}: {1e3 * each['median']:.1f} (idle {1e3 * idle:.1f}) ms", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--engine", choices=("vllm", "reference"), default="vllm")
    parser.add_argument("--cpu", action="store_true", help="a small model on the CPU, and the reference engine")
    parser.add_argument("--only", nargs="+", choices=tuple(SHARES), default=list(SHARES))
    for name, value in asdict(Load(updates=8, quiet=3.0, idle=11)).items():
        parser.add_argument(f"--{name}", type=type(value), default=value)
    options = parser.parse_args()
    if not options.cpu and not torch.cuda.is_available():
        parser.error("torch sees no GPU here; --cpu takes a small model without one")
    load = Load(**{name: getattr(options, name) for name in asdict(Load())})
    failed: list[str] = []
    with TemporaryDirectory(prefix="stage") as directory:
        path = Path(directory)
        reference = options.cpu or options.engine == "reference"
        with world_of(path, options.only, options.cpu, reference) as (world, updates):
            result: dict[str, Any] = {"about": world.about, "load": asdict(load), "fields": ABOUT | FIELDS_HERE}
            for server in world.servers:
                try:
                    result[server.name] = measured(server, updates[server.name], world, load, path)
                except (AssertionError, ValueError) as error:
                    failed.append(f"{server.name}: {error}")
                    result["failed"] = [each[:2000] for each in failed]
                else:
                    _print(server.name, result[server.name])
                options.output.write_text(json.dumps(result, indent=1) + "\n")
            if SHARES.keys() <= result.keys():
                pause = {name: result[name]["idle"]["pause_seconds"]["median"] for name in SHARES}
                result["half_as_predicted"] = 2 * pause["half"] / (pause["none"] + pause["whole"])
                print(f"RESULT half: {result['half_as_predicted']:.3f} of what is predicted", flush=True)
                options.output.write_text(json.dumps(result, indent=1) + "\n")
    assert not failed, "\n".join(failed)


if __name__ == "__main__":
    main()
