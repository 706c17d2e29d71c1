"""A trainer on GPU 0 updates an SGLang server of Qwen3-8B's shapes on the same GPU, against SGLang's own
`update_weights_from_tensor` into a server of its own.

Each round has new random weights and runs, in turns: the rival's pause, update and resume, one copy at the
hardware's rate, and our update. Afterwards both servers hold the same weights, and their greedy tokens must be equal.

CUDA graphs and overlapped scheduling are on. The rival unpickles what it is sent: on loopback, for a baseline only.

    python -m pytest benchmarks/gpu/test_sglang.py --benchmark-json=FILE
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks.gpu.measure import ROUNDS, WARMUP, CopyCeiling, Series, engine_check, rounded, versions
from benchmarks.gpu.qwen3_8b import BYTES, Tree, renew, write_config
from benchmarks.gpu.rivals import SGLANG_SIZES, NativeSglang
from ckpt_engine import Trainer
from tests.cluster import Replica, running_cluster
from tests.engines.sglang_server import complete, tokens
from tests.gpu.sglang_fleet import needs_gpu_sglang, plain_sglang, start_gpu_sglang

pytestmark = [*needs_gpu_sglang, pytest.mark.timeout(480)]

PROMPTS = [[5, 6, 7, 8], list(range(1000, 1064)), [151000, 3, 99, 12345]]


@dataclass
class Both:
    """Our server and the rival's, and a trainer on the same GPU."""

    replica: Replica
    server: Any
    model: Tree
    trainer: Trainer
    rival: NativeSglang

    def update(self) -> Any:
        report = self.trainer.update_weights(timeout=60)
        assert report.ok, f"{report}\n{self.replica.tail()}"
        assert report.verified
        assert report.nbytes == BYTES
        return report


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    path = tmp_path_factory.mktemp("sglang")
    config = write_config(path / "model")
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(plain_sglang(config, path / "rival.log", *SGLANG_SIZES))
        cluster = stack.enter_context(running_cluster(path / "cluster"))
        replica = start_gpu_sglang(cluster, "sglang", config, *SGLANG_SIZES, visible="0")
        model = Tree("cuda:0")
        server.wait(300)
        replica.registered(300)
        trainer = stack.enter_context(Trainer(cluster.address, lineage="benchmark-sglang"))
        trainer.publish(model)
        yield Both(replica, server, model, trainer, NativeSglang(server.url, model))


def test_idle(benchmark: BenchmarkFixture, both: Both) -> None:
    series = Series()
    ceiling = CopyCeiling("cuda:0", "cuda:0", 2 << 30)
    transports: list[str] = []
    seeds = iter(range(1, 1000))

    def before() -> None:
        renew(both.model, next(seeds))
        series.add(rival_seconds=both.rival.update())
        series.add(ceiling_from_idle_GB_s=ceiling.once(), ceiling_GB_s=ceiling.sustained())

    def update() -> None:
        report = both.update()
        (outcome,) = report.replicas
        (worker,) = outcome.message.workers
        series.add(
            pause_seconds=outcome.pause_seconds,
            sync_seconds=outcome.sync_seconds,
            report_seconds=report.seconds,
            transfer_and_install_seconds=worker.transfer_seconds + worker.install_seconds,
            verify_seconds=worker.verify_seconds,
            **{f"stage_{name}": seconds for name, seconds in outcome.stages.items()},
        )
        transports[:] = [f"{use.transport}: {use.reason}" for use in outcome.transports]

    benchmark.pedantic(update, setup=before, rounds=ROUNDS, warmup_rounds=WARMUP)
    for prompt in PROMPTS:
        assert tokens(complete(both.replica, prompt)) == tokens(complete(both.server, prompt)), prompt[:4]
    moved = series.median("transfer_and_install_seconds")
    benchmark.extra_info.update(
        rounded(
            {
                "bytes": BYTES,
                "transport": transports,
                "rival": "SGLang update_weights_from_tensor",
                "share_of_copy_ceiling": BYTES / moved / 1e9 / series.median("ceiling_GB_s"),
                "share_of_one_copy_from_idle": BYTES / moved / 1e9 / series.median("ceiling_from_idle_GB_s"),
                "transfer_and_install_GB_s": BYTES / moved / 1e9,
                "times_faster_than_rival": series.median("rival_seconds") / series.median("pause_seconds"),
                "first_pause_over_later": series.first()["pause_seconds"] / series.median("pause_seconds"),
                "engine_check": engine_check(both.replica),
                "first": series.first(),
                "medians": series.last(ROUNDS),
                "versions": versions("sglang"),
            }
        )
    )
    print("\nRESULT idle", benchmark.extra_info, flush=True)
