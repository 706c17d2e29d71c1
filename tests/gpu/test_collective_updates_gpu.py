"""Whole updates by a collective, from a trainer on GPU 0 to a replica of the reference engine on GPU 1, over NCCL."""

from __future__ import annotations

import os
import signal
import statistics
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from google.protobuf.json_format import ParseDict

from ckpt_engine.report import UpdateReport
from ckpt_engine.trace import ENVIRONMENT
from ckpt_engine.v1 import manager_pb2
from tests.cluster import Replica, eventually, generate, running_cluster
from tests.faults.listener import Held, Listener
from tests.gpu.collective_trainer import LARGE
from tests.line_process import LineProcess
from tests.tiny_model import decisive_prompts, make_tiny_qwen3, reference_tokens

pytestmark = pytest.mark.timeout(420)

NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0"}
"""A program that uses NVLink multicast can put a shared host's GPUs out of service."""

TOKENS = 16


class World:
    """One trainer and one replica, each with a GPU."""

    def __init__(self, stack: ExitStack, path: Path, size: str) -> None:
        shape = LARGE if size == "large" else {}
        make_tiny_qwen3(path / "bare", weights=False, **shape)
        self.path = path
        self.listener = stack.enter_context(Listener(path / "trace"))
        self.cluster = stack.enter_context(running_cluster(path / "cluster"))
        environment = {**NO_MULTICAST, "CUDA_VISIBLE_DEVICES": "1", ENVIRONMENT: str(self.listener.path)}
        self.replica = self.cluster.replica(
            "one", "reference", path / "bare", "--device", "cuda", environment=environment
        )
        arguments = "tests.gpu.collective_trainer", self.cluster.address, str(path), size
        self.trainer = stack.enter_context(LineProcess(*arguments, fresh=True, **NO_MULTICAST))
        self.replica.registered()
        assert self.trainer.answer() == {"published": True}

    def update(self, seed: int) -> Any:
        """A whole update, which must go well and by the collective."""
        told = self.trainer.ask(seed=seed)
        assert told.get("ok"), f"{told}\n{self.replica.tail()}"
        assert told["verified"]
        (replica,) = told["replicas"]
        assert {each["transport"] for each in replica["edges"]} == {"nccl"}
        assert told["collective"] == "one is updated by a collective: the trainer publishes for it alone"
        return told

    def serves(self, seed: int) -> None:
        """Greedy tokens are transformers'."""
        model = make_tiny_qwen3(self.path / "expected", seed, weights=False)
        prompt = decisive_prompts(model, 1, TOKENS)[0]
        assert generate(self.replica, prompt, TOKENS) == reference_tokens(model, prompt, TOKENS).tokens


@contextmanager
def world(path: Path, size: str) -> Iterator[World]:
    with ExitStack() as stack:
        yield World(stack, path, size)


def test_what_is_trained_on_one_gpu_is_served_on_the_other(two_gpus: Any, tmp_path: Path) -> None:
    with world(tmp_path, "tiny") as here:
        for seed in (1, 2, 3):
            here.update(seed)
            here.serves(seed)


def test_how_long_it_takes(two_gpus: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Figures for people; what is asserted is that all of it went over the collective, verified."""
    with world(tmp_path, "large") as here:
        told = [here.update(seed) for seed in range(1, 12)]
    reports = [UpdateReport(ParseDict(each, manager_pb2.UpdateReport())) for each in told]
    replicas = [each.replicas[0] for each in reports]
    with capsys.disabled():
        print(f"\n{replicas[0].nbytes / 1e9:.2f} GB, first update, then medians of {len(told) - 1}:")
        for name in ("pause_seconds", "sync_seconds", "transfer_seconds"):
            values = [float(getattr(each, name)) for each in replicas]
            print(f"  {name}: {values[0] * 1e3:.1f} ms, {statistics.median(values[1:]) * 1e3:.1f} ms")
        calls = [each.seconds for each in reports]
        print(f"  whole call: {calls[0] * 1e3:.1f} ms, {statistics.median(calls[1:]) * 1e3:.1f} ms")
        print(f"  stages of the last: {replicas[-1].stages}")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_worker_that_ends_in_the_middle_does_not_hold_the_trainer(two_gpus: Any, tmp_path: Path, number: int) -> None:
    with world(tmp_path, "tiny") as here:
        here.update(1)
        victim = here.replica.workers()[0].pid

        def is_victim(pid: int) -> bool:
            return pid == victim

        with here.listener.holding("worker.install.transfer", is_victim) as held:
            told = _killed_in_the_middle(here, held, victim, number)
        assert not told["ok"]
        assert "one, worker 0" in told["collective"]
        back(here.replica, victim)
        here.update(3)
        here.serves(3)


def test_a_trainer_that_ends_in_the_middle_leaves_its_replica_closed_and_free(two_gpus: Any, tmp_path: Path) -> None:
    with world(tmp_path, "tiny") as here:
        here.update(1)
        with here.listener.holding("worker.install.transfer") as held:
            here.trainer.send(seed=2)
            assert held.wait(60)
            here.trainer.kill()
        arguments = "tests.gpu.collective_trainer", here.cluster.address, str(tmp_path), "tiny"
        with LineProcess(*arguments, fresh=True, **NO_MULTICAST) as here.trainer:
            assert here.trainer.answer() == {"published": True}
            here.update(4)
            here.serves(4)


def _killed_in_the_middle(here: World, held: Held, victim: int, number: int) -> Any:
    here.trainer.send(seed=2, timeout=40.0)  # a stopped one is waited for as long
    assert held.wait(60)
    os.kill(victim, number)
    try:
        return here.trainer.answer()
    finally:
        if psutil.pid_exists(victim):
            os.kill(victim, signal.SIGKILL)


def back(replica: Replica, before: int) -> None:
    """Waits for its next engine."""

    def look() -> bool:
        status = replica.status
        return status is not None and before not in [worker.pid for worker in status.workers]

    eventually("its engine's end is noticed", 120, look)
    replica.registered()
