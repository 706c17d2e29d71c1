"""How fast a worker reads weights from two trainer ranks over shared memory, against plain copying.

Two real processes hold the rows of 400 bfloat16 tensors (1.0 GiB, the shapes of a small transformer), one half each.
Readers are processes too and copy straight into their own tensors: one that needs everything ("whole"), or the two
workers of a tensor-parallel engine, which read at the same time with half of the processors each ("tp2": half the rows
of some tensors, half the columns of others). The ceiling is torch's `copy_` of as many contiguous bytes by the same
processes with as many threads, measured in the same run, in turns with the copy itself; `extra_info` holds both medians
and their ratio, and what digesting the same bytes takes.
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
from ckpt_engine.core.offers import by_transport
from ckpt_engine.digest.boxes import digest_boxes
from ckpt_engine.host.facts import this_host
from ckpt_engine.source.held import HeldBox
from ckpt_engine.source.memory import MemorySource
from ckpt_engine.source.ways import PublishWish
from ckpt_engine.transport.base import Move
from ckpt_engine.transport.shared_memory.memory import SharedMemoryTransport
from ckpt_engine.v1.weights_pb2 import Region, SourceTable

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


def needed(name: str, shape: tuple[int, ...], worker: int, workers: int) -> Box:
    """The box that one of the tensor-parallel workers needs."""
    if workers == 1 or name.endswith("norm"):
        return whole(shape)
    axis = 1 if name.endswith((".o", ".down")) else 0
    part = shape[axis] // workers
    start, stop = [0, 0], list(shape)
    start[axis], stop[axis] = part * worker, part * (worker + 1)
    return Box(tuple(start), tuple(stop))


def offer(rank: int) -> None:
    """A trainer rank: prints its table in hex and waits for its input to end."""
    torch.manual_seed(rank)
    boxes = {name: rows(shape, rank) for name, shape in SHAPES.items()}
    held = [
        HeldBox(name, torch.randn(box.shape).bfloat16(), SHAPES[name], box.start) for name, box in sorted(boxes.items())
    ]
    source = MemorySource(lambda: held, host=this_host(), rank=rank, wish=PublishWish(snapshot=False, move=True))
    source.seal()
    print(source.table().SerializeToString().hex(), flush=True)
    sys.stdin.read()


@pytest.fixture(scope="module")
def tables() -> Iterator[list[SourceTable]]:
    """The tables of two live trainer ranks."""
    ranks = [python("offer", str(rank)) for rank in range(RANKS)]
    try:
        yield [SourceTable.FromString(bytes.fromhex(hear(process))) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait(timeout=30)


def moves_to(destinations: dict[str, torch.Tensor], boxes: dict[str, Box], tables: list[SourceTable]) -> list[Move]:
    """What the plan would say: each source's part of each needed box, straight to where it belongs."""
    moves = []
    for table in tables:
        for shard in table.shards:
            spec = table.tensors[shard.tensor]
            target = boxes[spec.name]
            box = intersect(Box(tuple(shard.start), tuple(shard.stop)), target)
            if box is None:
                continue
            skipped = sum((a - b) * s for a, b, s in zip(box.start, shard.start, shard.stride, strict=True))
            part = tuple(slice(a - t, b - t) for a, b, t in zip(box.start, box.stop, target.start, strict=True))
            region = _regions(table)[shard.region]
            destination = destinations[spec.name][part]
            moves.append(
                Move(region, shard.offset + 2 * skipped, box.shape, tuple(shard.stride), spec.dtype, destination)
            )
    return moves


def _regions(table: SourceTable) -> list[Region]:
    return [by_transport(region)["shared_memory"] for region in table.regions]


def read(worker: int, workers: int, threads: int) -> None:
    """A reader: takes the tables from its input, then does what each line says and answers with seconds or facts."""
    torch.set_num_threads(threads)
    tables = [SourceTable.FromString(bytes.fromhex(sys.stdin.readline())) for _ in range(RANKS)]
    boxes = {name: needed(name, shape, worker, workers) for name, shape in SHAPES.items()}
    destinations = {name: torch.zeros(box.shape, dtype=torch.bfloat16) for name, box in boxes.items()}
    transport = SharedMemoryTransport()
    opened = transport.open(list(chain.from_iterable(map(_regions, tables))))
    moves = moves_to(destinations, boxes, tables)
    began = time.perf_counter()
    prepared = opened.prepare(moves)
    prepare_seconds = time.perf_counter() - began
    source, target = (torch.ones(prepared.bytes, dtype=torch.uint8).view(torch.int16) for _ in range(2))
    work = {
        "copy": prepared.run,
        "ceiling": lambda: target.copy_(source),
        "digest": lambda: digest_boxes([(destinations[name], box.start) for name, box in boxes.items()]),
        "check": lambda: None,
    }
    print(f"{prepared.bytes} {len(moves)} {prepare_seconds}", flush=True)
    for line in sys.stdin:
        work[line.strip()]()
        if line.strip() == "check":
            assert all(tensor.any() for tensor in destinations.values()), "some tensor received nothing"
        print("done", flush=True)


class Readers:
    """The readers of one engine, which do everything at the same time."""

    def __init__(self, tables: list[SourceTable], workers: int) -> None:
        self.threads = max(1, torch.get_num_threads() // workers)
        arguments = [str(workers), str(self.threads)]
        self._processes = [python("read", str(worker), *arguments) for worker in range(workers)]
        for process in self._processes:
            for table in tables:
                say(process, table.SerializeToString().hex())
        facts = [hear(process).split() for process in self._processes]
        self.bytes = sum(int(fact[0]) for fact in facts)
        self.pieces = sum(int(fact[1]) for fact in facts)
        self.prepare_seconds = max(float(fact[2]) for fact in facts)

    def do(self, what: str) -> float:
        """Seconds until the slowest has done it."""
        began = time.perf_counter()
        for process in self._processes:
            say(process, what)
        for process in self._processes:
            assert hear(process) == "done"
        return time.perf_counter() - began

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait(timeout=30)


def python(*arguments: str) -> subprocess.Popen[str]:
    """This module as a process that is spoken with by lines."""
    command = [sys.executable, "-m", "benchmarks.test_shared_memory", *arguments]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1]
    )


def say(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()


def hear(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, "the process has ended"
    return line.strip()


@pytest.mark.parametrize(("layout", "workers"), [("whole", 1), ("tp2", 2)])
def test_read_from_two_ranks(benchmark: BenchmarkFixture, tables: list[SourceTable], layout: str, workers: int) -> None:
    readers = Readers(tables, workers)
    try:
        ceilings: list[float] = []
        benchmark.pedantic(
            lambda: readers.do("copy"),
            setup=lambda: ceilings.append(readers.do("ceiling")),
            rounds=ROUNDS,
            warmup_rounds=1,
        )
        readers.do("check")
        digests = [readers.do("digest") for _ in range(4)]
    finally:
        readers.close()
    assert benchmark.stats is not None
    taken, best, digest_seconds = benchmark.stats.stats.median, median(ceilings[1:]), median(digests[1:])
    benchmark.extra_info.update(
        gibibytes=round(readers.bytes / 2**30, 3),
        pieces=readers.pieces,
        processes=workers,
        threads_each=readers.threads,
        prepare_milliseconds=round(readers.prepare_seconds * 1e3, 1),
        copy_milliseconds=round(taken * 1e3, 1),
        copy_gigabytes_per_second=round(readers.bytes / taken / 1e9, 2),
        ceiling_gigabytes_per_second=round(readers.bytes / best / 1e9, 2),
        share_of_ceiling=round(best / taken, 3),
        digest_gigabytes_per_second=round(readers.bytes / digest_seconds / 1e9, 2),
    )


if __name__ == "__main__":
    if sys.argv[1] == "offer":
        offer(int(sys.argv[2]))
    else:
        read(*(int(argument) for argument in sys.argv[2:]))
