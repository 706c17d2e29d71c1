"""A replica that may read over one transport only: what cannot reach it is refused, and it is not touched."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckpt_engine import CkptEngineError, Trainer
from tests.cluster import outcomes, running_cluster
from tests.end_to_end.conftest import PADDED_VOCABULARY
from tests.tiny_model import make_tiny_qwen3

pytestmark = pytest.mark.slow


def test_an_impossible_transport_is_named_and_its_replica_not_touched(tmp_path: Path, bare_model: Path) -> None:
    model = make_tiny_qwen3(tmp_path / "model", 3, vocabulary=PADDED_VOCABULARY)
    with running_cluster(tmp_path / "cluster") as cluster:
        cluster.replica("any", "reference", bare_model)
        cluster.replica("files", "reference", bare_model, options=["--transport", "file"])
        for replica in cluster.replicas:
            replica.registered()
        with Trainer(cluster.address, lineage="memory") as trainer:
            trainer.publish(model, move=True)
            with pytest.raises(CkptEngineError) as caught:
                trainer.update_weights(min_replicas=2)
            for word in ("files", "shared_memory", "it can use file", "--transport"):
                assert word in str(caught.value)
            for replica in cluster.status().replicas:
                assert not replica.identity.lineage, "nobody was touched"
                assert not replica.HasField("last_outcome")
            report = trainer.update_weights()
            assert not report.ok, "one of two was left out"
            assert outcomes(report) == {"any": "new_serving", "files": "quarantined"}
            assert [use.transport for use in report.replicas[0].transports] == ["shared_memory"]
            assert "it can use file" in str(report.replicas[1].problem)
            assert not report.replicas[1].message.HasField("after")
        with Trainer(cluster.address, lineage="files") as trainer:
            trainer.publish(tmp_path / "model")
            report = trainer.update_weights()
            assert outcomes(report) == {"any": "new_serving", "files": "new_serving"}
            for each in report.replicas:
                assert [use.transport for use in each.transports] == ["file"]
                assert "share host" in each.transports[0].reason
