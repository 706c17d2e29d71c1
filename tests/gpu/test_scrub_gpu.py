"""The scrub on a GPU: beside an engine's own work, over updates at once, and around a sleep that unmaps weights."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ckpt_engine import Client, Trainer
from ckpt_engine.engine.target import ModuleTarget, Weights
from ckpt_engine.install import scrub as scrubs
from ckpt_engine.v1 import manager_pb2
from tests.cluster import Cluster, Replica, Stream, running_cluster
from tests.conformance.weights import load
from tests.engines.serving import model_of
from tests.engines.vllm_server import OVERLAY
from tests.gpu.exact import PROMPTS, bare_models, live_model, sleep
from tests.gpu.gpu_server import needs_gpu_vllm, start_gpu_vllm
from tests.gpu.test_early_copy_gpu import computing
from tests.gpu.test_vllm_gpu import VLLM
from tests.install.install_world import Checkpoint, OneWorker
from tests.waiting import PATIENCE, eventually

pytestmark = pytest.mark.timeout(400)

FLIPPING = Path(__file__).parent / "flipping"
NAME = "model.norm.weight"
CLEAN, DIRTY = manager_pb2.WORKER_STATE_CLEAN, manager_pb2.WORKER_STATE_DIRTY


class Matrices(nn.Module):
    """Large matrices, each of several pieces, and small vectors, on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        for number in range(4):
            self.register_parameter(f"large{number}", self._made(16384, 6000))
            self.register_parameter(f"small{number}", self._made(513))

    def _made(self, *shape: int) -> nn.Parameter:
        return nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16, device="cuda"), requires_grad=False)

    def load_weights(self, weights: Weights) -> None:
        for name, weight in weights:
            self.get_parameter(name).data.copy_(weight)


def checkpoint_of(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: torch.empty(parameter.shape, dtype=torch.bfloat16).normal_()
        for name, parameter in model.named_parameters()
    }


def told(worker: OneWorker) -> manager_pb2.WorkerScrub:
    return worker.scrubbed[-1] if worker.scrubbed else manager_pb2.WorkerScrub()


def test_a_flipped_byte_is_found_and_updates_at_once_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a rest, in pieces that nearly every install comes between; work of another stream stays right."""
    monkeypatch.setattr(scrubs, "rest_seconds", lambda *_: 0.0)
    model = Matrices()
    checkpoint = Checkpoint(checkpoint_of(model))
    worker = OneWorker(ModuleTarget(model), tmp_path, device="cuda:0", scrub_seconds=0.1)
    with computing():
        for number in range(20):
            checkpoint.weights[f"large{number % 4}"].neg_()
            checkpoint.seal()
            report = worker.update(checkpoint).report
            assert not report.HasField("problem"), report.problem.message
        passes = told(worker).passes
        eventually("it hashes all again", PATIENCE, lambda: told(worker).passes > passes + 2)
        assert told(worker).differences == 0
        assert told(worker).bytes == sum(parameter.nbytes for parameter in model.parameters())
        for count, name in enumerate(("large3", "small0"), 1):
            model.get_parameter(name).data.view(torch.uint8).view(-1)[-1] ^= 1
            torch.cuda.synchronize()
            eventually("it is found", PATIENCE, lambda count=count: told(worker).differences == count)
            assert (told(worker).last.tensor, worker.page.read()[0].state) == (name, DIRTY)
            assert not worker.update(checkpoint).report.HasField("problem")
    worker.installer.close()
    checkpoint.close()


@pytest.mark.parametrize("seconds", [60.0, 1.0])
def test_what_it_costs_a_gpu_that_reads_its_weights(tmp_path: Path, seconds: float, record_property: Any) -> None:
    """Steps a second that read all weights once, with and without, in turns. Prints them; judges nothing."""
    model = Matrices()
    checkpoint = Checkpoint(checkpoint_of(model))
    worker = OneWorker(ModuleTarget(model), tmp_path, device="cuda:0", scrub_seconds=seconds)
    assert not worker.update(checkpoint).report.HasField("problem")
    vector = torch.randn(6000, dtype=torch.bfloat16, device="cuda")

    def steps(window: float) -> float:
        count, began = 0, time.perf_counter()
        while time.perf_counter() - began < window:
            for _ in range(20):
                for number in range(4):
                    torch.mv(model.get_parameter(f"large{number}"), vector)
            torch.cuda.synchronize()
            count += 20
        return count / (time.perf_counter() - began)

    steps(1.0)
    with_it, without = [], []
    for _ in range(5):
        with_it.append(steps(2.0))
        with worker.scrub.halted():
            without.append(steps(2.0))
    share = sorted(one / other for one, other in zip(with_it, without, strict=True))[2]
    record_property("share", share)
    print(f"scrub on a GPU, interval {seconds:g} s: {share:.4f} of the steps, {told(worker).passes} passes")
    worker.installer.close()
    checkpoint.close()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Cluster, Replica]]:
    path = tmp_path_factory.mktemp("scrub")
    bare_models(path)
    with running_cluster(path / "cluster") as cluster:
        replica = start_gpu_vllm(
            cluster,
            "scrubbed",
            path / "bare",
            "--enable-sleep-mode",
            options=("--scrub-seconds", "0.5", "--mode", "hybrid"),
            environment={"PYTHONPATH": f"{FLIPPING}:{OVERLAY}"},
        )
        yield cluster, replica.registered(300)


def scrub_of(replica: Replica) -> Any:
    status = replica.status
    assert status is not None
    return status.scrubs[0] if status.scrubs else manager_pb2.WorkerScrub()


def hashes_all(replica: Replica) -> None:
    before = scrub_of(replica).passes
    eventually("it hashes all again", 120, lambda: scrub_of(replica).passes > before + 1)


class TestVllm:
    pytestmark = needs_gpu_vllm

    def test_updates_requests_and_sleeps_are_no_difference_and_a_flipped_byte_is(
        self, served: tuple[Cluster, Replica], tmp_path: Path
    ) -> None:
        cluster, replica = served
        live = live_model(tmp_path)
        with Trainer(cluster.address, lineage="scrub") as trainer, Client(cluster.address) as client:
            trainer.publish(live, snapshot=True)
            streams: list[Stream] = []
            for version in range(10):
                model = model_of(tmp_path, version % 3)
                load(live, model)
                report = trainer.update_weights(version=version, pause_mode="in_place")
                assert report.ok, f"{report}\n{replica.tail()}"
                if not streams:
                    streams = [Stream(lambda: VLLM.complete(replica, [3, 5, 7], 60).status_code) for _ in range(4)]
            hashes_all(replica)
            assert {status for stream in streams for status in stream.end()} <= {200}
            assert scrub_of(replica).bytes > 0.95 * sum(each.nbytes for each in live.parameters())
            assert scrub_of(replica).differences == 0
            VLLM.assert_right(replica, model, PROMPTS[0], 9)

            sleep(cluster, 1)  # weights are unmapped: reading them would end the engine
            eventually("it rests", 60, lambda: scrub_of(replica).idle == scrubs.ASLEEP)
            client.wake()
            replica.serving(9)
            hashes_all(replica)
            assert scrub_of(replica).differences == 0
            VLLM.assert_right(replica, model, PROMPTS[1], 9)

            replica.workers()[0].send_signal(signal.SIGUSR2)
            eventually("it is found", 60, lambda: scrub_of(replica).differences == 1)
            replica.serving(9)
            assert scrub_of(replica).last.tensor == NAME
            VLLM.assert_right(replica, model, PROMPTS[2], 9)
