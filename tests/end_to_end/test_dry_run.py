"""`ckpt-engine update --dry-run` and `Trainer.update_weights(dry_run=True)` on real engines, one with another model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import Result

from ckpt_engine import Trainer
from tests.cluster import running_cluster
from tests.command_line import run
from tests.tiny_model import make_tiny_qwen3

pytestmark = pytest.mark.slow


def test_a_dry_run_tells_what_an_update_then_does(tmp_path: Path, bare_model: Path) -> None:
    torch.set_num_threads(1)
    make_tiny_qwen3(tmp_path / "other", vocabulary=300, weights=False)
    make_tiny_qwen3(tmp_path / "trained", 7, vocabulary=500)
    with running_cluster(tmp_path / "cluster") as cluster:
        fitting = cluster.replica("fitting", "reference", bare_model).registered()
        other = cluster.replica("other", "reference", tmp_path / "other").registered()

        def update(*options: str) -> Result:
            return run("update", "--manager", cluster.address, "--checkpoint", str(tmp_path / "trained"), *options)

        told = update("--dry-run", "-v")
        assert told.exit_code == 1, told.output
        assert "dry run of version 0 of checkpoint: an update would bring" in told.stdout
        assert "to 1 of 2 replicas, NOT OK" in told.stdout
        assert "  worker 0 from rank 0: " in told.stdout
        assert "other: " in told.stdout
        assert "loading" in told.stdout
        enough = update("--dry-run", "--json", "--min-replicas", "1")
        assert enough.exit_code == 0, enough.output
        report = json.loads(enough.stdout)
        assert (report["dry_run"], report["ok"], report["identity"]["root"]) == (True, True, "")
        planned = next(each for each in report["replicas"] if each["replica"] == "fitting")
        assert planned["outcome"] == "OUTCOME_PLANNED"
        assert int(planned["bytes"]) > 0
        assert sum(int(each["bytes"]) for each in planned["edges"]) == int(planned["bytes"])
        assert [each.identity.version for each in cluster.status().replicas if each.HasField("identity")] == []
        assert not cluster.status().HasField("latest")
        missing = update("--dry-run", "--min-replicas", "2")
        assert missing.exit_code == 1
        assert "warning: the update would be refused: 1 replicas can be updated, 2 are required" in missing.stdout

        done = update("--json", "--min-replicas", "1")
        assert done.exit_code == 0, done.output
        installed = json.loads(done.stdout)
        assert installed["identity"]["version"] == "0", "no number was used"
        assert next(each for each in installed["replicas"] if each["replica"] == "fitting")["bytes"] == planned["bytes"]
        fitting.serving(0)
        assert not other.status.serving  # type: ignore[union-attr]

        with Trainer(cluster.address, lineage="run") as trainer:
            trainer.publish(make_tiny_qwen3(tmp_path / "model", 8, vocabulary=500, weights=False))
            foreseen = trainer.update_weights(dry_run=True, replicas=["fitting"])
            assert (foreseen.dry_run, foreseen.ok, foreseen.version) == (True, True, 0)
            assert foreseen.replicas[0].transports
            fitting.serving(0)
            assert trainer.update_weights(replicas=["fitting"]).verified
