"""From a trainer's GPU to one of another host, with Qwen3-8B's shapes: GPU 0, a relay, UCX, a relay, GPU 1 (or
GPU 0, where there is one), each leg against its ceiling in the same run.

The hosts are network namespaces (root) on one machine, so UCX goes over TCP, and its ceiling is bare NIXL's one
contiguous read of as many bytes between the same two. The other ceilings are copies between pinned memory and the GPU.

    python -m pytest benchmarks/gpu/test_far.py --benchmark-json=FILE
"""

from __future__ import annotations

import itertools
import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from google.protobuf.json_format import MessageToDict
from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks.gpu.measure import CopyCeiling, Series, rounded, versions
from benchmarks.gpu.qwen3_8b import BYTES, write_config
from ckpt_engine.host.relay_directory import DIRECTORY
from ckpt_engine.transport.ucx.settings import DEVICES, TLS, helper_environment
from ckpt_engine.v1.manager_pb2 import Outcome, UpdateReport
from tests.cluster import eventually
from tests.end_to_end.test_several_hosts import World
from tests.line_process import LineProcess
from tests.network.hosts import hosts
from tests.network.ucx_world import NEEDS_NIXL

ROUNDS = int(os.environ.get("CKPT_ENGINE_FAR_ROUNDS", "3"))
WARMUP = 2
THREADS = str(min(12, len(os.sched_getaffinity(0))))


class TwoHosts(World):
    """The trainer and the relay beside it on the first, a relay and a replica on the second."""

    TRAINER = "benchmarks.gpu.far_rank"

    def relay(self, host: int) -> psutil.Process:
        process = self.start(
            *(f"relay-{host}", host, "relay", "--manager", self.address, "--name", f"r{host}", "--memory", "31GiB"),
            *("--deltas", "never", "--listen", f"{self.hosts[host].address}:0", "--insecure"),
            OMP_NUM_THREADS=THREADS,
        )
        eventually(f"relay {host} registers", 120.0, lambda: f"r{host}" in self.status()["relays"])
        return psutil.Process(process.pid)

    def replica(self, name: str, host: int) -> None:
        self.start(
            *(name, host, "agent", "--manager", self.address, "--engine", "reference", "--model", str(self._model)),
            *("--name", name, "--engine-output", "--", "--device", "cuda"),
            CUDA_VISIBLE_DEVICES=str(last_gpu()),
            OMP_NUM_THREADS=THREADS,
        )

    def logs(self) -> dict[str, str]:
        return {log.name: log.read_text(errors="replace")[-3000:] for log in self.path.glob("*.log")}


def helpers(relay: psutil.Process) -> int:
    """How many processes it has started."""
    return len(relay.children(recursive=True))


def last_gpu() -> int:
    return min(2, torch.cuda.device_count()) - 1


@NEEDS_NIXL
@pytest.mark.timeout(420)
def test_from_a_gpu_to_one_of_another_host(
    benchmark: BenchmarkFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TLS, helper_environment({TLS: "tcp"})[TLS])
    monkeypatch.setenv("UCX_NET_DEVICES", "eth0")
    monkeypatch.setenv(DEVICES, "eth0")
    series = Series()
    last: dict[str, Any] = {}
    with ExitStack() as stack:
        world = TwoHosts(tmp_path, write_config(tmp_path / "model"), stack.enter_context(hosts(2)), stack)
        lends, reads = [
            stack.enter_context(
                LineProcess(
                    *("benchmarks.bare_nixl", f"bare {host.namespace}"),
                    before=["ip", "netns", "exec", host.namespace],
                    **{DIRECTORY: str(tmp_path / f"bare-{host.namespace}")},
                )
            )
            for host in world.hosts
        ]
        bare = [*lends.ask(lend=BYTES), BYTES]
        into = CopyCeiling("cpu", f"cuda:{last_gpu()}", 2 << 30)
        _, far = world.relay(0), world.relay(1)
        before_any = helpers(far)
        world.replica("far", 1)
        eventually("the replica registers", 120.0, lambda: "far" in world.status()["replicas"])
        seeds = itertools.count()

        def before() -> None:
            series.add(
                out_ceiling_GB_s=world.trainer.ask(renew=next(seeds)),
                across_ceiling_GB_s=BYTES / reads.ask(read=bare) / 1e9,
                in_ceiling_GB_s=into.once(),
            )

        def update() -> None:
            answer = world.trainer.ask(update={"timeout": 200.0})
            assert isinstance(answer, str), (answer, world.logs())
            report = UpdateReport.FromString(bytes.fromhex(answer))
            (outcome,) = report.replicas
            assert outcome.outcome == Outcome.OUTCOME_NEW_SERVING, (report, world.logs())
            assert {edge.transport for edge in outcome.edges} == {"relay_memory"}, outcome
            first, second = sorted(report.relays, key=lambda each: each.stage)
            assert [(each.source, each.bytes) for each in second.filled.brought] == [(first.relay, BYTES)], second
            (worker,) = outcome.workers
            series.add(
                seconds=report.seconds,
                pause_seconds=outcome.pause_seconds,
                out_GB_s=BYTES / first.filled.fill_seconds / 1e9,
                across_GB_s=BYTES / second.filled.fill_seconds / 1e9,
                in_GB_s=BYTES / (worker.transfer_seconds + worker.install_seconds) / 1e9,
            )
            last.update(MessageToDict(report))

        benchmark.pedantic(update, setup=before, rounds=ROUNDS, warmup_rounds=WARMUP)
        assert helpers(far) > before_any, "a helper reads, so it was UCX"
    shares = {
        f"{leg}_share": series.median(f"{leg}_GB_s", ROUNDS) / series.median(f"{leg}_ceiling_GB_s", ROUNDS)
        for leg in ("out", "across", "in")
    }
    benchmark.extra_info.update(
        rounded(
            {
                "bytes": BYTES,
                **shares,
                "threads": THREADS,
                "first": series.first(),
                "last": {key: last[key] for key in ("seconds", "stages", "prefetch", "relays") if key in last},
                "medians": series.last(ROUNDS),
                "versions": versions("nixl-cu12"),
            }
        )
    )
    print("\nRESULT far", benchmark.extra_info, flush=True)
