"""A checkpoint directory to replicas: straight from its files, and by way of the host's relay, against the ceiling of
the same run. `measure` is for a GPU and for a CPU; test_directory.py runs it on GPUs.

    python -m benchmarks.gpu.directory -o FILE           # Qwen3-8B's shapes, a reference replica on each of two GPUs
    python -m benchmarks.gpu.directory -o FILE --cpu     # 215 MB, one reference replica on the CPU

The files lie below --at (17 GB on GPUs; default: the temporary directory) and in the page cache. Before each update a
small file is written anew and the directory is published again, as a run's next checkpoint would be; all bytes are
brought and verified. The ceiling: contiguous copies, from pinned memory to all GPUs at once, or by `copy_` on as many
threads as the worker has. Replicas are reference engines, so pauses are ours alone.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.gpu.measure import Series, rounded, seconds_of, versions
from benchmarks.gpu.qwen3_8b import SHAPES, write_config
from ckpt_engine import Trainer
from ckpt_engine.host.relay_directory import DIRECTORY
from tests.cluster import Cluster, running_cluster
from tests.tiny_model import make_tiny_qwen3

AT = "CKPT_ENGINE_CHECKPOINT_AT"
"""Below which directory the checkpoint is written; else the temporary one."""

SMALL = "model.norm.weight"
"""In a file of its own, which is written anew for each version."""

FILE_BYTES = 4 << 30
MOST_GPUS = 2
BUFFER = 2 << 30
WAYS = {"files": ("never", "file"), "relay": ("always", "relay_memory")}
"""By name: `prefetch`, and the transport that then carries the bytes."""

FIELDS = {
    "share_of_ceiling": "GB_s_each by ceiling_GB_s, of medians; the bar on GPUs is 0.90",
    "GB_s_each": "bytes of one replica by its worker's transfer and install seconds, the slowest replica's",
    "ceiling_GB_s": "what each destination gets of contiguous copies to all at once, a copy before each update",
    "pause_seconds": "of the slowest replica",
    "publish_seconds, call_seconds": "publishing the directory; update_weights, with the digests of all files in it",
    "fill_seconds": "relay: the host's relay fills itself from the files, before any pause",
}


@dataclass(frozen=True)
class Place:
    """Where replicas hold weights: "cuda" on so many GPUs, or "cpu". threads: of every process."""

    device: str
    replicas: int
    threads: int
    memory: int
    """Of the relay, in bytes."""


GPUS = Place("cuda", MOST_GPUS, min(16, len(os.sched_getaffinity(0))), 31 << 30)
CPU = Place("cpu", 1, 1, 1 << 30)


def write_checkpoint(
    directory: Path, shapes: Mapping[str, Sequence[int]], make: Callable[[Sequence[int]], torch.Tensor]
) -> int:
    """Files of at most FILE_BYTES, and SMALL in one of its own. make: a tensor of a shape, on any device. Bytes."""
    directory.mkdir(parents=True)
    for number, names in enumerate(_files(shapes)):
        _save({name: make(shapes[name]).cpu() for name in names}, directory / f"model-{number:05}.safetensors")
    write_small(directory, shapes[SMALL], 0)
    return 2 * sum(torch.Size(shape).numel() for shape in shapes.values())


def write_small(directory: Path, shape: Sequence[int], seed: int) -> None:
    """SMALL with other values, put in place by renaming, as whoever saves checkpoints should."""
    values = torch.empty(tuple(shape)).normal_(1.0, 0.02, generator=torch.Generator().manual_seed(seed))
    part = directory / "small.part"
    _save({SMALL: values.bfloat16()}, part)
    part.replace(directory / "small.safetensors")


def _files(shapes: Mapping[str, Sequence[int]]) -> Iterable[list[str]]:
    names: list[str] = []
    size = 0
    for name, shape in shapes.items():
        if name == SMALL:
            continue
        more = 2 * torch.Size(shape).numel()
        if names and size + more > FILE_BYTES:
            yield names
            names, size = [], 0
        names.append(name)
        size += more
    yield names


def _save(tensors: dict[str, torch.Tensor], file: Path) -> None:
    from safetensors.torch import save_file

    save_file(tensors, file)


class Ceiling:
    """GB/s that each destination gets while all are written."""

    def __init__(self, place: Place, size: int) -> None:
        gpus = place.device == "cuda"
        self._size = size
        self._source = torch.empty(size, dtype=torch.uint8, pin_memory=gpus).fill_(3)
        self._targets = [
            torch.empty(size, dtype=torch.uint8, device=f"cuda:{number}" if gpus else "cpu").fill_(1)
            for number in range(place.replicas)
        ]
        self.once()

    def once(self) -> float:
        def work() -> None:
            for target in self._targets:
                target.copy_(self._source, non_blocking=True)

        seconds = seconds_of(work) if torch.cuda.is_available() else _wall(work)
        return self._size / seconds / 1e9


def _wall(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


@contextmanager
def world(path: Path, place: Place) -> Iterator[tuple[Cluster, Mapping[str, Sequence[int]]]]:
    """A manager, a relay, the replicas; and the model's shapes."""
    threads = {"OMP_NUM_THREADS": str(place.threads), DIRECTORY: str(path / "relays")}
    if place.device == "cuda":
        shapes: Mapping[str, Sequence[int]] = SHAPES
        config = write_config(path / "model")
    else:
        config = path / "model"
        sizes = {"layers": 12, "hidden": 1024, "intermediate": 2560, "vocabulary": 4096}
        model = make_tiny_qwen3(config, 1, weights=False, **sizes)
        shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    with running_cluster(path / "cluster") as cluster:
        for number in range(place.replicas):
            visible = {"CUDA_VISIBLE_DEVICES": str(number)} if place.device == "cuda" else {}
            device = ("--device", "cuda") if place.device == "cuda" else ()
            cluster.replica(f"r{number}", "reference", config, *device, environment={**threads, **visible})
        cluster.relay("a", "--deltas", "never", "--memory", f"{place.memory}B", environment=threads)
        yield cluster, shapes


def measure(path: Path, at: Path, place: Place, rounds: int, warmup: int = 2) -> dict[str, Any]:
    """See FIELDS. path: for logs and sockets. at: for the checkpoint."""
    gpus = place.device == "cuda"
    device = "cuda:0" if gpus else "cpu"
    found: dict[str, Any] = {"fields": FIELDS, "place": vars(place)}
    torch.set_num_threads(place.threads)
    with TemporaryDirectory(prefix="checkpoint", dir=at) as directory, world(path, place) as (cluster, shapes):
        checkpoint = Path(directory) / "checkpoint"

        def make(shape: Sequence[int]) -> torch.Tensor:
            return torch.empty(tuple(shape), dtype=torch.bfloat16, device=device).normal_(0.0, 0.02)

        began = time.perf_counter()
        size = write_checkpoint(checkpoint, shapes, make)
        found |= {"bytes": size, "write_seconds": time.perf_counter() - began}
        ceiling = Ceiling(place, min(BUFFER, size))
        cluster.relays[0].registered()
        for replica in cluster.replicas:
            replica.registered(240.0)
        seeds = itertools.count(1)
        for way, (prefetch, transport) in WAYS.items():
            series = Series()
            with Trainer(cluster.address, lineage=f"directory-{way}") as trainer:
                for _ in range(warmup + rounds):
                    write_small(checkpoint, shapes[SMALL], next(seeds))
                    series.add(ceiling_GB_s=ceiling.once())
                    series.add(**updated(trainer, cluster, checkpoint, size, prefetch, transport))
            share = series.median("GB_s_each", rounds) / series.median("ceiling_GB_s", rounds)
            found[way] = rounded({"share_of_ceiling": share, "first": series.first(), "medians": series.last(rounds)})
            print("RESULT directory", way, found[way], flush=True)
    found["versions"] = versions() if gpus else {"torch": torch.__version__}
    return rounded(found)


def updated(
    trainer: Trainer, cluster: Cluster, checkpoint: Path, size: int, prefetch: str, transport: str
) -> dict[str, float]:
    """One update from the directory as it is now."""
    began = time.perf_counter()
    trainer.publish(checkpoint)
    published = time.perf_counter()
    report = trainer.update_weights(prefetch=prefetch, timeout=240.0)
    ended = time.perf_counter()
    said = "\n".join(
        [report.details, *(replica.tail() for replica in cluster.replicas), cluster.relays[0].said[-3000:]]
    )
    assert report.ok, said
    assert report.verified, said
    assert {use.transport for each in report.replicas for use in each.transports} == {transport}, said
    assert all(each.nbytes == size for each in report.replicas), said
    workers = [worker for each in report.replicas for worker in each.message.workers]
    moved = max(worker.transfer_seconds + worker.install_seconds for worker in workers)
    fills = {"fill_seconds": report.relays[0].seconds} if transport == "relay_memory" else {}
    return {
        "GB_s_each": size / moved / 1e9,
        "moved_seconds": moved,
        "verify_seconds": max(worker.verify_seconds for worker in workers),
        "pause_seconds": max(each.pause_seconds for each in report.replicas),
        "publish_seconds": published - began,
        "call_seconds": ended - published,
        **fills,
        **{f"stage_{name}": value for name, value in report.stages.items()},
    }


def place_of(cpu: bool) -> Place:
    """What this host has of GPUs, two at most."""
    if cpu:
        return CPU
    return Place("cuda", min(MOST_GPUS, torch.cuda.device_count()), GPUS.threads, GPUS.memory)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--at", type=Path, default=Path(os.environ[AT]) if AT in os.environ else None)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    if not options.cpu and not torch.cuda.is_available():
        parser.error("torch sees no GPU here; --cpu takes a small model without one")
    with TemporaryDirectory(prefix="run") as directory:
        place = place_of(options.cpu)
        # for this process, too, which publishes beside the relay
        os.environ[DIRECTORY] = str(Path(directory) / "relays")
        found = measure(Path(directory), options.at or Path(directory), place, options.rounds)
    options.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
