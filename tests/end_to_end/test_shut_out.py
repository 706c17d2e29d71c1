"""A replica whose engine may not open the trainer's memory, although its probe could: it runs without capabilities."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpt_engine import Trainer
from tests.cluster import eventually, outcomes, running_cluster
from tests.end_to_end.conftest import PADDED_VOCABULARY
from tests.tiny_model import make_tiny_qwen3

PR_SET_DUMPABLE = 4

WITHOUT_CAPABILITIES = """
import ctypes, os, sys
for capability in range(64):
    ctypes.CDLL(None).prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP
os.execvp(sys.argv[1], sys.argv[1:])
"""

pytestmark = pytest.mark.slow


@pytest.fixture
def unreadable() -> Iterator[None]:
    """Nobody without CAP_SYS_PTRACE opens this process's memory files: it may not be dumped."""
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) == 0
    yield
    libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)


def test_who_may_not_open_the_trainers_memory_is_told_and_gets_it_from_a_relay(
    tmp_path: Path, bare_model: Path, unreadable: None
) -> None:
    model = make_tiny_qwen3(tmp_path / "model", 3, vocabulary=PADDED_VOCABULARY)
    with running_cluster(tmp_path / "cluster") as cluster:
        cluster.before = [sys.executable, "-c", WITHOUT_CAPABILITIES]
        replica = cluster.replica("shut", "reference", bare_model).registered()
        with Trainer(cluster.address, lineage="shut") as trainer:
            trainer.publish(model, move=True)
            report = trainer.update_weights()
            assert outcomes(report) == {"shut": "quarantined"}, "an engine that has just begun holds nothing"
            said = str(report.replicas[0].problem)
            assert "reader and owner must be processes of one user" in said
            assert report.replicas[0].pause_seconds == 0
            report = trainer.update_weights()
            assert outcomes(report) == {"shut": "quarantined"}, "nothing else is open to it, so it has tried again"
            if os.geteuid():
                return  # nobody without privileges opens it, so neither would a relay
            cluster.relay("beside").registered()
            report = trainer.update_weights()
            assert outcomes(report) == {"shut": "new_serving"}
            assert {use.transport for use in report.replicas[0].transports} == {"relay_memory"}
            status = replica.status
            assert status is not None
            assert [each.transport for each in status.unopened] == ["shared_memory"]
            eventually("it serves", 60, lambda: (status := replica.status) is not None and status.serving)
