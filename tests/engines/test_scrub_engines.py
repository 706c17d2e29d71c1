"""The scrub in real engines on the CPU: no false alarm under updates at once, and a flipped byte is found and mended.

On a CPU vLLM and SGLang repack their linear layers, so what a scrub can compare there are norms and what is not packed;
the rest is told with its bytes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_engine import Trainer
from tests.cluster import Replica, running_cluster
from tests.conformance.engines import ENGINES, Engine
from tests.conformance.server import check_serves
from tests.conformance.weights import Models, load
from tests.flipping import flip_in
from tests.waiting import eventually

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1200)]

UPDATES = 12
NAME = "model.norm.weight"


def scrubs(replica: Replica) -> list[Any]:
    status = replica.status
    return [] if status is None else list(status.scrubs)


@pytest.mark.parametrize("engine", [pytest.param(each, id=each.kind) for each in ENGINES if each.kind != "reference"])
def test_a_flipped_byte_is_found_and_mended_and_no_update_is_one(tmp_path: Path, engine: Engine) -> None:
    if reason := engine.why_not_here():
        pytest.skip(reason)
    torch.set_num_threads(1)
    models = Models(tmp_path / "models")
    with running_cluster(tmp_path / "cluster") as cluster, Trainer(cluster.address, lineage="run") as trainer:
        replica = engine.start(cluster, "first", models.bare, ("--scrub-seconds", "0.2"), {})
        replica.registered(engine.start_seconds)
        live = models.live(0)
        trainer.publish(live, snapshot=True)
        for version in range(1, UPDATES + 1):
            load(live, models[version % 2])
            report = trainer.update_weights(version=version)
            assert report.ok, f"{report}\n{replica.tail()}"
        eventually("whole passes", 120, lambda: all(each.passes > 2 for each in scrubs(replica)) and scrubs(replica))
        assert [each.differences for each in scrubs(replica)] == [0], replica.tail()
        (scrub,) = scrubs(replica)
        assert scrub.bytes > 0
        assert scrub.bytes + sum(each.bytes for each in scrub.unscrubbed) > 0.9 * sum(
            parameter.nbytes for parameter in live.parameters()
        )

        (worker,) = replica.workers()
        flip_in(worker.pid, dict(live.named_parameters())[NAME])
        eventually("it is found", 120, lambda: [each.differences for each in scrubs(replica)] == [1])
        replica.serving(UPDATES)
        status = replica.status
        assert status is not None
        (found,) = status.last_outcome.differences
        assert (found.tensor, list(found.start), found.identity.version) == (NAME, [0], UPDATES)
        check_serves(engine, replica, models, UPDATES % 2, UPDATES)
