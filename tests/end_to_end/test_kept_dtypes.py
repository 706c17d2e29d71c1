"""Replicas that keep another dtype than their neighbours: weights travel as they were sealed, by whichever way they go,
and the replica that keeps more widens them."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from copy import deepcopy
from pathlib import Path

import pytest
import torch

from ckpt_engine import Client, Trainer
from tests.cluster import Cluster, Replica, generate, outcomes, running_cluster
from tests.end_to_end.conftest import PADDED_VOCABULARY
from tests.tiny_model import decisive_prompts, make_tiny_qwen3, named_weights, reference_tokens

pytestmark = pytest.mark.slow

TOKENS = 16
FLOAT32 = ("--dtype", "float32")


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory, bare_model: Path) -> Iterator[Cluster]:
    """One replica that keeps bfloat16, and one of two workers that keeps float32."""
    torch.set_num_threads(1)
    with running_cluster(tmp_path_factory.mktemp("mixed")) as running:
        running.replica("narrow", "reference", bare_model)
        running.replica("wide", "reference", bare_model, *FLOAT32, "--tensor-parallel", "2")
        for replica in running.replicas:
            replica.registered()
        yield running


def assert_served(model: torch.nn.Module, narrow: Replica, wide: Replica) -> None:
    """Each answers as `model` does in the dtype that it keeps."""
    prompt = decisive_prompts(model, 1, TOKENS)[0]
    assert generate(narrow, prompt, TOKENS) == reference_tokens(model, prompt, TOKENS).tokens
    assert generate(wide, prompt, TOKENS) == reference_tokens(deepcopy(model).float(), prompt, TOKENS).tokens


@pytest.mark.parametrize("way", ["shared_memory", "relay_memory", "nccl"])
@pytest.mark.parametrize("trained", [torch.bfloat16, torch.float32])
def test_bfloat16_weights_for_replicas_that_keep_different_dtypes(
    mixed: Cluster, tmp_path: Path, way: str, trained: torch.dtype
) -> None:
    """Also of a trainer that holds float32, and was not told what to serve."""
    seed = 100 * (trained == torch.float32) + len(way)
    model = make_tiny_qwen3(tmp_path / "model", seed, vocabulary=PADDED_VOCABULARY, weights=False)
    size = sum(tensor.nbytes for _, tensor in named_weights(model))
    published = deepcopy(model).to(trained)
    if trained == torch.float32:
        with torch.no_grad():
            for parameter in published.parameters():
                parameter.mul_(1 + 2**-12)  # an eighth of what bfloat16 can tell apart
    if way == "relay_memory":
        mixed.relay(f"of {seed}", "--memory", "64MiB").registered()
    with Trainer(mixed.address, lineage=f"{way} of {trained}") as trainer:
        trainer.publish(published, transport="nccl" if way == "nccl" else None)
        report = trainer.update_weights(prefetch="always" if way == "relay_memory" else "never")
    assert outcomes(report) == {"narrow": "new_serving", "wide": "new_serving"}, report
    for replica in report.replicas:
        assert {use.transport for use in replica.transports} == {way}
        assert sum(edge.bytes for edge in replica.message.edges) < 1.1 * size, "norms are brought to both workers"
    assert_served(model, *mixed.replicas)
    if way == "relay_memory":
        mixed.relays[-1].end()


def test_float32_masters_of_several_ranks_are_served_as_replicas_keep_them(mixed: Cluster, tmp_path: Path) -> None:
    """Without an option: both ranks publish once more, in bfloat16, before anything is sealed."""
    models = [make_tiny_qwen3(tmp_path / str(n), 300 + n, vocabulary=PADDED_VOCABULARY, weights=False) for n in (1, 2)]
    size = sum(tensor.nbytes for _, tensor in named_weights(models[0]))
    masters = deepcopy(models[0]).float()
    with ExitStack() as stack, ThreadPoolExecutor(2) as threads:
        ranks = [stack.enter_context(Trainer(mixed.address, rank, 2, "masters")) for rank in range(2)]
        for rank, trainer in enumerate(ranks):
            trainer.publish(iter(named_weights(masters)[rank::2]))
        for model in models:
            with torch.no_grad():
                for (_, master), (_, weight) in zip(named_weights(masters), named_weights(model), strict=True):
                    master.copy_(weight).mul_(1 + 2**-12)
            for report in threads.map(lambda trainer: trainer.update_weights(), ranks):
                assert outcomes(report) == {"narrow": "new_serving", "wide": "new_serving"}, report
                (narrow,) = (each for each in report.replicas if each.name == "narrow")
                assert sum(edge.bytes for edge in narrow.message.edges) == size
            assert_served(model, *mixed.replicas)


def test_what_was_sealed_in_float32_stays_so(mixed: Cluster, tmp_path: Path) -> None:
    """A replica that keeps less comes too late, and is told what to do."""
    model = make_tiny_qwen3(tmp_path / "model", 310, vocabulary=PADDED_VOCABULARY, weights=False).float()
    with Trainer(mixed.address, lineage="stays") as trainer:
        trainer.publish(model)
        assert trainer.update_weights(replicas=["wide"]).ok
        report = trainer.update_weights()
        assert outcomes(report)["wide"] == "new_serving"
        (narrow,) = (each for each in report.replicas if each.name == "narrow")
        assert "float32, and the model keeps bfloat16" in str(narrow.problem)
        assert 'Publish with dtype="bfloat16"' in str(narrow.problem)
        trainer.publish(model)
        assert outcomes(trainer.update_weights()) == {"narrow": "new_serving", "wide": "new_serving"}


def test_a_late_replica_that_keeps_more_and_the_way_back(tmp_path: Path, bare_model: Path) -> None:
    models = [make_tiny_qwen3(tmp_path / str(n), n, vocabulary=PADDED_VOCABULARY, weights=False) for n in (1, 2)]
    with running_cluster(tmp_path / "cluster") as running:
        narrow = running.replica("narrow", "reference", bare_model)
        running.relay("keeps both", "--memory", "64MiB").registered()
        narrow.registered()
        with Trainer(running.address, lineage="run") as trainer:
            for version, model in enumerate(models, 1):
                trainer.publish(model)
                assert trainer.update_weights(version=version, prefetch="always").ok
        wide = running.replica("wide", "reference", bare_model, *FLOAT32).registered().serving(2)
        assert_served(models[1], narrow, wide)
        report = Client(running.address).rollback(1)
        assert outcomes(report) == {"narrow": "new_serving", "wide": "new_serving"}, report
        assert_served(models[0], narrow, wide)
