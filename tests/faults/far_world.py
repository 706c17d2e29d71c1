"""The world of faults with a second host: replica `one` lives there, and is reached by way of two relays only.

    this host: manager, trainer, relay `up`, replica `two`    ── cable ──    the far host: relay `down`, replica `one`

`down` reads `up` through a proxy, so that the way between the two can be cut, lost or slowed down by itself. Processes
of the far host tell a listener of their own what they reach.
"""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil

from ckpt_engine.host.relay_directory import DIRECTORY
from ckpt_engine.trace import ENVIRONMENT as TRACE_ENVIRONMENT
from tests.faults.cells import VICTIM
from tests.faults.far_host import FarHost, far_host
from tests.faults.listener import Listener
from tests.faults.members import Member
from tests.faults.prober import Expected
from tests.faults.proxy import Proxy
from tests.faults.world import QUICK, World
from tests.ports import free_port

UP, DOWN = "up", "down"
"""Names of the relays."""

PATIENT = f"{QUICK} lease=8"
"""A relay may be held for as long as another one takes to start, and nobody takes it for lost."""


class FarWorld(World):
    """Use as a context manager. bystander: with replica `two`, on this host."""

    def __init__(
        self, path: Path, model: Path, weights: Path, expected: Expected, *, bystander: bool = True, **wishes: Any
    ) -> None:
        self._made = ExitStack()
        with self._made:
            self.host: FarHost = self._made.enter_context(far_host())
            self._port = free_port()
            self._far_relays = path / "far-relays"
            self._far_relays.mkdir(mode=0o700)
            self.far_listener = self._made.enter_context(Listener(path / "far-trace.sock"))
            wishes = {"deadlines": PATIENT, **wishes}
            names = {VICTIM: 1, **({"two": 1} if bystander else {})}
            super().__init__(path, model, weights, expected, names, relayed=True, **wishes)
            self._made.callback(super().__exit__)
            self.link = Proxy(self.loop, (self.host.manager, self._port), self.host.relays, self._port)
            self._made.callback(self.link.close)
            self.down_proxy = self._far_proxy()
            self._made.callback(self.down_proxy.close)
            self.down = self._start_down()
            self._made.callback(lambda: self.down.end())
            self._made = self._made.pop_all()

    def __exit__(self, *_: object) -> None:
        self._made.close()

    # -- processes

    def restart_up(self) -> None:
        """Another process of that name, at the same address and port, which holds nothing."""
        assert self.relay is not None
        self.relay.end()
        self.relay = self._relay()

    def end_relays(self) -> list[str]:
        """Both end in order; what they leave behind, and their exit statuses if these are wrong."""
        assert self.relay is not None
        os.kill(started_by(self.down), signal.SIGTERM)
        self.relay.end(signal.SIGTERM)
        statuses = {UP: self.relay.process.returncode, DOWN: self.down.process.wait(60)}
        left = [str(path) for folder in self.relay_folders for path in folder.iterdir()]
        return left + [f"relay {name} ended with {status}" for name, status in statuses.items() if status]

    @property
    def relay_folders(self) -> tuple[Path, Path]:
        """Directories of the relays of both hosts."""
        return self.relay_directory, self._far_relays

    def supervise(self) -> None:
        if not self.down.alive:
            self.down = self._start_down()
        super().supervise()

    def pid_of(self, victim: str, name: str) -> int:
        if victim == DOWN:
            return started_by(self.down)
        return super().pid_of("relay" if victim == UP else victim, name)

    # -- what is seen

    def relays(self) -> dict[str, list[int]]:
        """Those that are connected, and the versions that they hold."""
        status = self.status()
        found = status.holders if status is not None else []
        return {each.name: [held.version for held in each.held] for each in found if each.connected}

    def _complete(self) -> bool:
        """Process ids of the far host mean nothing here, so its engine is asked instead."""
        status = self.status()
        if status is None or status.phase != "idle" or not {UP, DOWN} <= self.relays().keys():
            return False
        there = {each.name for each in status.replicas if each.connected and each.engine.url and each.workers}
        trainers = [each for each in status.trainers if each.lineage == self.trainer.lineage]
        return self.replicas.keys() <= there and any(each.connected and each.published for each in trainers)

    # -- what differs from one host

    def _url(self, name: str, port: int) -> str:
        return f"http://{self.host.address}:{port}" if name == VICTIM else super()._url(name, port)

    def _far_proxy(self) -> Proxy:
        return Proxy(self.loop, ("127.0.0.1", self.manager_port), self.host.manager)

    def _there(self, log: str, command: list[str]) -> Member:
        """Starts one on the far host."""
        told = {DIRECTORY: str(self._far_relays), TRACE_ENVIRONMENT: str(self.far_listener.path)}
        return Member(
            ["-m", "ckpt_engine", *command], self.path / f"{log}.log", {**self._environment, **told}, self.host.inside
        )

    def _relay(self) -> Member | None:
        assert self.relay_proxy is not None
        # It is said to be where the proxy listens, at the same port of another address.
        listen = ("--listen", f"{self.host.manager}:{self._port}", "--advertise", self.host.relays, "--insecure")
        command = [*_relay_command(UP, self.relay_proxy.address), *listen]
        return Member(["-m", "ckpt_engine", *command], self.path / "up.log", self._environment)

    def _start_down(self) -> Member:
        command = _relay_command(DOWN, self.down_proxy.address)
        return self._there(DOWN, [*command, "--listen", f"{self.host.address}:0", "--insecure"])

    def _agent(self, name: str, port: int, workers: int, proxy: Proxy, attached: bool) -> Member:
        if name != VICTIM:
            return super()._agent(name, port, workers, proxy, attached)
        rollout = self.replicas.get(name)
        if rollout is None:
            self._agents_proxy = self._far_proxy()
            self._made.callback(self._agents_proxy.close)
        command = ["agent", "--manager", self._agents_proxy.address, "--engine", "reference"]
        command += ["--model", str(self._model), "--name", name, "--port", str(port), "--engine-output"]
        command += ["--advertise", self.host.address]
        return self._there(name, [*command, "--", "--tensor-parallel", str(workers), "--host", "0.0.0.0"])


def started_by(member: Member) -> int:
    """The process that a member of the far host is, as this host numbers it."""
    return int(psutil.Process(member.pid).children()[0].pid)


def _relay_command(name: str, manager: str) -> list[str]:
    return ["relay", "--manager", manager, "--name", name, "--memory", "16MiB", "--slot-grace", "3"]
