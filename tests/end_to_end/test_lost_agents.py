"""What `status`, the page and the report say of a replica whose agent is killed in its install, from then until another
agent has it: what it is at that moment."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from ckpt_engine import Trainer
from ckpt_engine.core.deadlines import ENVIRONMENT
from ckpt_engine.trace import ENVIRONMENT as TRACE
from tests.cluster import eventually, outcomes, running_cluster
from tests.command_line import run
from tests.end_to_end.conftest import PADDED_VOCABULARY
from tests.end_to_end.test_missing_replicas import attached
from tests.faults.listener import Listener
from tests.ports import free_address
from tests.reference.engine_process import engine
from tests.tiny_model import make_tiny_qwen3

pytestmark = pytest.mark.slow


def test_a_replica_whose_agent_is_killed_in_its_install_is_told_as_what_it_is(
    tmp_path: Path, bare_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call says that it is quarantined, since nobody knows better then."""
    monkeypatch.setenv(ENVIRONMENT, "lease=15")
    torch.set_num_threads(1)
    model = make_tiny_qwen3(tmp_path / "model", 3, vocabulary=PADDED_VOCABULARY)
    http = free_address()
    with Listener(tmp_path / "trace") as listener:
        monkeypatch.setenv(TRACE, str(listener.path))
        with (
            running_cluster(tmp_path / "cluster", http=http) as cluster,
            engine(bare_model, tmp_path / "engine.log") as server,
            Trainer(cluster.address, lineage="run") as trainer,
        ):

            def shown() -> tuple[dict[str, Any], dict[str, Any], str]:
                """The replica by the HTTP side and on the page, and what `ckpt-engine status` prints."""
                (replica,) = httpx.get(f"http://{http}/v1/replicas", timeout=60).json()["replicas"]
                (line,) = httpx.get(f"http://{http}/v1/overview", timeout=60).json()["replicas"]
                status = json.loads(run("status", "--manager", cluster.address, "--json").stdout)
                assert all(status["replicas"][0][word] == replica[word] for word in ("connected", "serving"))
                return replica, line, run("status", "--manager", cluster.address).stdout

            beside = attached(cluster, "beside", server.url)
            beside.registered()
            trainer.publish(model, snapshot=True)
            assert trainer.update_weights(version=0).ok
            (worker,) = beside.workers()
            reports: list[Any] = []
            with listener.holding("worker.install.transfer", lambda pid: pid == worker.pid) as held:
                update = threading.Thread(
                    target=lambda: reports.append(trainer.update_weights(version=1, timeout=60.0))
                )
                update.start()
                assert held.wait(60)
                beside.process.kill()
                beside.process.wait(30)
            update.join(120)
            (report,) = reports
            assert outcomes(report) == {"beside": "quarantined"}
            assert "it was lost while installing" in report.replicas[0].problem
            replica, line, printed = shown()
            assert (replica["connected"], line["watched"]["state"]) == (False, "REPLICA_STATE_AWAY"), printed
            assert replica["last_outcome"]["outcome"] == "OUTCOME_NEW_SERVING", "the outcome of the update before"

            again = attached(cluster, "beside", server.url)
            again.serving(1)
            eventually("the report is told anew", 60, lambda: trainer.wait(1).ok)
            assert outcomes(trainer.wait(1)) == {"beside": "new_serving"}
            replica, line, printed = shown()
            seen = line["watched"]
            assert (replica["serving"], seen["state"], seen["reason"]) == (True, "REPLICA_STATE_SERVING", ""), printed
            assert replica["identity"]["version"] == seen["identity"]["version"] == "1"
            (_, updated) = sorted(
                httpx.get(f"http://{http}/v1/history", timeout=60).json()["updates"],
                key=lambda each: int(each["epoch"]),
            )
            assert updated["outcomes"] == [{"outcome": "OUTCOME_NEW_SERVING", "replicas": 1}], updated
            assert updated["ok"]
