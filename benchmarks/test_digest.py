"""How fast a CPU digests against its ceiling in the same run: reading the same bytes, on as many threads.

One large matrix, the widest of a model, a model's mix of tensors, norms, which are small and many, and single bytes;
then the same from memory to memory, against plain copying. Threads: 1, 4 and 16, as far as this host has processors.
All are measured in turns, so that what else runs on the host slows all alike.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

import numba
import numpy as np
import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from ckpt_engine.digest.boxes import digest_boxes
from ckpt_engine.digest.host import HostDigests

LAYER = [(1024,), (1024,), (128,), (128,), (2048, 1024), (1024, 1024), (1024, 1024), (1024, 2048)]
LAYER += [(3072, 1024), (3072, 1024), (1024, 3072)]
MODELS = {
    "32768 x 4096": [(32_768, 4096)],
    "4096 x 12288": [(4096, 12_288)],
    "400 mixed tensors": [*(LAYER * 36), (50_000, 1024), (1024,), (7, 5), ()],
    "5000 norms of 4096": [(4096,)] * 5000,
    "32768 x 4096 transposed": [(32_768, 4096)],
    "32768 x 4096 of one byte": [(32_768, 4096)],
}
PROCESSORS = len(os.sched_getaffinity(0))
THREADS = sorted(
    {threads for threads in (1, 4, 16) if threads <= PROCESSORS} | ({PROCESSORS} if PROCESSORS < 4 else set())
)
ROUNDS = 9


@numba.njit("uint64(uint64[::1])", nogil=True)
def read(words: np.ndarray) -> int:
    """Reads memory and does as little as can be with it."""
    found = np.uint64(0)
    for index in range(words.size):
        found ^= words[index]
    return found


@pytest.fixture(params=THREADS)
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def tensors_of(model: str) -> list[torch.Tensor]:
    dtype = torch.uint8 if "byte" in model else torch.bfloat16
    tensors = [torch.empty(shape, dtype=dtype) for shape in MODELS[model]]
    for tensor in tensors:
        tensor.view(-1).view(torch.uint8).random_(256)
    return [tensor.t() if model.endswith("transposed") else tensor for tensor in tensors]


def in_turns(ours: Callable[[], object], ceiling: Callable[[], object]) -> tuple[list[float], list[float]]:
    """Seconds of each round of both."""
    times: tuple[list[float], list[float]] = ([], [])
    for round in range(ROUNDS + 1):
        for work, kept in zip((ours, ceiling), times, strict=True):
            began = time.perf_counter()
            work()
            if round:
                kept.append(time.perf_counter() - began)
    return times


def told(benchmark: BenchmarkFixture, size: int, ours: list[float], ceiling: list[float], **more: object) -> None:
    benchmark.pedantic(lambda: None, rounds=1)  # the rounds are in `extra_info`, ours and the ceiling's
    own, best = size / median(ours) / 1e9, size / median(ceiling) / 1e9
    benchmark.extra_info.update(
        bytes=size,
        gigabytes_per_second=round(own, 2),
        ceiling_gigabytes_per_second=round(best, 2),
        ratio=round(own / best, 3),
        milliseconds=[round(each * 1e3, 3) for each in sorted(ours)],
        ceiling_milliseconds=[round(each * 1e3, 3) for each in sorted(ceiling)],
        processors=PROCESSORS,
        processor=processor(),
        python=platform.python_version(),
        versions={"torch": torch.__version__, "numpy": np.__version__, "numba": numba.__version__},
        **more,
    )
    print(f"\n{benchmark.name}: {own:.1f} of {best:.1f} GB/s, {own / best:.2f}")


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


@pytest.mark.parametrize("model", MODELS)
def test_digest(benchmark: BenchmarkFixture, model: str, threads: int) -> None:
    tensors = tensors_of(model)
    digests = HostDigests([(tensor, (0,) * tensor.dim()) for tensor in tensors])
    size = sum(tensor.nbytes for tensor in tensors)
    # As many bytes that lie together: the ceiling has no tensors to go through.
    words = torch.empty(size // 8, dtype=torch.int64).random_().numpy().view(np.uint64)
    parts = np.array_split(words, 4 * threads)
    with ThreadPoolExecutor(threads) as pool:
        ours, ceiling = in_turns(digests.run, lambda: list(pool.map(read, parts)))
    began = time.perf_counter()
    digest_boxes([(tensor, (0,) * tensor.dim()) for tensor in tensors])
    told(benchmark, size, ours, ceiling, milliseconds_without_preparing=round((time.perf_counter() - began) * 1e3, 3))


@pytest.mark.parametrize("model", [model for model in MODELS if not model.endswith("transposed")])
def test_look_for_nan_and_infinity(benchmark: BenchmarkFixture, model: str, threads: int) -> None:
    """Digests that look for them, against those that do not. The weights are like a model's: small, or in 8 bits."""
    dtype = torch.float8_e4m3fn if "byte" in model else torch.bfloat16
    scale = 100.0 if "byte" in model else 0.05
    tensors = [(scale * torch.randn(shape)).to(dtype) for shape in MODELS[model]]
    boxes = [(tensor, (0,) * tensor.dim()) for tensor in tensors]
    looks, plain = HostDigests(boxes, finite=True), HostDigests(boxes)
    size = sum(tensor.nbytes for tensor in tensors)
    told(benchmark, size, *in_turns(looks.run, plain.run))
    assert not any(looks.not_finite)


@pytest.mark.parametrize("model", ["32768 x 4096", "400 mixed tensors"])
def test_copy_and_digest(benchmark: BenchmarkFixture, model: str, threads: int) -> None:
    """Against torch's `copy_` of as many contiguous bytes."""
    sources = tensors_of(model)
    there = [torch.empty_like(tensor).copy_(tensor) for tensor in sources]
    copies = HostDigests([(tensor, (0,) * tensor.dim()) for tensor in there], sources=sources)
    size = sum(tensor.nbytes for tensor in sources)
    source = torch.empty(size, dtype=torch.uint8).random_(256)
    target = torch.empty_like(source).copy_(source)
    told(benchmark, size, *in_turns(copies.run, lambda: target.copy_(source)))
