"""What tests ask of a real engine on a GPU in the same way, whichever engine it is: servers that are started together,
updates from live parameters on the GPU, tokens that transformers judges, memory that is given up and comes back.

transformers on the CPU sums in another order than kernels on a GPU: each token must be, but for rounding, the best. A
router of experts that is near a tie then takes another expert, and that token is logits away from the best one. In 2 of
24 answers of 32 tokens transformers itself finds one such token (1.4 and 3.4 logits) when it judges in float32 what it
said in bfloat16. So a few tokens of an answer of experts may be; of other weights 31 or all of 32 are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from ckpt_engine import Trainer
from ckpt_engine.channel import ManagerStub
from ckpt_engine.v1 import manager_pb2
from tests.cluster import Cluster, Replica, Stream, corrupt_after_sealing, outcomes, running_cluster
from tests.conformance.weights import load
from tests.engines.serving import TOKENS, Complete, check_closed, label_of, model_of
from tests.engines.test_vllm_models import build, qwen3_mixture
from tests.tiny_model import make_tiny_qwen3, regrets

DEVICE = "cuda"
ROUNDING = 0.8  # logits; of other weights' tokens the worst is several away
FLIPS = 3  # of experts: tokens of an answer that rounding alone may take away from the best one
PROMPTS = [[5, 6, 7], [400, 3, 77, 12, 9], list(range(100, 148))]

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "4",  # the small models of CPU tests want one
    # A program that uses NVLink multicast can put a shared host's GPUs out of service.
    "NCCL_NVLS_ENABLE": "0",
}


def bare_models(path: Path, head_dim: int = 32) -> None:
    """Models without weights that both engines serve: `bare`, `bare-tied`, `bare-mixture`. head_dim: of the last."""
    make_tiny_qwen3(path / "bare", weights=False)
    make_tiny_qwen3(path / "bare-tied", weights=False, tied=True)
    mixture(head_dim).save_pretrained(path / "bare-mixture")


def mixture(head_dim: int) -> Any:
    """A configuration of experts."""
    config = qwen3_mixture()
    config.dtype, config.head_dim = torch.bfloat16, head_dim
    return config


class Fleet:
    """Servers that were started together; a test that asks for one waits for that one only."""

    def __init__(self, path: Path, stack: contextlib.ExitStack, start: Callable[..., Replica]) -> None:
        """start: a server as a replica: cluster, name, model, the server's arguments, and what is given by name."""
        self.path, self._stack, self._start = path, stack, start
        self._clusters: dict[str, Cluster] = {}

    def start(self, name: str, model: Path, *arguments: str, **given: Any) -> None:
        """A server with a manager of its own: an update goes to all replicas of a manager, and models differ here."""
        cluster = self._stack.enter_context(running_cluster(self.path / name))
        self._clusters[name] = cluster
        self._start(cluster, name, model, *arguments, **given)

    def ready(self, name: str, seconds: float = 240.0) -> tuple[Cluster, Replica]:
        """Skips a test whose server was not started, since it needs another GPU. Fails with what the server printed."""
        if name not in self._clusters:
            pytest.skip(f"the server `{name}` needs two GPUs")
        cluster = self._clusters[name]
        return cluster, cluster.replicas[0].registered(seconds)


def live_model(path: Path, **options: Any) -> Any:
    return model_of(path, 99, **options).to(DEVICE)


def right(regrets: list[float], flips: int = 0) -> bool:
    """Whether all tokens but `flips` are the best ones, within rounding."""
    return sorted(regrets)[len(regrets) - 1 - flips] < ROUNDING


def update(trainer: Trainer, replica: Replica, version: int, **arguments: Any) -> Any:
    """An update that must succeed, over CUDA IPC alone, every byte verified."""
    report = trainer.update_weights(version=version, **arguments)
    assert report.ok, f"{report}\n{replica.tail()}"
    assert report.verified
    assert {use.transport for use in report.replicas[0].transports} == {"cuda_ipc"}
    return report


@dataclass(frozen=True)
class Exact:
    """How one engine is asked. cache_bytes: of the servers' caches. labels: whether bodies name the version.
    head_dim: of the model of experts."""

    complete: Complete
    tokens: Callable[[httpx.Response], list[int]]
    cache_bytes: int
    labels: bool = False
    head_dim: int = 32

    def assert_right(self, replica: Replica, model: Any, prompt: list[int], version: int, flips: int = 0) -> list[int]:
        """The tokens after `prompt`, which must be `model`'s own but for `flips`, under this version."""
        try:
            response = self.complete(replica, prompt)
        except httpx.HTTPError as error:
            raise AssertionError(f"version {version}: {error!r}; the server printed\n{replica.tail()}") from error
        found = self.tokens(response)
        regret = [round(each, 2) for each in regrets(model, prompt, found)]
        assert len(found) == TOKENS
        assert right(regret, flips), f"version {version}: logits lost with each token: {regret}"
        assert response.headers["x-ckpt-engine-admitted-version"] == str(version)
        if self.labels:
            assert response.json()["meta_info"]["weight_version"] == label_of(replica)
        return found

    def check_updates(
        self,
        served: tuple[Cluster, Replica],
        path: Path,
        updates: int,
        *,
        workers: int = 1,
        after: Callable[[int], None] = lambda version: None,
        **options: Any,
    ) -> None:
        """Parameters are changed where they lie. after: called when a version is served. options: the model's."""
        cluster, replica = served
        live = live_model(path, **options)
        addresses = [parameter.data_ptr() for parameter in live.parameters()]
        with Trainer(cluster.address, lineage=f"live-{replica.name}") as trainer:
            check_closed(self.complete, replica)
            trainer.publish(live, move=True)
            for version in range(updates):
                model = model_of(path, version, **options)
                load(live, model)
                report = update(trainer, replica, version)
                told = report.replicas[0].message.workers
                assert len(told) == workers
                if workers == 1:
                    assert told[0].verified + told[0].verified_as_loaded == len(list(live.parameters()))
                assert report.message.source_copies == 0
                for prompt in PROMPTS:
                    self.assert_right(replica, model, prompt, version)
                after(version)
            assert addresses == [parameter.data_ptr() for parameter in live.parameters()]

    def check_mixture(self, served: tuple[Cluster, Replica], path: Path) -> None:
        """Updates of a model of experts."""
        cluster, replica = served
        config = mixture(self.head_dim)
        live: dict[str, torch.Tensor] = {}
        with Trainer(cluster.address, lineage="mixture") as trainer:
            for version in range(4):
                model, weights = build(config, version, path / str(version))
                if not live:
                    live = {name: tensor.to(DEVICE) for name, tensor in weights.items()}
                    trainer.publish(live, move=True)
                for name, tensor in weights.items():
                    live[name].copy_(tensor)
                update(trainer, replica, version)
                for prompt in PROMPTS:
                    self.assert_right(replica, model, prompt, version, FLIPS)

    def check_corrupt(self, served: tuple[Cluster, Replica], path: Path) -> None:
        """A bit that flips after sealing closes the gate, until the next good update."""
        cluster, replica = served
        model = model_of(path, 70)
        live = model_of(path, 70).to(DEVICE)
        tensor = dict(live.named_parameters())["model.layers.1.self_attn.o_proj.weight"]
        with Trainer(cluster.address, lineage="corrupt") as trainer:
            trainer.publish(live, move=True)
            restore = corrupt_after_sealing(trainer, tensor, 7)
            report = trainer.update_weights(version=1)
            restore()
            assert outcomes(report) == {replica.name: "quarantined"}
            assert "o_proj" in report.replicas[0].problem
            check_closed(self.complete, replica)
            load(live, model)
            update(trainer, replica, 2)
            self.assert_right(replica, model, PROMPTS[0], 2)

    def check_streams(self, served: tuple[Cluster, Replica], path: Path, mode: str, statuses: set[int]) -> None:
        """Updates while eight streams generate: who was let in gets all of his tokens. statuses: that may come."""
        cluster, replica = served
        models = [model_of(path, seed) for seed in (80, 81)]
        live = live_model(path)
        seen: list[int] = []

        def ask() -> list[int]:
            response = self.complete(replica, [3, 5, 7], 60)
            seen.append(response.status_code)
            return self.tokens(response) if response.status_code == 200 else []

        with Trainer(cluster.address, lineage=f"streams-{mode}") as trainer:
            trainer.publish(live, move=True)
            load(live, models[0])
            update(trainer, replica, 0, pause_mode=mode)
            streams = [Stream(ask) for _ in range(8)]
            try:
                for version in range(1, 11):
                    load(live, models[version % 2])
                    update(trainer, replica, version, pause_mode=mode)
            finally:
                answers: list[Any] = [answer for stream in streams for answer in stream.end()]
            assert set(seen) <= statuses
            assert {len(answer) for answer in answers if answer} == {60}
            self.assert_right(replica, models[0], PROMPTS[1], 10)

    def check_hybrid(self, served: tuple[Cluster, Replica], path: Path, level: int, *, same_again: bool) -> None:
        """The replica gives its memory up, the trainer uses it, the update wakes the replica with the right tokens. The
        prompt is asked before and after: a prefix cache that survived would answer with the old weights' keys.

        same_again: an answer out of the prefix cache is the first one's to the token.
        """
        cluster, replica = served
        live = live_model(path)
        model = model_of(path, 20)
        with Trainer(cluster.address, lineage=f"hybrid-{level}") as trainer:
            trainer.publish(live, move=True)
            load(live, model)
            update(trainer, replica, 0)
            for version in (1, 2):
                # The second answer comes from the prefix cache.
                before = [self.assert_right(replica, model, PROMPTS[2], version - 1) for _ in range(2)]
                assert before[0] == before[1] or not same_again
                awake = free_bytes()
                sleep(cluster, level)
                asleep = free_bytes()
                assert asleep - awake > 0.9 * self.cache_bytes, f"sleep level {level} freed {asleep - awake} bytes"
                check_closed(self.complete, replica)
                train_step(live, awake + int(0.8 * (asleep - awake)))
                assert free_bytes() > awake + 0.8 * (asleep - awake), "the step's memory is free again"
                model = model_of(path, 20 + version)
                load(model, live)
                update(trainer, replica, version)
                assert free_bytes() < awake + 0.1 * self.cache_bytes, "weights and cache are back"
                lost = max(regrets(model, PROMPTS[2], before[0]))
                assert lost > 3 * ROUNDING, f"the step changed too little to prove anything: {lost}"
                self.assert_right(replica, model, PROMPTS[2], version)


def train_step(live: Any, room: int) -> None:
    """A real step that needs `room` bytes more than the weights: they must really be free."""
    activations = torch.empty(room, dtype=torch.uint8, device=DEVICE).fill_(1)
    # torch 2.14's backward pass of it wants a newer cuDNN than many hosts have.
    torch.backends.cuda.enable_cudnn_sdp(False)
    optimizer = torch.optim.SGD(live.parameters(), lr=0.5)
    batch = torch.randint(0, 512, (8, 32), device=DEVICE)
    live(input_ids=batch, labels=batch).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    assert int(activations[-1]) == 1
    del activations


def sleep(cluster: Cluster, level: int, seconds: float = 60.0) -> None:
    """All replicas of the cluster; AssertionError with what a replica says against it."""
    stub = ManagerStub(cluster.channel)
    response = stub.Sleep(manager_pb2.SleepRequest(level=level, timeout_seconds=seconds), timeout=seconds + 10)
    assert response.results
    for result in response.results:
        assert not result.HasField("problem"), f"{result.replica}: {result.problem.message}"


def free_bytes() -> int:
    """As the driver counts them (cuMemGetInfo), after this process has given back what it does not use."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]
