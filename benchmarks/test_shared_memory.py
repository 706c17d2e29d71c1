"""How fast a worker reads weights from two trainer ranks over shared memory, against plain copying.

Two real processes hold the rows of 400 bfloat16 tensors (1.0 GiB, the shapes of a small transformer), one half each.
One reader copies them straight into its own tensors: all of them ("whole"), or what the first of two tensor-parallel
workers needs ("tp2": half the rows of some, half the columns of others). The ceiling is torch's `copy_` of as many
contiguous bytes with as many threads, measured in the same run, in turns with the copy itself; `extra_info` holds both
medians and their ratio, and what digesting the same bytes takes.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from statistics import median

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from ckpt_engine.core.boxes import Box, intersect, whole
from ckpt_engine.core.digest import digest_boxes
from ckpt_engine.source.held import Held
from ckpt_engine.source.memory import MemorySource
from ckpt_engine.transport.base import Move
from ckpt_engine.transport.host import this_host
from ckpt_engine.transport.shared_memory import SharedMemoryTransport
from ckpt_engine.v1.weights_pb2 import SourceTable

LAYERS = 50
RANKS = 2
ROUNDS = 7
LAYER = {
    "q": (1024, 1024),
    "k": (256, 1024),
    "v": (256, 1024),
    "o": (1024, 1024),
    "gate": (2656, 1024),
    "up": (2656, 1024),
    "down": (1024, 2656),
    "norm": (1024,),
}
SHAPES = {f"layers.{layer}.{name}": shape for layer in range(LAYERS) for name, shape in LAYER.items()}


def rows(shape: tuple[int, ...], rank: int) -> Box:
    """The rows of a tensor that a trainer rank holds."""
    half = shape[0] // RANKS
    return Box((half * rank, *(0 for _ in shape[1:])), (half * (rank + 1), *shape[1:]))


def needed(name: str, shape: tuple[int, ...], layout: str) -> Box:
    """The box that the reader needs."""
    if layout == "whole" or name.endswith("norm"):
        return whole(shape)
    if name.endswith((".o", ".down")):
        return Box((0, 0), (shape[0], shape[1] // 2))
    return Box((0, 0), (shape[0] // 2, shape[1]))


def offer(rank: int) -> None:
    """A trainer rank: prints its table in hex and waits for its input to end."""
    torch.manual_seed(rank)
    boxes = {name: rows(shape, rank) for name, shape in SHAPES.items()}
    held = [
        Held(name, torch.randn(box.shape).bfloat16(), SHAPES[name], box.start) for name, box in sorted(boxes.items())
    ]
    source = MemorySource(lambda: held, host=this_host(), rank=rank, snapshot=False)
    source.seal()
    print(source.table().SerializeToString().hex(), flush=True)
    sys.stdin.read()


@pytest.fixture(scope="module")
def tables() -> Iterator[list[SourceTable]]:
    """The tables of two live trainer ranks."""
    command = [sys.executable, "-m", "benchmarks.test_shared_memory"]
    ranks = [
        subprocess.Popen(
            [*command, str(rank)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[1],
        )
        for rank in range(RANKS)
    ]
    try:
        outputs = [process.stdout.readline() for process in ranks if process.stdout is not None]
        yield [SourceTable.FromString(bytes.fromhex(line)) for line in outputs]
    finally:
        for process in ranks:
            process.kill()
            process.wait(timeout=30)


def moves_to(destinations: dict[str, torch.Tensor], tables: list[SourceTable], layout: str) -> list[Move]:
    """What the plan would say: each source's part of each needed box, straight to where it belongs."""
    moves = []
    for table in tables:
        for shard in table.shards:
            spec = table.tensors[shard.tensor]
            target = needed(spec.name, tuple(spec.shape), layout)
            box = intersect(Box(tuple(shard.start), tuple(shard.stop)), target)
            if box is None:
                continue
            skipped = sum((a - b) * s for a, b, s in zip(box.start, shard.start, shard.stride, strict=True))
            part = tuple(slice(a - t, b - t) for a, b, t in zip(box.start, box.stop, target.start, strict=True))
            region = table.regions[shard.region]
            destination = destinations[spec.name][part]
            moves.append(
                Move(region, shard.offset + 2 * skipped, box.shape, tuple(shard.stride), spec.dtype, destination)
            )
    return moves


@pytest.mark.parametrize("layout", ["whole", "tp2"])
def test_read_from_two_ranks(benchmark: BenchmarkFixture, tables: list[SourceTable], layout: str) -> None:
    destinations = {
        name: torch.zeros(needed(name, shape, layout).shape, dtype=torch.bfloat16) for name, shape in SHAPES.items()
    }
    transport = SharedMemoryTransport()
    began = time.perf_counter()
    opened = transport.open(list(chain.from_iterable(table.regions for table in tables)))
    open_seconds = time.perf_counter() - began
    moves = moves_to(destinations, tables, layout)
    began = time.perf_counter()
    prepared = opened.prepare(moves)
    prepare_seconds = time.perf_counter() - began

    source, target = (torch.ones(prepared.bytes, dtype=torch.uint8).view(torch.int16) for _ in range(2))
    ceilings: list[float] = []

    def ceiling() -> None:
        start = time.perf_counter()
        target.copy_(source)
        ceilings.append(time.perf_counter() - start)

    benchmark.pedantic(prepared.run, setup=ceiling, rounds=ROUNDS, warmup_rounds=1)
    assert sum(tensor.numel() * 2 for tensor in destinations.values()) == prepared.bytes
    assert all(tensor.any() for tensor in destinations.values())

    boxes = [(tensor, needed(name, SHAPES[name], layout).start) for name, tensor in destinations.items()]
    began = time.perf_counter()
    digest_boxes(boxes)
    digest_seconds = time.perf_counter() - began
    taken, best = benchmark.stats.stats.median, median(ceilings[1:])
    benchmark.extra_info.update(
        gibibytes=round(prepared.bytes / 2**30, 3),
        pieces=len(moves),
        threads=torch.get_num_threads(),
        open_milliseconds=round(open_seconds * 1e3, 1),
        prepare_milliseconds=round(prepare_seconds * 1e3, 1),
        copy_milliseconds=round(taken * 1e3, 1),
        copy_gigabytes_per_second=round(prepared.bytes / taken / 1e9, 2),
        ceiling_gigabytes_per_second=round(prepared.bytes / best / 1e9, 2),
        share_of_ceiling=round(best / taken, 3),
        digest_gigabytes_per_second=round(prepared.bytes / digest_seconds / 1e9, 2),
    )
    opened.close()


if __name__ == "__main__":
    offer(int(sys.argv[1]))
