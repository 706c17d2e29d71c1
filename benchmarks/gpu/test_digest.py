"""Digests on a GPU against its ceiling in the same run: the sum of the same bytes as 64-bit integers.

Qwen3-8B's 399 tensors, at random, each where an allocator put it; then the same from float32, digested as bfloat16.
"""

from __future__ import annotations

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from ckpt_engine.digest.prepared import prepare_digests

LAYER = [(4096,), (4096,), (128,), (128,), (4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096)]
LAYER += [(12_288, 4096), (12_288, 4096), (4096, 12_288)]
CASES = {
    "Qwen3-8B, 399 tensors": [(151_936, 4096), *(LAYER * 36), (4096,), (151_936, 4096)],
    "151,936 x 4,096": [(151_936, 4096)],
    "12,288 x 4,096": [(12_288, 4096)],
    "1,024 x 4,096": [(1024, 4096)],
    "one flat tensor of 16 M": [(1 << 24,)],
    "Qwen3-30B-A3B, 8 layers of experts": [(768, 2048), (768, 2048), (2048, 768)] * 128 * 8,
}
ROUNDS = 10

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


def elapsed(work: object, *, rounds: int = ROUNDS) -> float:
    """Median seconds of a call on the GPU, by events."""
    times = []
    assert callable(work)
    for _ in range(rounds + 2):
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        work()
        last.record()
        last.synchronize()
        times.append(first.elapsed_time(last) / 1e3)
    return sorted(times[2:])[rounds // 2]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32 as bfloat16"])
@pytest.mark.parametrize("case", CASES)
def test_digest_on_gpu(benchmark: BenchmarkFixture, case: str, dtype: str) -> None:
    stored = torch.bfloat16 if dtype == "bfloat16" else torch.float32
    tensors = [torch.empty(shape, dtype=stored, device="cuda").normal_() for shape in CASES[case]]
    served = [torch.bfloat16] * len(tensors)
    prepared = prepare_digests([(tensor, (0,) * tensor.dim()) for tensor in tensors], served=served)
    benchmark.pedantic(prepared.run, rounds=ROUNDS, warmup_rounds=2)
    on_gpu = elapsed(prepared.launch)
    prepared.collect()
    ceiling = elapsed(lambda: [tensor.view(-1).view(torch.int64).sum() for tensor in tensors], rounds=3)
    size = prepared.bytes
    largest = max(tensors, key=torch.Tensor.numel).view(-1).view(torch.int64)
    peak = largest.nbytes / elapsed(largest.sum)
    benchmark.extra_info.update(
        bytes=size,
        launches=prepared.launches,
        terabytes_per_second=round(size / benchmark.stats.stats.median / 1e12, 3),
        terabytes_per_second_on_gpu=round(size / on_gpu / 1e12, 3),
        int64_sum_of_all_terabytes_per_second=round(size / ceiling / 1e12, 3),
        int64_sum_of_largest_terabytes_per_second=round(peak / 1e12, 3),
        gpu=torch.cuda.get_device_name(),
        torch=torch.__version__,
    )
    print(f"\n{case}, {dtype}: {benchmark.extra_info}")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float32 as bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("case", CASES)
def test_look_for_nan_and_infinity_on_gpu(benchmark: BenchmarkFixture, case: str, dtype: str) -> None:
    """Digests that look for them, against those that do not, in turns."""
    stored = torch.float32 if "float32" in dtype else getattr(torch, dtype)
    tensors = [torch.randn(shape, device="cuda").to(stored) for shape in CASES[case]]
    served = [torch.bfloat16 if " as " in dtype else stored] * len(tensors)
    boxes = [(tensor, (0,) * tensor.dim()) for tensor in tensors]
    looks, plain = (prepare_digests(boxes, served=served, finite=finite) for finite in (True, False))
    benchmark.pedantic(looks.run, rounds=ROUNDS, warmup_rounds=2)
    assert plain.run() == looks.run()
    assert not any(looks.not_finite)
    pairs = []
    for _ in range(3 * ROUNDS):
        pairs.append([elapsed(each.launch, rounds=1) for each in (looks, plain)])
        looks.collect(), plain.collect()
    with_look, without = (sorted(each)[len(pairs) // 2] for each in zip(*pairs, strict=True))
    benchmark.extra_info.update(
        bytes=plain.bytes,
        milliseconds_on_gpu=round(with_look * 1e3, 4),
        milliseconds_without=round(without * 1e3, 4),
        more_percent=round(100 * (with_look / without - 1), 2),
        gpu=torch.cuda.get_device_name(),
        torch=torch.__version__,
    )
    print(f"\n{case}, {dtype}: {benchmark.extra_info}")
