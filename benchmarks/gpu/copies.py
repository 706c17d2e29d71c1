"""How fast DeviceCopy is, beside plain copies of the same bytes: `python -m benchmarks.gpu.copies`, on one GPU. Copies
between GPUs go through mappings of another process: see test_from_gpu.py.

Qwen3-8B shapes. Each case is prepared once and replayed on new random values; medians of ROUNDS, wall time, with what
`DeviceCopy.run` waits for. Prints a line a case, and everything as JSON at the end.
"""

from __future__ import annotations

import json
import mmap
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from benchmarks.gpu.qwen3_8b import COLUMNS, SHAPES
from ckpt_engine.copy import device_work
from ckpt_engine.copy.device_copy import DeviceCopy
from ckpt_engine.transport.mapped import MappedRegions
from ckpt_engine.transport.shared_memory.memory import SharedArena, SharedMemoryTransport

ROUNDS = 10
HERE = torch.device("cuda", 0)
Pairs = list[tuple[torch.Tensor, torch.Tensor]]


def timed(work: Callable[[], object], rounds: int = ROUNDS) -> float:
    """Median seconds."""
    found = []
    for _ in range(rounds + 2):
        torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        torch.cuda.current_stream().synchronize()
        found.append(time.perf_counter() - began)
    return median(found[2:])


def plain(source: torch.Tensor, size: int) -> float:
    """GB/s of one contiguous copy: the ceiling."""
    destination = torch.empty(size, dtype=torch.uint8, device=HERE)
    return size / timed(lambda: destination.copy_(source[:size], non_blocking=True)) / 1e9


def tensors(where: str | torch.device, pinned: bool = False) -> dict[str, torch.Tensor]:
    return {
        name: torch.empty(shape, dtype=torch.bfloat16, device=where, pin_memory=pinned)
        for name, shape in SHAPES.items()
    }


def sliced(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """What the second of two tensor-parallel workers needs."""
    if tensor.dim() == 1:
        return tensor
    axis = 1 if name.endswith(COLUMNS) else 0
    return tensor.chunk(2, axis)[1]


def measure(name: str, pairs: Pairs, ceiling: float, results: list[dict[str, Any]], rounds: int = ROUNDS) -> None:
    began = time.perf_counter()
    copy = DeviceCopy(pairs)
    prepared = time.perf_counter() - began
    for destination, _ in pairs:
        destination.fill_(7)
    seconds = timed(copy.run, rounds)
    right = all(
        torch.equal(destination, source.to(HERE, destination.dtype)) for destination, source in pairs[:40] + pairs[-3:]
    )
    rate = copy.bytes / seconds / 1e9
    result = {
        "case": name, "gbps": rate, "ceiling": ceiling, "ratio": rate / ceiling, "seconds": seconds,
        "bytes": copy.bytes, "launches": copy.launches, "engine_copies": copy.engine_copies,
        "prepare_seconds": prepared, "right": right, "notes": copy.notes,
    }  # fmt: skip
    results.append(result)
    print({key: round(value, 4) if isinstance(value, float) else value for key, value in result.items()}, flush=True)


def main() -> None:
    torch.cuda.set_device(HERE)
    results: list[dict[str, Any]] = []
    destinations = tensors(HERE)
    halves = {name: torch.empty_like(sliced(name, tensor)) for name, tensor in destinations.items()}
    sources = tensors(HERE)
    for source in sources.values():
        source.normal_()
    ceiling = plain(torch.empty(4 << 30, dtype=torch.uint8, device=HERE), 4 << 30)
    whole = [(destinations[name], source) for name, source in sources.items()]
    half = [(halves[name], sliced(name, source)) for name, source in sources.items()]
    kept = dict(device_work.ENGINE_BYTES)
    for label, threshold in (("kernel", 1 << 62), ("engines", 1)):
        device_work.ENGINE_BYTES[device_work.Side.SAME] = threshold
        measure(f"same GPU, whole, {label}", whole, ceiling, results)
        measure(f"same GPU, half, {label}", half, ceiling, results)
    device_work.ENGINE_BYTES.update(kept)
    wide = [(tensor, torch.randn(tensor.shape, device=HERE)) for tensor in list(destinations.values())[:80]]
    measure("same GPU, cast from float32", wide, ceiling, results)
    del wide, sources, whole, half
    torch.cuda.empty_cache()
    from_host(destinations, halves, results)
    print(json.dumps(results))


def from_host(
    destinations: dict[str, torch.Tensor], halves: dict[str, torch.Tensor], results: list[dict[str, Any]]
) -> None:
    """Shared memory, registered; and the same not registered, through the ring."""
    names = list(SHAPES)[:80]
    size = sum(destinations[name].nbytes for name in names)
    ceiling = plain(torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True), 1 << 30)
    arena = SharedArena(-(-size // mmap.PAGESIZE) * mmap.PAGESIZE)
    region = arena.region(0)
    offset = 0
    views: dict[str, tuple[int, tuple[int, ...]]] = {}
    for name in names:
        arena.tensor(offset, SHAPES[name], torch.bfloat16).copy_(torch.randn(SHAPES[name], device=HERE))
        views[name] = offset, SHAPES[name]
        offset += destinations[name].nbytes
    for label in ("pageable, through the ring", "registered"):
        opened: MappedRegions = SharedMemoryTransport().open([region])
        if label == "registered":
            (mapping,) = opened._mappings.values()
            began = time.perf_counter()
            problem = mapping.pin()
            print(f"registering {size} bytes: {time.perf_counter() - began:.3f} s {problem!r}", flush=True)
        sources = {
            name: opened.view(region, first, shape, torch.empty(shape, device="meta").stride(), "bfloat16")
            for name, (first, shape) in views.items()
        }
        whole = [(destinations[name], sources[name]) for name in names]
        half = [(halves[name], sliced(name, sources[name])) for name in names]
        measure(f"shared memory, {label}, whole", whole, ceiling, results, 3)
        measure(f"shared memory, {label}, half", half, ceiling, results, 3)
        del sources, whole, half


if __name__ == "__main__":
    main()
