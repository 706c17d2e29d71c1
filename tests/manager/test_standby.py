"""Several managers on one ledger: real processes and a real PostgreSQL, of which any is killed, stopped or cut off."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ckpt_engine.client import Client
from ckpt_engine.core.problems import CkptEngineError, ErrorCode
from tests.ports import free_address
from tests.postgresql import PASSWORD, Server
from tests.waiting import PATIENCE, eventually

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


class Manager:
    """One `ckpt-engine manager` process."""

    def __init__(self, ledger: str, log: Path) -> None:
        self.address, self.http, self._log = free_address(), free_address(), log
        command = [sys.executable, "-m", "ckpt_engine", "manager", "--listen", self.address, "--http", self.http]
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                [*command, "--deadline", "term=4", "--deadline", "lease=4"],
                stdout=output,
                stderr=output,
                env={**os.environ, "CKPT_ENGINE_MANAGER_LEDGER": ledger},
            )

    @property
    def log(self) -> str:
        return self._log.read_text()

    def health(self) -> int | None:
        """What a probe is told; None: nothing answers."""
        with grpc.insecure_channel(self.address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            try:
                return int(stub.Check(health_pb2.HealthCheckRequest(), timeout=2).status)
            except grpc.RpcError:
                return None

    def leads(self) -> bool:
        return self.health() == SERVING

    def stands_by(self) -> bool:
        return self.health() == NOT_SERVING

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(PATIENCE)


@pytest.fixture
def pair(postgresql: Server, tmp_path: Path) -> Iterator[list[Manager]]:
    """Two managers that begin at once."""
    ledger = postgresql.new_database()
    made = [Manager(ledger, tmp_path / f"{name}.log") for name in ("first", "second")]
    try:
        yield made
    finally:
        for each in made:
            each.end()


def roles(pair: list[Manager]) -> tuple[Manager, Manager]:
    """The one that leads and the one that stands by, once there are both. On a machine that stands still for a term
    they change by themselves."""

    def look() -> tuple[Manager, Manager] | None:
        health = {each.health(): each for each in pair}
        return (health[SERVING], health[NOT_SERVING]) if health.keys() == {SERVING, NOT_SERVING} else None

    return eventually("one leads and the other stands by", PATIENCE, look)


def test_one_leads_until_it_is_stopped_killed_or_ended(pair: list[Manager]) -> None:
    """All of it with two processes, since each takes seconds to start."""
    eventually("both say what they are", PATIENCE, lambda: check_answers(*roles(pair)))

    leader, standby = roles(pair)
    leader.send(signal.SIGSTOP)
    begun = time.monotonic()
    try:
        eventually("the other one leads", PATIENCE, standby.leads)
        print(f"another manager led {time.monotonic() - begun:.1f} s after a stop")
    finally:
        leader.send(signal.SIGCONT)
    eventually("both say what they are", PATIENCE, lambda: check_answers(*roles(pair)))
    assert "standing by" in leader.log

    leader, standby = roles(pair)
    leader.send(signal.SIGKILL)
    begun = time.monotonic()
    eventually("the other one leads", PATIENCE, standby.leads)
    print(f"another manager led {time.monotonic() - begun:.1f} s after a kill")

    standby.send(signal.SIGTERM)
    assert standby.process.wait(PATIENCE) == 0
    for each in pair:
        assert "Traceback" not in each.log
        assert PASSWORD not in each.log


def check_answers(leader: Manager, standby: Manager) -> bool:
    """Whether both answer as what they are."""
    with Client(leader.address) as client, Client(standby.address) as other:
        try:
            cluster = client.status().fence.cluster
            other.status()
        except CkptEngineError as error:
            refusal = error
        else:
            return False
    url = f"http://{standby.http}"
    health = httpx.get(f"{url}/healthz", timeout=PATIENCE)
    refused = [httpx.get(f"{url}{path}", timeout=PATIENCE) for path in ("/readyz", "/v1/status")]
    ready = httpx.get(f"http://{leader.http}/readyz", timeout=PATIENCE)
    return (
        refusal.code == ErrorCode.UNAVAILABLE
        and f"this manager stands by: the one at {leader.address} leads" in refusal.problem.message
        and health.json()["status"] == "standby"
        and all(each.status_code == 503 and leader.address in each.json()["detail"] for each in refused)
        and ready.json().get("cluster") == cluster
    )
