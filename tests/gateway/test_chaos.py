"""Updates in every pause mode and killed replicas, under hundreds of streams: no failed request, no wrong token."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ckpt_engine import CkptEngineError, Client, ErrorCode, Trainer
from tests.cluster import running_cluster
from tests.gateway.chaos import ENGINE_OPTIONS, MODES, Killer, Streams, count, judge, make_model, reasons, update_for
from tests.gateway.gateways import running_gateway

WEIGHTS = 5
KILLS_APART = 10.0


BACK_EVERY = 8
"""Every so many updates the last one is taken back, in the ten minutes."""


def play(
    path: Path, replicas: int, streams: int, seconds: float, crossed: int, late: int, rollbacks: bool = False
) -> None:
    """Runs it for so long, and longer until so many answers crossed two versions and so many legs were killed late.

    rollbacks: every so many updates the last one is taken back, from a relay that has the one before.
    """
    torch.set_num_threads(1)
    models = [make_model(path / f"weights-{number}", number) for number in range(WEIGHTS)]
    model = make_model(path / "model", 0)
    make_model(path / "bare", weights=False)
    own = {"CKPT_ENGINE_RELAY_DIRECTORY": str(path / "relays")}  # this host may have a relay
    with running_cluster(path) as cluster:
        for number in range(replicas):
            cluster.replica(f"r{number}", "reference", path / "bare", *ENGINE_OPTIONS, environment=own)
        for replica in cluster.replicas:
            replica.registered()
        if rollbacks:
            cluster.relay("relay", environment=own).registered()
        options = ("--manager", cluster.address, "--workers", "2")
        with Trainer(cluster.address, lineage="run") as trainer, running_gateway(path / "g.log", *options) as gateway:
            trainer.publish(model, move=True)
            assert trainer.update_weights(version=0).ok
            gateway.ready()
            callers = Streams(gateway.url, streams, seed=1)
            killer = Killer(cluster, callers, KILLS_APART)

            def enough() -> bool:
                now = count(callers.answers)
                return now.crossed >= crossed and now.kills_late >= late

            def served(version: int) -> None:
                callers.newest = version
                if rollbacks and version % BACK_EVERY == 0:
                    callers.newest = 0
                    mode = MODES[version // BACK_EVERY % len(MODES)]
                    try:
                        with Client(cluster.address) as client:
                            taken_back.append(client.rollback(version - 1, pause_mode=mode).version)
                    except CkptEngineError as error:
                        if error.code is not ErrorCode.NOT_FOUND:  # an update may have gone on without the relay
                            raise

            taken_back: list[int] = []
            try:
                versions = update_for(trainer, model, models, seconds, apart=1.0, enough=enough, served=served)
            finally:
                killer.end()
                answers = callers.end()
            tally = count(answers)
            judged = judge(answers, models)
            print(f"{tally} {judged=} {versions=} kills={killer.kills} rollbacks={len(taken_back)}")
            assert not tally.failures, f"{reasons(tally)}\n{gateway.tail()}"
    assert judged
    assert tally.bounded
    assert bool(taken_back) == rollbacks
    assert tally.from_zero == 0
    assert tally.resumed
    assert tally.crossed >= crossed
    assert tally.kills_late >= late


@pytest.mark.slow
def test_a_minute(tmp_path: Path) -> None:
    play(tmp_path, replicas=4, streams=256, seconds=60, crossed=100, late=1)


@pytest.mark.slow
@pytest.mark.hours
def test_ten_minutes(tmp_path: Path) -> None:
    play(tmp_path, replicas=4, streams=256, seconds=600, crossed=1000, late=50, rollbacks=True)
