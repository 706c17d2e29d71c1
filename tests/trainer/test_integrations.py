"""What training frameworks get of an update that not every replica took."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from plain_replica import PlainReplica

from ckpt_engine import CkptEngineError
from ckpt_engine.integrations.updates import RankUpdates
from ckpt_engine.v1.weights_pb2 import Problem


def test_a_version_that_a_replica_does_not_serve_raises_what_it_said(
    manager: str, replica: Callable[..., PlainReplica]
) -> None:
    good, bad = replica("good"), replica("hung")
    bad.prepare_problem = Problem(code=Problem.CODE_DEADLINE_EXCEEDED, message="its engine does not answer")
    updates = RankUpdates(manager, replicas=2, lineage="run", timeout=60)
    with pytest.raises(CkptEngineError, match="call open"):
        updates.bring(1)
    updates.open({"a": torch.ones(4)})
    try:
        with pytest.raises(CkptEngineError, match="version 1 is not served by all replicas that must") as raised:
            updates.bring(1)
        problem = raised.value.problem
        assert (problem.code, problem.replica) == (Problem.CODE_DEADLINE_EXCEEDED, "hung")
        assert "its engine does not answer" in problem.message
        assert updates.version is None
        assert good.identity is not None
        assert good.identity.version == 1
        bad.prepare_problem = None
        assert updates.bring(2).ok
        assert updates.version == 2
    finally:
        updates.close()


def test_a_start_goes_back_to_a_checkpoint_under_another_lineage_also_of_one_torchrun_id(
    manager: str, replica: Callable[..., PlainReplica], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    held = replica("one")
    for last, first in ((7, 0.0), (5, 1.0)):
        updates = RankUpdates(manager, timeout=60)
        updates.open({"a": torch.full((4,), first)})
        try:
            assert updates.bring(last).lineage.startswith("job-")
        finally:
            updates.close()
        assert held.identity is not None
        assert held.identity.version == last
        assert float(held.weights["a"][0]) == first


def test_a_lineage_that_is_named_is_refused_lower_versions(manager: str, replica: Callable[..., PlainReplica]) -> None:
    held = replica("one")
    for version, said in ((7, ""), (5, "backwards")):
        updates = RankUpdates(manager, lineage="named", timeout=60)
        updates.open({"a": torch.full((4,), float(version))})
        try:
            if said:
                with pytest.raises(CkptEngineError, match=said):
                    updates.bring(version)
            else:
                updates.bring(version)
        finally:
            updates.close()
    assert held.identity is not None
    assert (held.identity.lineage, held.identity.version) == ("named", 7)
