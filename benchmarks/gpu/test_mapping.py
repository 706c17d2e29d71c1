"""What lending live GPU memory costs once, and what it costs at each update: Qwen3-8B's shapes, two processes.

Once: publishing (the first time it is tried out in a process of its own), mapping, preparing the copy. At each update:
looking whether everything still is what was published, on either side. The rest of an update is in test_from_gpu.py.

    python -m pytest benchmarks/gpu/test_mapping.py --benchmark-json=FILE
"""

from __future__ import annotations

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks.gpu.measure import Series, rounded, versions
from benchmarks.gpu.qwen3_8b import BYTES, SHAPES
from tests.gpu.cuda_peer import Peer

pytestmark = pytest.mark.timeout(150)

ROUNDS = 5
ALLOCATORS: dict[str, dict[str, str]] = {
    "default": {},
    "expandable segments": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
}


@pytest.mark.parametrize("allocator", list(ALLOCATORS))
def test_lending_live_parameters(benchmark: BenchmarkFixture, allocator: str) -> None:
    series = Series()
    shapes = {name: (shape, "bfloat16") for name, shape in SHAPES.items()}
    with Peer(**ALLOCATORS[allocator]) as trainer, Peer() as worker:
        trainer.ask("trainer.make", shapes=shapes)
        published = trainer.ask("trainer.publish")
        first = trainer.seconds

        def lend() -> None:
            """What a trainer that withdraws its memory between updates pays for each."""
            trainer.ask("trainer.withdraw")
            series.add(withdraw_seconds=trainer.seconds)
            table = trainer.ask("trainer.publish")["table"]
            series.add(publish_seconds=trainer.seconds)
            series.add(**worker.ask("worker.open", table=table))

        def keep() -> None:
            trainer.ask("trainer.check")
            series.add(trainer_check_seconds=trainer.seconds)
            worker.ask("worker.check")
            series.add(worker_check_seconds=worker.seconds)
            assert worker.ask("worker.read") == BYTES
            series.add(copy_seconds=worker.seconds)

        for _ in range(2):
            lend()
            trainer.ask("trainer.seal")
            keep()
            keep()
        benchmark.pedantic(lend, rounds=ROUNDS)
        trainer.ask("trainer.seal")
        for _ in range(ROUNDS):
            keep()
    benchmark.extra_info.update(
        rounded(
            {
                "allocator": allocator,
                "tensors": len(shapes),
                "regions": len(published["regions"]),
                "first_publish_seconds": first,
                "medians": series.last(ROUNDS),
                "versions": versions(),
            }
        )
    )
    print("\nRESULT mapping", allocator, benchmark.extra_info, flush=True)
