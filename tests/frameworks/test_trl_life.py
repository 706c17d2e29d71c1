"""A TRL run that is killed and goes on from its checkpoint: what replicas serve, and what its numbers mean."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

from tests.cluster import Cluster, eventually
from tests.frameworks.trl_runs import CLOSE, KILLED_AT, SAVED_EVERY, say
from tests.frameworks.trl_runs import LIFE_STEPS as STEPS
from tests.gateway.gateways import running_gateway


def roots(said: list[dict[str, Any]]) -> dict[int, str]:
    return {line["version"]: line["root"] for line in said if "root" in line}


def test_a_killed_run_goes_on_under_another_lineage(replicas: Cluster, tmp_path: Path) -> None:
    """Killed at step 7, it goes on from step 5, while a replica cannot be reached that serves the dead run's step 7."""
    left, away = replicas.replicas
    with running_gateway(tmp_path / "gateway.log", "--manager", replicas.address) as gateway:
        course = ("-m", "tests.frameworks.life_run"), (gateway.url, away.url)
        dead = say(replicas, tmp_path, *course[0], then=("killed", *course[1]), status=-signal.SIGKILL)
        assert list(roots(dead)) == list(range(KILLED_AT + 1))
        for replica in replicas.replicas:
            replica.serving(KILLED_AT)
        (lineage,) = {line["lineage"] for line in dead if "lineage" in line}
        away.process.send_signal(signal.SIGSTOP)
        try:
            eventually("its session is lost", 120, lambda: (status := away.status) and not status.connected)
            alive = say(replicas, tmp_path, *course[0], then=("resumed", *course[1]))
        finally:
            away.process.send_signal(signal.SIGCONT)
        assert list(roots(alive)) == list(range(SAVED_EVERY, STEPS + 1))
        (other,) = {line["lineage"] for line in alive if "lineage" in line}
        assert other != lineage
        assert roots(alive)[SAVED_EVERY] == roots(dead)[SAVED_EVERY], "what was saved is what was served"
        assert all(roots(alive)[step] != roots(dead)[step] for step in range(SAVED_EVERY + 1, KILLED_AT + 1))
        differences = [line["logprob_difference"] for line in alive if "logprob_difference" in line]
        assert len(differences) == STEPS - SAVED_EVERY
        assert max(differences) < CLOSE, "no token is of the dead run's weights"
        (refused,) = (line["refused"] for line in alive if "refused" in line)
        assert f"it serves version {KILLED_AT} of lineage '{lineage}'" in refused
        assert f", and this trainer brought version {STEPS} of {other} last" in refused
        served, held = (replica.registered().status for replica in (left, away))
        assert served is not None
        assert held is not None
        assert (served.identity.lineage, served.identity.version) == (other, STEPS)
        assert (held.identity.lineage, held.identity.version) == (lineage, KILLED_AT), "nobody is left to bring it up"
