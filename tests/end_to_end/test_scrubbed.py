"""A byte that changes in a worker's parameters behind our back, on real processes: found, named, mended."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from ckpt_engine import Trainer
from tests.cluster import Cluster, Replica, generate, running_cluster
from tests.command_line import run
from tests.end_to_end.conftest import PADDED_VOCABULARY
from tests.flipping import flip_in
from tests.ports import free_address
from tests.tiny_model import make_tiny_qwen3, reference_tokens
from tests.waiting import eventually

PROMPT = [3, 1, 4, 1, 5]
NAME = "model.layers.0.mlp.down_proj.weight"


@pytest.fixture
def http() -> str:
    return free_address()


@pytest.fixture
def cluster(tmp_path: Path, http: str) -> Iterator[Cluster]:
    with running_cluster(tmp_path / "cluster", http=http) as found:
        yield found


def differences(replica: Replica) -> int:
    status = replica.status
    return 0 if status is None else sum(each.differences for each in status.scrubs)


def hashed(replica: Replica) -> bool:
    status = replica.status
    return bool(status and status.scrubs and all(each.passes for each in status.scrubs))


def test_a_flipped_byte_closes_the_replica_until_the_version_is_brought_again(
    tmp_path: Path, bare_model: Path, cluster: Cluster, http: str
) -> None:
    model = make_tiny_qwen3(tmp_path / "model", 3, vocabulary=PADDED_VOCABULARY, weights=False)
    tokens = reference_tokens(model, PROMPT, 5).tokens
    weights = dict(model.named_parameters())
    replica = cluster.replica("one", "reference", bare_model, options=["--scrub-seconds", "1"]).registered()
    with Trainer(cluster.address, lineage="scrubbed") as trainer:
        trainer.publish(model, snapshot=True)
        assert trainer.update_weights().ok
        eventually("a whole pass", 60, lambda: hashed(replica))
        assert differences(replica) == 0

        flip_in(replica.workers()[0].pid, weights[NAME])
        eventually("it is found", 120, lambda: differences(replica) == 1)
        replica.serving(0)
        assert generate(replica, PROMPT, 5) == tokens
        status = replica.status
        assert status is not None
        (found,) = status.last_outcome.differences
        assert (found.tensor, found.rank, found.identity.version) == (NAME, 0, 0)
        assert (list(found.start), list(found.stop)) == ([0, 0], list(weights[NAME].shape))
        assert f"what lies in {NAME}[" in replica.tail(400)

        # Nothing has the version any more: it stays closed, with the reason, until the next update.
        trainer.withdraw()
        flip_in(replica.workers()[0].pid, weights[NAME])
        eventually("it is closed", 120, lambda: (now := replica.status) and NAME in now.closed_reason)
        assert httpx.post(f"{replica.url}/generate", json={"input_ids": PROMPT, "max_tokens": 1}).status_code == 503
        said = run("status", "--manager", cluster.address).output
        assert "2 differences, the last: what lies in" in " ".join(said.split())

        trainer.publish(model, snapshot=True)
        report = trainer.update_weights()
        assert report.ok
        assert f"one: had been closed: what lies in {NAME}[" in report.details
        assert generate(replica, PROMPT, 5) == tokens
    metrics = httpx.get(f"http://{http}/metrics").text
    assert "ckpt_engine_scrub_differences_total 2.0" in metrics
    assert 'ckpt_engine_replica_scrub_differences{replica="one"} 2.0' in metrics
