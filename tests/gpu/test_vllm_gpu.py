"""vLLM on a GPU, fed from live parameters of a trainer on the same GPU: every update exact, with CUDA graphs and
without, while requests run, and in hybrid mode. The trainer is this process.

Greedy tokens are judged twice. A vLLM server that loaded the same weights from files runs the same kernels, so its
tokens are equal. transformers on the CPU sums in another order: there each token must be, but for rounding, the best.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_engine import Trainer
from tests.cluster import Replica, Stream, corrupt_after_sealing, outcomes
from tests.engines.serving import model_of
from tests.engines.test_vllm_models import build, qwen3_mixture
from tests.engines.vllm_server import TOKENS, assert_closed, complete, tokens
from tests.gpu.gpu_server import KV_BYTES, Fleet, free_bytes, needs_gpu_vllm, plain_vllm, sleep, wait_for_plain
from tests.tiny_model import make_tiny_qwen3, regrets

pytestmark = [*needs_gpu_vllm, pytest.mark.timeout(400)]

DEVICE = "cuda"
FRESH = 7  # the seed of the weights that a server of its own loads from files
ROUNDING = 0.8  # logits; of other weights' tokens the worst is several away
PROMPTS = [[5, 6, 7], [400, 3, 77, 12, 9], list(range(100, 148))]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """All servers of this module, started at once."""
    path = tmp_path_factory.mktemp("fleet")
    make_tiny_qwen3(path / "bare", weights=False)
    make_tiny_qwen3(path / "bare-tied", weights=False, tied=True)
    mixture = qwen3_mixture()
    mixture.dtype = torch.bfloat16
    mixture.save_pretrained(path / "bare-mixture")
    with contextlib.ExitStack() as stack:
        fleet = Fleet(path, stack)
        fleet.start("graphs", path / "bare", "--enable-sleep-mode", options=("--mode", "hybrid"))
        fleet.start("eager", path / "bare", "--enforce-eager")
        fleet.start("tied", path / "bare-tied")
        fleet.start("mixture", path / "bare-mixture")
        yield fleet


@pytest.fixture(scope="module")
def fresh(fleet: Fleet) -> Iterator[Any]:
    """A server that loads version FRESH from files with its own loader."""
    make_tiny_qwen3(fleet.path / "fresh", FRESH)
    with plain_vllm(fleet.path / "fresh", fleet.path / "fresh.log", "--enforce-eager") as server:
        yield server


def live_model(path: Path, **options: Any) -> Any:
    return model_of(path, 99, **options).to(DEVICE)


def load(live: Any, model: Any) -> None:
    with torch.no_grad():
        for mine, theirs in zip(live.parameters(), model.parameters(), strict=True):
            mine.copy_(theirs)


def update(trainer: Trainer, replica: Replica, version: int, **arguments: Any) -> Any:
    """An update that must succeed, over CUDA IPC alone, every byte verified."""
    report = trainer.update_weights(version=version, **arguments)
    assert report.ok, f"{report}\n{replica.tail()}"
    assert report.verified
    assert [use.transport for use in report.replicas[0].transports] == ["cuda_ipc"]
    return report


def assert_right(replica: Replica, model: Any, prompt: list[int], version: int) -> list[int]:
    """The tokens after `prompt`, which must be `model`'s own, and the header's version."""
    response = complete(replica, prompt)
    found = tokens(response)
    regret = regrets(model, prompt, found)
    assert len(found) == TOKENS
    assert max(regret) < ROUNDING, f"version {version}: logits lost with each token: {[round(r, 2) for r in regret]}"
    assert response.headers["x-ckpt-engine-admitted-version"] == str(version)
    return found


@pytest.mark.parametrize(("kind", "updates"), [("graphs", 20), ("eager", 20), ("tied", 5)])
def test_updates_from_live_parameters(fleet: Fleet, fresh: Any, tmp_path: Path, kind: str, updates: int) -> None:
    cluster, replica = fleet.ready(kind)
    options = {"tied": kind == "tied"}
    live = live_model(tmp_path, **options)
    addresses = [parameter.data_ptr() for parameter in live.parameters()]
    with Trainer(cluster.address, lineage=f"live-{kind}") as trainer:
        assert_closed(replica)
        trainer.publish(live)
        for version in range(updates):
            model = model_of(tmp_path, version, **options)
            load(live, model)
            report = update(trainer, replica, version)
            (worker,) = report.replicas[0].message.workers
            assert worker.verified + worker.verified_as_loaded == len(list(live.parameters()))
            assert report.message.source_copies == 0
            for prompt in PROMPTS:
                assert_right(replica, model, prompt, version)
            if kind == "eager" and version == FRESH:
                wait_for_plain(fresh)
                for prompt in PROMPTS:
                    assert tokens(complete(replica, prompt)) == tokens(complete(fresh, prompt)), prompt
        assert addresses == [parameter.data_ptr() for parameter in live.parameters()]


def test_a_mixture_of_experts(fleet: Fleet, tmp_path: Path) -> None:
    cluster, replica = fleet.ready("mixture")
    config = qwen3_mixture()
    config.dtype = torch.bfloat16
    live: dict[str, torch.Tensor] = {}
    with Trainer(cluster.address, lineage="mixture") as trainer:
        for version in range(4):
            model, weights = build(config, version, tmp_path / str(version))
            if not live:
                live = {name: tensor.to(DEVICE) for name, tensor in weights.items()}
                trainer.publish(live)
            for name, tensor in weights.items():
                live[name].copy_(tensor)
            update(trainer, replica, version)
            for prompt in PROMPTS:
                assert_right(replica, model, prompt, version)


def test_a_corrupt_slice_closes_the_gate_until_the_next_good_update(fleet: Fleet, tmp_path: Path) -> None:
    cluster, replica = fleet.ready("eager")
    model = model_of(tmp_path, 70)
    live = model_of(tmp_path, 70).to(DEVICE)
    tensor = dict(live.named_parameters())["model.layers.1.self_attn.o_proj.weight"]
    with Trainer(cluster.address, lineage="corrupt") as trainer:
        trainer.publish(live)
        restore = corrupt_after_sealing(trainer, tensor, 7)
        report = trainer.update_weights(version=1)
        restore()
        assert outcomes(report) == {"eager": "quarantined"}
        assert "o_proj" in report.replicas[0].problem
        assert_closed(replica)
        load(live, model)
        update(trainer, replica, 2)
        assert_right(replica, model, PROMPTS[0], 2)


@pytest.mark.parametrize("mode", ["keep", "in_place"])
def test_updates_while_streams_generate(fleet: Fleet, tmp_path: Path, mode: str) -> None:
    """CUDA graphs are replayed right after each update; a request that was let in ends as it should."""
    cluster, replica = fleet.ready("graphs")
    models = [model_of(tmp_path, seed) for seed in (80, 81)]
    live = live_model(tmp_path)
    statuses: list[int] = []

    def ask() -> list[int]:
        response = complete(replica, [3, 5, 7], 60)
        statuses.append(response.status_code)
        return tokens(response) if response.status_code == 200 else []

    with Trainer(cluster.address, lineage=f"streams-{mode}") as trainer:
        trainer.publish(live)
        load(live, models[0])
        update(trainer, replica, 0, pause_mode=mode)
        streams = [Stream(ask) for _ in range(8)]
        try:
            for version in range(1, 11):
                load(live, models[version % 2])
                update(trainer, replica, version, pause_mode=mode)
        finally:
            answers = [answer for stream in streams for answer in stream.end()]
        assert set(statuses) <= {200, 503}
        assert {len(answer) for answer in answers if answer} == {60}
        assert_right(replica, models[0], PROMPTS[1], 10)


def train_step(live: Any, room: int) -> None:
    """A real step that needs `room` bytes more than the weights: they must really be free."""
    activations = torch.empty(room, dtype=torch.uint8, device=DEVICE).fill_(1)
    optimizer = torch.optim.SGD(live.parameters(), lr=0.5)
    batch = torch.randint(0, 512, (8, 32), device=DEVICE)
    live(input_ids=batch, labels=batch).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    assert int(activations[-1]) == 1
    del activations


@pytest.mark.parametrize("level", [1, 2])
def test_hybrid_sleep_train_update_serve(fleet: Fleet, tmp_path: Path, level: int) -> None:
    """The replica gives its memory up, the trainer uses it, the update wakes the replica with the right tokens. The
    prompt is asked before and after: a prefix cache that survived would answer with the old weights' keys."""
    cluster, replica = fleet.ready("graphs")
    live = live_model(tmp_path)
    model = model_of(tmp_path, 20)
    with Trainer(cluster.address, lineage=f"hybrid-{level}") as trainer:
        trainer.publish(live)
        load(live, model)
        update(trainer, replica, 0)
        for version in (1, 2):
            # The second answer comes from the prefix cache.
            before = [assert_right(replica, model, PROMPTS[2], version - 1) for _ in range(2)]
            assert before[0] == before[1]
            awake = free_bytes()
            sleep(cluster, level)
            asleep = free_bytes()
            assert asleep - awake > 0.9 * KV_BYTES, f"sleep level {level} freed {asleep - awake} bytes"
            assert_closed(replica)
            train_step(live, awake + int(0.8 * (asleep - awake)))
            assert free_bytes() > awake + 0.8 * (asleep - awake), "the step's memory is free again"
            model = model_of(tmp_path, 20 + version)
            load_trained(model, live)
            update(trainer, replica, version)
            assert free_bytes() < awake + 0.1 * KV_BYTES, "weights and cache are back"
            lost = max(regrets(model, PROMPTS[2], before[0]))
            assert lost > 3 * ROUNDING, f"the step changed too little to prove anything: {lost}"
            assert_right(replica, model, PROMPTS[2], version)


def load_trained(model: Any, live: Any) -> None:
    with torch.no_grad():
        for mine, theirs in zip(model.parameters(), live.parameters(), strict=True):
            mine.copy_(theirs)
