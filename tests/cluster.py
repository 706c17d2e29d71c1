"""A manager, agents and engines as users run them, for tests: each a process of the command line."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc
import httpx
import psutil
import torch

from ckpt_engine.channel import ManagerStub
from ckpt_engine.host.relay_directory import DIRECTORY
from ckpt_engine.v1 import manager_pb2
from tests.ports import free_address
from tests.waiting import eventually


class Replica:
    """One `ckpt-engine agent` process and the engine that it launched."""

    def __init__(self, cluster: Cluster, name: str, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.cluster, self.name = cluster, name
        self._url = ""
        self.log = cluster.path / f"{name}.log"
        self._output = self.log.open("ab")
        self.process = subprocess.Popen(
            command, stdout=self._output, stderr=subprocess.STDOUT, env={**os.environ, **environment}
        )

    @property
    def status(self) -> manager_pb2.ReplicaStatus | None:
        """As the manager sees it; None as long as it has not registered."""
        found = [replica for replica in self.cluster.status().replicas if replica.name == self.name]
        return found[0] if found else None

    def registered(self, seconds: float = 400.0) -> Replica:
        """Waits until its session is open and its workers have started."""

        def look() -> bool:
            assert self.process.poll() is None, f"{self.name} ended:\n{self.tail()}"
            status = self.status
            started = status and status.workers and all(worker.pid for worker in status.workers)
            return bool(status and started and status.connected and status.engine.url)

        try:
            eventually(f"{self.name} registers", seconds, look)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.tail()}") from None
        return self

    def serving(self, version: int, seconds: float = 120.0) -> Replica:
        """Waits until it serves `version`."""
        eventually(
            f"{self.name} serves version {version} (is: {self.status})",
            seconds,
            lambda: (status := self.status) and status.serving and status.identity.version == version,
        )
        return self

    @property
    def url(self) -> str:
        """Where its engine answers, or answered last."""
        status = self.status
        if status is not None and status.engine.url:
            self._url = status.engine.url
        assert self._url, f"{self.name} has had no engine yet"
        return self._url

    def tail(self, lines: int = 60) -> str:
        """The end of what agent and engine printed."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def workers(self) -> list[psutil.Process]:
        """The engine's worker processes, by rank."""
        status = self.status
        assert status is not None
        return [psutil.Process(worker.pid) for worker in status.workers]

    def stop(self, seconds: float = 60.0) -> None:
        """SIGTERM, as an operator would; kills what does not end."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(seconds)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(60)
        self._output.close()


class Relay:
    """One `ckpt-engine relay` process."""

    def __init__(self, cluster: Cluster, name: str, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.cluster, self.name = cluster, name
        self.log = cluster.path / f"relay-{name}.log"
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **environment}
            )

    @property
    def status(self) -> manager_pb2.HolderStatus | None:
        """As the manager sees it; None as long as it has not registered."""
        return next((holder for holder in self.cluster.status().holders if holder.name == self.name), None)

    def registered(self) -> Relay:
        """Waits until its session is open."""

        def look() -> bool:
            assert self.process.poll() is None, f"{self.name} ended:\n{self.said}"
            return (status := self.status) is not None and status.connected

        eventually(f"relay {self.name} registers", 120.0, look)
        return self

    @property
    def held(self) -> list[int]:
        """Versions that it says it holds."""
        status = self.status
        return [] if status is None else [each.version for each in status.held]

    @property
    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def end(self, number: int = signal.SIGTERM) -> int:
        """Its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(60)


class Cluster:
    """One manager, its relays and its replicas. Use `running_cluster`."""

    before: Sequence[str] = ()
    """What the commands of replicas begin with."""

    def __init__(self, path: Path, address: str) -> None:
        self.path, self.address = path, address
        self.replicas: list[Replica] = []
        self.relays: list[Relay] = []
        self.manager: subprocess.Popen[bytes]
        self.channel = grpc.insecure_channel(address)
        self._stub = ManagerStub(self.channel)
        self._environment = {
            # Threads of small models only wait for each other, and two engines share two cores.
            "OMP_NUM_THREADS": "1",
            # Tests that run at the same time have relays on this host, too.
            DIRECTORY: os.environ.get(DIRECTORY) or str(path / "relays"),
        }

    def status(self) -> manager_pb2.GetStatusResponse:
        response: manager_pb2.GetStatusResponse = self._stub.GetStatus(manager_pb2.GetStatusRequest(), timeout=60)
        return response

    def replica(
        self,
        name: str,
        kind: str,
        model: Path,
        *arguments: str,
        options: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> Replica:
        """Starts a replica; `arguments` go to the engine, `options` to `ckpt-engine agent`."""
        command = [*self.before, sys.executable, "-m", "ckpt_engine", "agent", "--manager", self.address]
        command += ["--engine", kind, "--model", str(model), "--name", name, "--engine-output", *options]
        command += ["--", *arguments]
        replica = Replica(self, name, command, {**self._environment, **(environment or {})})
        self.replicas.append(replica)
        return replica

    def relay(self, name: str, *options: str, environment: Mapping[str, str] | None = None) -> Relay:
        """Starts a relay."""
        command = [sys.executable, "-m", "ckpt_engine", "relay", "--manager", self.address, "--name", name, *options]
        self.relays.append(Relay(self, name, command, {**self._environment, **(environment or {})}))
        return self.relays[-1]

    def start_manager(self, http: str) -> None:
        """On its address and its ledger."""
        command = [sys.executable, "-m", "ckpt_engine", "manager", "--listen", self.address, "--http", http]
        with (self.path / "manager.log").open("ab") as log:
            self.manager = subprocess.Popen(
                [*command, "--ledger", str(self.path / "ledger.sqlite")], stdout=log, stderr=subprocess.STDOUT
            )

    def restart_manager(self) -> None:
        """As after a crash: killed, and started again on the same ledger."""
        self.manager.kill()
        self.manager.wait(60)
        self.start_manager("127.0.0.1:0")
        eventually("the manager answers again", 120.0, self._answers)

    def _answers(self) -> bool:
        try:
            return bool(self.status().fence.cluster)
        except grpc.RpcError:
            return False

    def close(self) -> None:
        for relay in self.relays:
            relay.end()
        for replica in self.replicas:
            if replica.process.poll() is None:
                replica.process.send_signal(signal.SIGTERM)
        for replica in self.replicas:
            replica.stop()
        self.channel.close()


@contextlib.contextmanager
def running_cluster(path: Path, http: str = "127.0.0.1:0") -> Iterator[Cluster]:
    """A manager on a free port of loopback with its ledger below `path`; ends every process that it started."""
    path.mkdir(parents=True, exist_ok=True)
    cluster = Cluster(path, free_address())
    cluster.start_manager(http)
    try:
        grpc.channel_ready_future(cluster.channel).result(120)
        yield cluster
    finally:
        cluster.close()
        cluster.manager.terminate()
        try:
            cluster.manager.wait(60)
        except subprocess.TimeoutExpired:
            cluster.manager.kill()
            raise


def outcomes(report: Any) -> dict[str, str]:
    """Replica's name to its outcome's name."""
    return {replica.name: replica.outcome for replica in report.replicas}


def generate(replica: Replica, prompt: Sequence[int], count: int, timeout: float = 120.0) -> list[int]:
    """Greedy tokens of the reference engine, over HTTP."""
    body = {"input_ids": list(prompt), "max_tokens": count, "temperature": 0}
    response = httpx.post(f"{replica.url}/generate", json=body, timeout=timeout)
    assert response.status_code == 200, response.text
    tokens: list[int] = response.json()["output_ids"]
    return tokens


def corrupt_after_sealing(trainer: Any, tensor: torch.Tensor, element: int) -> Callable[[], None]:
    """From now on one bit of `tensor` (which the trainer publishes) flips right after each seal has been digested:
    what an optimizer that does not wait would do. Returns a function that ends it.

    A fake of the fault, since no honest part of ours writes to weights that it has sealed.
    """
    source = trainer._sealer._source
    digest = source.digest

    def digest_then_flip(atoms: Any) -> list[int]:
        values: list[int] = digest(atoms)
        flat = tensor.detach().view(torch.uint8).view(-1)
        flat[element] ^= 1
        return values

    source.digest = digest_then_flip

    def restore() -> None:
        source.digest = digest

    return restore


class Stream(threading.Thread):
    """Asks one replica for tokens again and again, and keeps what came back, until `end` is called."""

    def __init__(self, ask: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self._ask, self._ended = ask, threading.Event()
        self.results: list[Any] = []
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        while not self._ended.is_set():
            try:
                self.results.append(self._ask())
            except Exception as error:  # shown by end()
                self.error = error
                return

    def end(self, seconds: float = 120.0) -> list[Any]:
        """Waits for the request that runs, raises what went wrong, returns every answer."""
        self._ended.set()
        self.join(seconds)
        assert not self.is_alive(), "a request did not come back"
        if self.error is not None:
            raise self.error
        return self.results
