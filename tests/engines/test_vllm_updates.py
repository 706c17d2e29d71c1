"""One vLLM server on one worker: every update exact, every failure closed or harmless, the server alive."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from ckpt_engine import CkptEngineError, Trainer
from tests.cluster import Cluster, Replica, Stream, corrupt_after_sealing, outcomes, running_cluster
from tests.engines.vllm_server import (
    assert_closed,
    assert_serves,
    complete,
    model_of,
    needs_vllm,
    publish,
    start_vllm,
    tokens,
)
from tests.tiny_model import DECISIVE_GAP, make_tiny_qwen3, named_weights, reference_tokens, regrets

pytestmark = needs_vllm

PROMPT = [3, 5, 7]
O_PROJ = "model.layers.1.self_attn.o_proj.weight"
K_PROJ = "model.layers.0.self_attn.k_proj.weight"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    path = tmp_path_factory.mktemp("vllm")
    torch.set_num_threads(1)
    make_tiny_qwen3(path / "bare", weights=False)
    with running_cluster(path) as running:
        start_vllm(running, "vllm", path / "bare").registered(400)
        yield running


@pytest.fixture
def replica(cluster: Cluster) -> Replica:
    return cluster.replicas[0]


def test_dummy_weights_are_not_served(replica: Replica) -> None:
    """vLLM has started and would answer; the gate does not let it."""
    assert_closed(replica)
    for path in ("/pause", "/update_weights", "/collective_rpc", "/sleep", "/reset_prefix_cache"):
        assert httpx.post(replica.url + path, json={}, timeout=30).status_code == 403, path


def test_twenty_different_updates(cluster: Cluster, replica: Replica, tmp_path: Path) -> None:
    live = model_of(tmp_path, 99)
    with Trainer(cluster.address, lineage="twenty") as trainer:
        trainer.publish(live)
        for version in range(20):
            model = model_of(tmp_path, version)
            with torch.no_grad():
                for mine, theirs in zip(live.parameters(), model.parameters(), strict=True):
                    mine.copy_(theirs)
            report = trainer.update_weights(version=version)
            assert report.ok, f"{report}\n{replica.tail()}"
            assert report.verified
            (worker,) = report.replicas[0].message.workers
            assert worker.verified + worker.verified_as_loaded == worker.tensors == len(list(live.parameters()))
            assert_serves(replica, model, version)


BAD: dict[str, Any] = {
    "missing o_proj": (lambda w: {k: v for k, v in w.items() if k != O_PROJ}, O_PROJ),
    "missing leg of a fused QKV": (lambda w: {k: v for k, v in w.items() if k != K_PROJ}, K_PROJ),
    "unknown": (lambda w: {**w, "model.layers.0.extra.weight": torch.zeros(4, dtype=torch.bfloat16)}, "extra"),
    "wrong shape": (lambda w: {**w, O_PROJ: torch.zeros(64, 128, dtype=torch.bfloat16)}, O_PROJ),
    "wrong dtype": (lambda w: {**w, O_PROJ: w[O_PROJ].float()}, O_PROJ),
}


@pytest.mark.parametrize("kind", list(BAD))
def test_bad_weights_are_refused_and_the_old_version_serves(
    cluster: Cluster, replica: Replica, tmp_path: Path, kind: str
) -> None:
    model, lineage = model_of(tmp_path, 60), f"bad-{kind}"
    change, named = BAD[kind]
    with Trainer(cluster.address, lineage=lineage) as trainer:
        publish(trainer, model)
        assert trainer.update_weights(version=1).ok
        trainer.publish(change(dict(named_weights(model))))
        with pytest.raises(CkptEngineError) as refused:
            trainer.update_weights(version=2)
        assert named in refused.value.problem.message
        assert_serves(replica, model, 1)
        better = model_of(tmp_path, 61)
        publish(trainer, better)
        assert trainer.update_weights(version=2).ok
        assert_serves(replica, better, 2)


@pytest.mark.parametrize("tensor", [O_PROJ, "model.norm.weight", "lm_head.weight"])
def test_a_corrupt_slice_closes_the_gate_until_the_next_good_update(
    cluster: Cluster, replica: Replica, tmp_path: Path, tensor: str
) -> None:
    """A tensor that is repacked, one that is read back, and one with padding."""
    model = model_of(tmp_path, 70)
    with Trainer(cluster.address, lineage=f"corrupt-{tensor}") as trainer:
        trainer.publish(model)
        restore = corrupt_after_sealing(trainer, dict(model.named_parameters())[tensor], 7)
        report = trainer.update_weights(version=1)
        restore()
        assert outcomes(report) == {"vllm": "quarantined"}
        assert tensor in report.replicas[0].problem
        assert_closed(replica)
        assert trainer.update_weights(version=2).ok
        assert_serves(replica, model, 2)


@pytest.mark.parametrize("mode", ["keep", "abort", "wait", "in_place"])
def test_fifty_updates_while_twenty_streams_generate(
    cluster: Cluster, replica: Replica, tmp_path: Path, mode: str
) -> None:
    """Every answer consists of tokens of whole versions; afterwards a new request gets the last version's tokens."""
    models = [model_of(tmp_path, seed) for seed in (80, 81)]
    live = model_of(tmp_path, 98)
    statuses: list[int] = []

    def ask() -> list[int]:
        response = complete(replica, PROMPT, 60)
        statuses.append(response.status_code)
        return tokens(response) if response.status_code == 200 else []

    with Trainer(cluster.address, lineage=f"streams-{mode}") as trainer:
        trainer.publish(live)
        load(live, models[0])
        assert trainer.update_weights(version=0, pause_mode=mode).ok
        streams = [Stream(ask) for _ in range(20)]
        try:
            for version in range(1, 51):
                load(live, models[version % 2])
                report = trainer.update_weights(version=version, pause_mode=mode)
                assert report.ok, f"{report}\n{replica.tail()}"
        finally:
            answers = [answer for stream in streams for answer in stream.end()]
        assert set(statuses) <= {200, 503}
        whole = [answer for answer in answers if answer]
        assert len(whole) >= 20
        if mode != "abort":
            assert {len(answer) for answer in whole} == {60}, "a request that was let in ends as it should"
        for answer in set(map(tuple, whole)):
            assert of_whole_versions(models, list(answer), mode), answer
        strange = reference_tokens(model_of(tmp_path, 82), PROMPT, 60).tokens
        assert not of_whole_versions(models, strange, mode), "the judge would let other weights pass"
        assert_serves(replica, models[0], 50)


def of_whole_versions(models: list[Any], answer: list[int], mode: str) -> bool:
    """Whether each token is the best one, up to rounding, after those before it.

    abort, wait: of one version from the first to the last. keep: each of either, since caches are recomputed. in_place:
    the first one; later ones come from new weights over old caches, which no model can tell.
    """
    found = [regrets(model, PROMPT, answer) for model in models]
    if mode in ("abort", "wait"):
        return min(max(each) for each in found) < DECISIVE_GAP
    best = [min(each) for each in zip(*found, strict=True)]
    return max(best[:1] if mode == "in_place" else best) < DECISIVE_GAP


def load(live: Any, model: Any) -> None:
    with torch.no_grad():
        for mine, theirs in zip(live.parameters(), model.parameters(), strict=True):
            mine.copy_(theirs)
