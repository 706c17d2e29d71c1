"""Real engines whose every byte comes by way of a relay: updates from a trainer that changes its weights at once, going
back by the command line, and a server that comes when everybody else has gone."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from ckpt_engine import Trainer
from ckpt_engine.v1 import manager_pb2
from tests.cluster import Cluster, Relay, Replica, running_cluster
from tests.conformance.engines import ENGINES, Engine
from tests.conformance.server import check_serves
from tests.conformance.weights import Models, load

pytestmark = pytest.mark.timeout(1200)  # engines start slowly on a busy machine

MARKS = {"reference": pytest.mark.slow}
LAST = 10
FROM_THE_RELAY = {("relay near", "relay_memory")}


@dataclass
class Site:
    """One host with a relay and one server."""

    engine: Engine
    cluster: Cluster
    models: Models
    relay: Relay
    replica: Replica

    def start(self, name: str) -> Replica:
        """A server on the same host, not waited for."""
        return self.engine.start(self.cluster, name, self.models.bare, (), {})

    def trainer(self) -> Trainer:
        return Trainer(self.cluster.address, lineage="run")

    def check(self, report: Any, version: int) -> None:
        """The update ended well for all, verified, and nobody read the trainer."""
        assert report.ok, f"{report}\n{self.replica.tail()}"
        assert (report.version, report.verified) == (version, True)
        for replica in report.replicas:
            assert sources(replica.message.edges) == FROM_THE_RELAY


def sources(edges: Iterable[manager_pb2.EdgeReport]) -> set[tuple[str, str]]:
    return {(edge.source, edge.transport) for edge in edges}


def spoil(live: Any) -> None:
    """What a trainer does that goes on at once: whoever read its weights now would generate nonsense."""
    with torch.no_grad():
        for parameter in live.parameters():
            parameter.fill_(float("nan"))


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(engine, id=engine.kind, marks=MARKS.get(engine.kind, pytest.mark.engine)) for engine in ENGINES
    ],
)
def site(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    engine: Engine = request.param
    if reason := engine.why_not_here():
        pytest.skip(reason)
    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp(engine.kind)
    models = Models(path / "models")
    with running_cluster(path / "cluster") as cluster:
        replica = engine.start(cluster, "first", models.bare, (), {})
        relay = cluster.relay("near", "--memory", "64MiB").registered()
        replica.registered(engine.start_seconds)
        yield Site(engine, cluster, models, relay, replica)


def test_ten_updates_by_way_of_a_relay_and_back_to_the_ninth(site: Site) -> None:
    """Some are waited for until they are held only; nothing is waited for between the last two."""
    live = site.models.live(0)

    def updated(version: int, until: str) -> Any:
        load(live, site.models[version])
        report = trainer.update_weights(version=version, prefetch="always", until=until)
        spoil(live)
        return report

    with site.trainer() as trainer:
        trainer.publish(live, move=True)
        for version in range(1, LAST - 1):
            report = updated(version, "held" if version % 2 else "installed")
            if version % 2:
                assert report.held, report
                report = trainer.wait(version)
            site.check(report, version)
            check_serves(site.engine, site.replica, site.models, version, version)
        for version in (LAST - 1, LAST):
            assert updated(version, "held").held
        for version in (LAST - 1, LAST):
            site.check(trainer.wait(version), version)
        check_serves(site.engine, site.replica, site.models, LAST, LAST)

    command = [sys.executable, "-m", "ckpt_engine", "rollback", "--manager", site.cluster.address]
    back = subprocess.run(
        [*command, "--version", str(LAST - 1), "--json"], capture_output=True, text=True, timeout=300, check=False
    )
    assert back.returncode == 0, f"{back.stdout}\n{back.stderr}\n{site.replica.tail()}"
    told = json.loads(back.stdout)
    assert (told["ok"], told["verified"], told["identity"]["version"]) == (True, True, str(LAST - 1))
    check_serves(site.engine, site.replica, site.models, LAST - 1, LAST - 1)
    status = site.replica.status
    assert status is not None
    assert sources(status.last_outcome.edges) == FROM_THE_RELAY
    assert sorted(site.relay.held) == [LAST - 1, LAST]


def test_a_late_server_is_brought_up_when_only_relay_and_manager_are_left(site: Site) -> None:
    """The trainer has ended, the server before it too, and the manager is a new one."""
    live = site.models.live(LAST + 1)
    with site.trainer() as trainer:
        trainer.publish(live, move=True)
        held = trainer.update_weights(prefetch="always", until="held")
        spoil(live)
        site.check(trainer.wait(held.version), held.version)
    site.replica.stop()
    site.cluster.restart_manager()
    late = site.start("late").registered(site.engine.start_seconds).serving(held.version)
    check_serves(site.engine, late, site.models, LAST + 1, held.version)
    status = late.status
    assert status is not None
    assert sources(status.last_outcome.edges) == FROM_THE_RELAY
