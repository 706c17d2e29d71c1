"""What the control plane takes for an update whose weights take nothing: a model of 64 KiB, and 1, 8 or 64 replicas.

Timed is `Trainer.update_weights`, from call to report. Three processes over gRPC on loopback: the manager
(`ckpt-engine manager` with a ledger on disk), one real Trainer (this process) whose module lies in shared memory, and
all replicas together in one (small_replicas.py, which says what of them is real: all but the engine and its HTTP).
Sixty-four replicas share one interpreter and all processes the machine's processors, so their time is an upper bound:
real ones have hosts of their own. Counts of calls and messages depend on neither.

`extra_info`: p50 and p99 of the rounds in milliseconds (with fewer than 101 rounds p99 is their maximum); medians of
what the report says of its stages; per update, calls that members begin, messages in both directions without
heartbeats, all of them by kind, and requests of workers to their agents over ZeroMQ.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import grpc
import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks.message_counts import CountingStub, per_update
from benchmarks.small_replicas import TinyModel
from ckpt_engine import Trainer
from ckpt_engine.channel import ManagerStub
from ckpt_engine.report import UpdateReport
from ckpt_engine.trainer import session
from tests.ports import free_address

ROOT = Path(__file__).parents[1]
ROUNDS = {1: 200, 8: 60, 64: 20}
WARM_UP = 3


@contextmanager
def manager(path: Path, http: str = "127.0.0.1:0") -> Iterator[str]:
    """A manager's process; gives its address. http: where its HTTP side listens."""
    address = free_address()
    command = [sys.executable, "-m", "ckpt_engine", "manager", "--listen", address, "--http", http]
    with (path / "manager.log").open("wb") as log:
        process = subprocess.Popen(
            [*command, "--ledger", str(path / "ledger.sqlite")], stdout=log, stderr=subprocess.STDOUT, cwd=ROOT
        )
    try:
        with grpc.insecure_channel(address) as channel:
            grpc.channel_ready_future(channel).result(60)
        yield address
    finally:
        process.terminate()
        process.wait(60)


class Replicas:
    """The process of all replicas."""

    def __init__(self, address: str, count: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.small_replicas", address, str(count)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert self._line() == "ready"

    def counts(self) -> Counter[str]:
        """What all agents have sent and received so far."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return Counter(json.loads(self._line()))

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(60)
        finally:
            self._process.kill()

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


def percentile(values: list[float], share: float) -> float:
    """The smallest value that at least `share` of all do not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


@pytest.mark.parametrize("count", list(ROUNDS))
def test_update_of_a_tiny_model(
    benchmark: BenchmarkFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, count: int
) -> None:
    sent: Counter[str] = Counter()
    monkeypatch.setattr(session, "ManagerStub", lambda channel: CountingStub(ManagerStub(channel), sent))
    torch.set_num_threads(1)
    model = TinyModel()
    reports: list[UpdateReport] = []
    with manager(tmp_path) as address:
        replicas = Replicas(address, count)
        try:
            with Trainer(address, lineage="control-plane") as trainer:
                trainer.publish(model, move=True)
                trainer.wait_for_replicas(count, timeout=60)

                def train() -> None:
                    # New values each time: equal ones would have equal digests, which nobody sends or fetches again.
                    with torch.no_grad():
                        for parameter in model.parameters():
                            parameter.normal_()

                def update() -> None:
                    reports.append(trainer.update_weights())

                for _ in range(WARM_UP):
                    train()
                    update()
                before = sent + replicas.counts()
                benchmark.pedantic(update, setup=train, rounds=ROUNDS[count])
                used = per_update(before, sent + replicas.counts(), ROUNDS[count])
        finally:
            replicas.end()
    assert all(report.ok and report.verified and len(report.replicas) == count for report in reports)
    stages: defaultdict[str, list[float]] = defaultdict(list)
    for report in reports[WARM_UP:]:
        for stage, seconds in report.stages.items():
            stages[stage].append(seconds)
    times = list(benchmark.stats.stats.data)
    benchmark.extra_info.update(
        replicas=count,
        p50_milliseconds=round(percentile(times, 0.5) * 1e3, 2),
        p99_milliseconds=round(percentile(times, 0.99) * 1e3, 2),
        stages_milliseconds={stage: round(median(seconds) * 1e3, 2) for stage, seconds in stages.items()},
        pause_milliseconds=round(
            median(max(replica.pause_seconds for replica in report.replicas) for report in reports[WARM_UP:]) * 1e3, 2
        ),
        **used,
    )
