"""Managers that share a ledger: real processes, on a real PostgreSQL."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.ports import free_address
from tests.waiting import PATIENCE, eventually

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


def health_of(address: str) -> int | None:
    """What a manager tells a probe; None: nothing answers."""
    with grpc.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            return int(stub.Check(health_pb2.HealthCheckRequest(), timeout=2).status)
        except grpc.RpcError:
            return None


class Manager:
    """One `ckpt-engine manager` process. address: where it listens, if not at a free port of loopback. before: what its
    command begins with on another host."""

    def __init__(self, ledger: str, log: Path, address: str = "", before: Sequence[str] = ()) -> None:
        self.address, self.http, self._log, self._ledger = address or free_address(), free_address(), log, ledger
        self._before = before
        self.start()

    def start(self) -> None:
        """Starts it, also again."""
        command = [*self._before, sys.executable, "-m", "ckpt_engine", "manager"]
        command += ["--listen", self.address, "--http", self.http, *(["--insecure"] if self._before else [])]
        with self._log.open("ab") as output:
            self.process = subprocess.Popen(
                [*command, "--deadline", "term=4", "--deadline", "lease=4"],
                stdout=output,
                stderr=output,
                env={**os.environ, "CKPT_ENGINE_MANAGER_LEDGER": self._ledger},
            )

    @property
    def log(self) -> str:
        return self._log.read_text()

    def health(self) -> int | None:
        """As `health_of`."""
        return health_of(self.address)

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


@contextmanager
def two_managers(ledger: str, folder: Path) -> Iterator[list[Manager]]:
    """Two that begin at once. ledger: the address of an empty database."""
    made = [Manager(ledger, folder / f"{name}.log") for name in ("first", "second")]
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
