"""vLLM with draft models on a CPU: see drafting.py. On a GPU: tests/gpu/test_vllm_drafts_gpu.py."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from ckpt_engine import Trainer
from ckpt_engine.v1.manager_pb2 import PartReport
from tests.cluster import Replica, running_cluster
from tests.engines.draft_models import KINDS
from tests.engines.drafting import check_drafts, guesses, handling, save
from tests.engines.serving import model_of
from tests.engines.vllm_server import assert_closed, assert_serves, needs_vllm, plain_vllm, start_vllm
from tests.tiny_model import make_tiny_qwen3, named_weights
from tests.waiting import eventually

pytestmark = needs_vllm


def test_the_targets_own_weights_as_its_draft_guess_right_after_each_update(tmp_path: Path) -> None:
    """A version without a draft is refused; with `draft="keep"` the old draft guesses wrong from then on."""
    make_tiny_qwen3(tmp_path / "bare", weights=False)
    settings = {"method": "draft_model", "model": str(tmp_path / "bare"), "num_speculative_tokens": 2}
    with running_cluster(tmp_path / "cluster") as cluster:
        replica = start_vllm(cluster, "own", tmp_path / "bare", "--speculative-config", json.dumps(settings))
        plain = cluster.replica("plain", "reference", tmp_path / "bare")
        replica.registered(900)
        plain.registered()
        with Trainer(cluster.address, lineage="own") as trainer:
            trainer.publish(named_weights(model_of(tmp_path, 1)))
            refused = trainer.update_weights(version=1)
            assert [each.outcome for each in refused.replicas] == ["quarantined", "new_serving"]
            assert "replica 'own' has a draft model, and the version has no weights" in refused.replicas[0].problem
            assert_closed(replica)
            for version in (2, 3):
                model = model_of(tmp_path, version)
                trainer.publish(named_weights(model), draft=dict(named_weights(model)))
                report = trainer.update_weights(version=version)
                assert report.ok, f"{report}\n{replica.tail()}"
                assert [part.handling for part in report.replicas[0].parts] == ["installed", "installed"]
                assert "plain left the draft: it has no such model" in str(report)
                assert_serves(replica, model, version)
                _, found = guesses(replica)
                assert found.accepted == found.guessed > 0
                status_says(replica, lambda guessed, accepted: accepted == guessed > 0)
            model = model_of(tmp_path, 4)
            trainer.publish(named_weights(model))
            report = trainer.update_weights(version=4, draft="keep")
            assert report.ok, f"{report}\n{replica.tail()}"
            assert handling(report).handling == PartReport.HANDLING_KEPT
            assert_serves(replica, model, 4)
            _, found = guesses(replica)
            assert found.accepted < 0.1 * found.guessed
            status_says(replica, lambda guessed, accepted: accepted < 0.1 * guessed)


def status_says(replica: Replica, fits: Callable[[int, int], bool]) -> None:
    """Asks for tokens until the manager has heard of guesses of which this is so. The agent counts from its first look
    at the version on, which may come after the first tokens."""

    def heard() -> bool:
        status = replica.status
        if status is not None and fits(status.guesses.guessed, status.guesses.accepted):
            return True
        guesses(replica)
        return False

    eventually("the manager has heard how guesses went", 120, heard)


@pytest.mark.slow
@pytest.mark.parametrize("name", list(KINDS))
def test_drafts_are_those_of_a_server_that_loaded_the_files(tmp_path: Path, name: str) -> None:
    kind = KINDS[name]
    settings = ["--speculative-config", json.dumps(kind.configure(tmp_path))]
    save(kind, tmp_path)
    with running_cluster(tmp_path / "cluster") as cluster:
        replica = start_vllm(cluster, name, tmp_path / "target", *settings)
        with plain_vllm(tmp_path / "target", tmp_path / "fresh.log", *settings) as fresh:
            replica.registered(900)
            with Trainer(cluster.address, lineage=name) as trainer:
                check_drafts(kind, tmp_path, trainer, replica, fresh, print)
