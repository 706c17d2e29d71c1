"""A whole deployment on one machine whose every process and connection a test can fault: real gRPC, real HTTP.

One manager, replicas of the reference engine (each an agent, an API server and workers), one trainer, and a relay if
the world is to have one; then updates go by way of it, unless `by_relay` is taken back. Members reach the manager
through proxies of their own. Every replica is asked for tokens all the time by a prober.
"""

from __future__ import annotations

import itertools
import queue
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import psutil

from ckpt_engine.channel import ManagerStub
from ckpt_engine.core.deadlines import ENVIRONMENT as DEADLINES_ENVIRONMENT
from ckpt_engine.core.stage_memory import ENVIRONMENT as STAGE_MEMORY
from ckpt_engine.host.relay_directory import DIRECTORY
from ckpt_engine.trace import ENVIRONMENT as TRACE_ENVIRONMENT
from ckpt_engine.v1 import manager_pb2
from tests.faults.listener import Listener
from tests.faults.members import (
    Member,
    TrainerMember,
    engine_processes,
    start_agent,
    start_attached_agent,
    start_engine,
    start_manager,
    start_relay,
)
from tests.faults.prober import PAUSE_SECONDS, SEEDS, Expected, Prober
from tests.faults.proxy import Loop, Proxy
from tests.faults.tampering import Tamperer
from tests.ports import free_port

LEASE = 3.0
QUICK = (
    f"lease={LEASE} heartbeat=0.4 resend=0.5 reconnect_most=0.5 words=0.2 quiesce=4 resume=3 report=1 unanswered=3 "
    "engine_restart_first=0.1 engine_restart_most=0.5 engine_watch=0.2 engine_health=2 engine_unhealthy=8 "
    "engine_dead_worker=3 engine_grace=2 worker_ask=3 worker_attempt=0.5 worker_reply=3 connect=20"
)
"""Deadlines of every process here, so that a fault past a lease takes seconds."""

ENDS_SECONDS = 60.0
"""For an update's answer beyond its own timeout; machines that run tests are busy."""

HEAL_SECONDS = 240.0
"""For everybody to be there again after a fault: engines start anew."""


@dataclass
class Rollout:
    """One replica: its agent, the proxy through which that reaches the manager, and who asks it for tokens.

    engine: None if the agent has launched it.
    """

    name: str
    port: int
    workers: int
    proxy: Proxy
    agent: Member
    prober: Prober
    engine: Member | None = None


class World:
    """Use as a context manager. replicas: name to number of workers. attached: engines run beside their agents.
    relayed: with a relay for all of them. together: all updates go by a collective. early: workers have stage memory.
    """

    def __init__(
        self,
        path: Path,
        model: Path,
        weights: Path,
        expected: Expected,
        replicas: Mapping[str, int],
        *,
        snapshot: bool = False,
        deadlines: str = QUICK,
        probe_pause: float = PAUSE_SECONDS,
        attached: bool = False,
        relayed: bool = False,
        together: bool = False,
        early: bool = False,
    ) -> None:
        self.path, self._model, self._weights, self._expected = path, model, weights, expected
        self._options = (*(("snapshot",) if snapshot else ()), *(("nccl",) if together else ()))
        self._together = together
        self._lineages = itertools.count(1)
        self.version = 0
        self.violations: list[str] = []
        self.loop = Loop()
        self.listener = Listener(path / "trace.sock")
        self._environment = {DEADLINES_ENVIRONMENT: deadlines, TRACE_ENVIRONMENT: str(self.listener.path)}
        self._environment |= {STAGE_MEMORY: "auto"} if early else {}
        self.relay_directory = path / "relays"
        self.relay_directory.mkdir(mode=0o700, exist_ok=True)
        self._environment[DIRECTORY] = str(self.relay_directory)
        self.manager_port = free_port()
        self.ledger = path / "ledger.sqlite"
        self.managers = self._start_managers()
        self._channel = grpc.insecure_channel(
            f"127.0.0.1:{self.manager_port}", options=[("grpc.max_reconnect_backoff_ms", 300)]
        )
        self._stub = ManagerStub(self._channel)
        self.trainer_proxy = self._proxy()
        self.relay_proxy = self._proxy() if relayed else None
        self.relay = self._relay()
        self.by_relay = relayed
        self.replicas: dict[str, Rollout] = {}
        for name, workers in replicas.items():
            port, proxy = free_port(), self._proxy()
            prober = Prober(name, self._url(name, port), expected, lambda: self.version, probe_pause)
            prober.start()
            engine = start_engine(path, name, model, port, workers, self._environment) if attached else None
            agent = self._agent(name, port, workers, proxy, attached)
            self.replicas[name] = Rollout(name, port, workers, proxy, agent, prober, engine)
        self.trainer = self.new_trainer()

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        for rollout in self.replicas.values():
            rollout.prober.end()
        self.listener.__exit__()
        agents = [rollout.agent for rollout in self.replicas.values()]
        engines = [rollout.engine for rollout in self.replicas.values() if rollout.engine is not None]
        relays = [self.relay] if self.relay is not None else []
        for member in (self.trainer, *agents, *engines, *relays, *self.managers):
            member.end()
        proxies = [self.relay_proxy] if self.relay_proxy is not None else []
        for proxy in (self.trainer_proxy, *proxies, *(rollout.proxy for rollout in self.replicas.values())):
            proxy.close()
        self._channel.close()

    # -- processes

    @property
    def manager(self) -> Member:
        """The manager; of several the one that leads."""
        return self.managers[0]

    def restart_manager(self, cluster: str = "") -> None:
        """On the same ledger; cluster: for a new one."""
        self.manager.end()
        self.managers = self._start_managers(cluster)

    def restart_agent(self, name: str, workers: int = 0) -> None:
        """workers: of the engine that it launches, if another number than before."""
        rollout = self.replicas[name]
        rollout.agent.end()
        rollout.workers = workers or rollout.workers
        rollout.agent = self._agent(name, rollout.port, rollout.workers, rollout.proxy, rollout.engine is not None)

    def restart_engine(self, name: str) -> None:
        """Of an attached agent: another process at the same port, with a directory of its own."""
        rollout = self.replicas[name]
        assert rollout.engine is not None
        rollout.engine.end()
        rollout.engine = start_engine(self.path, name, self._model, rollout.port, rollout.workers, self._environment)

    def restart_trainer(self, *, wait: bool = True, lineage: str = "") -> None:
        """Another process, as after a crash of the training run. lineage: empty: another one."""
        self.trainer.end()
        self.trainer = self.new_trainer(lineage)
        if wait:
            self.trainer.ready()

    def kill(self, victim: str, name: str) -> None:
        """SIGKILL; returns when the process has gone."""
        process = psutil.Process(self.pid_of(victim, name))
        process.kill()
        for member in (self.trainer, *self.managers, self.replicas[name].agent, self.relay):
            if member is not None and member.pid == process.pid:
                member.process.wait(60)
                return
        process.wait(60)

    def engine(self, name: str) -> list[psutil.Process]:
        """The API server and the workers of a replica; empty while the engine is being started."""
        rollout = self.replicas[name]
        return engine_processes(rollout.engine or rollout.agent)

    def pid_of(self, victim: str, name: str) -> int:
        """Of trainer, manager, relay, or the replica's agent, api, or last worker."""
        match victim:
            case "trainer":
                return self.trainer.pid
            case "manager":
                return self.manager.pid
            case "relay":
                assert self.relay is not None, "this world has no relay"
                return self.relay.pid
            case "agent":
                return self.replicas[name].agent.pid
            case "api":
                return self.engine(name)[0].pid
            case _:
                return self.engine(name)[-1].pid

    def tampered(self, proxy: Proxy) -> Tamperer:
        """From its next connection on this proxy's member is carried by a tamperer; `untampered` ends that."""
        tamperer = Tamperer(self.loop, f"127.0.0.1:{self.manager_port}")
        proxy.upstream = ("127.0.0.1", tamperer.port)
        return tamperer

    def untampered(self, proxy: Proxy, tamperer: Tamperer) -> None:
        proxy.upstream = ("127.0.0.1", self.manager_port)
        proxy.cut()
        tamperer.close()

    # -- what is seen

    @property
    def stub(self) -> Any:
        """The manager's calls, straight to it."""
        return self._stub

    def status(self) -> manager_pb2.GetStatusResponse | None:
        """None while the manager does not answer."""
        try:
            response: manager_pb2.GetStatusResponse = self._stub.GetStatus(manager_pb2.GetStatusRequest(), timeout=5)
        except grpc.RpcError:
            return None
        return response

    def replica(self, name: str) -> manager_pb2.ReplicaStatus | None:
        """As the manager sees it."""
        status = self.status()
        return next((each for each in status.replicas if each.name == name), None) if status else None

    def has_relay(self) -> bool:
        """Whether one has a session with the manager."""
        status = self.status()
        return status is not None and any(each.connected and each.kind == "relay" for each in status.holders)

    def until(self, what: str, seconds: float, look: Callable[[], Any]) -> Any:
        """What `look` finds; AssertionError naming `what` after `seconds`."""
        end = time.monotonic() + seconds
        while not (found := look()):
            assert time.monotonic() < end, f"not within {seconds:g} s: {what}; {self.describe()}"
            time.sleep(0.05)
        return found

    def describe(self) -> str:
        status = self.status()
        if status is None:
            return "the manager does not answer"
        replicas = [
            f"{each.name}: connected={each.connected} serving={each.serving} version={each.identity.version} "
            f"closed={each.closed_reason!r} workers={len(each.workers)}"
            for each in status.replicas
        ]
        trainers = [
            f"{each.lineage}: connected={each.connected} published={each.published}" for each in status.trainers
        ]
        relays = [
            f"relay {each.name}: connected={each.connected} holds={[held.version for held in each.held]}"
            for each in status.holders
        ]
        return "; ".join([status.phase, *replicas, *trainers, *relays])

    # -- what is done

    def ask(self, timeout: float, until: str = "installed") -> int:
        """Begins an update with the next version; returns it."""
        self.version += 1
        prefetch = "always" if self.by_relay else "auto" if self.relay is None else "never"
        self.trainer.ask(self.version, self.version % SEEDS, timeout, prefetch, until)
        return self.version

    def answer(self, timeout: float) -> dict[str, Any] | None:
        """How the update ended for the trainer, None if it died. Promise 2: it ends by its deadline."""
        try:
            return self.trainer.answer(timeout + ENDS_SECONDS)
        except queue.Empty:
            self.violations.append(f"the update did not end within {ENDS_SECONDS:g} s of its deadline")
            return {"error": "no end"}

    def heal(self) -> None:
        """Starts whatever has died, and waits until everybody is registered with an engine that answers."""
        self.supervise()
        self.until("everybody is there again", HEAL_SECONDS, self._complete)

    def supervise(self) -> None:
        """Starts what a supervisor would; engines are their agents' to start."""
        self._supervise_managers()
        for rollout in self.replicas.values():
            if rollout.engine is not None and not rollout.engine.alive:
                self.restart_engine(rollout.name)
            if not rollout.agent.alive:
                self.restart_agent(rollout.name)
        if self.relay is not None and not self.relay.alive:
            self.relay = self._relay()
        if not self.trainer.alive:
            self.restart_trainer()
        self.trainer.ready()

    def _supervise_managers(self) -> None:
        if not self.manager.alive:
            self.restart_manager()

    def _complete(self) -> bool:
        status = self.status()
        relays = [self.relay] if self.relay is not None else []
        agents = [rollout.agent for rollout in self.replicas.values()]
        for member in (self.trainer, self.manager, *relays, *agents):
            assert member.alive, f"a member does not stay up:\n{member.tail()}"
        if status is None:
            return False
        found = {each.name: each for each in status.replicas}
        trainer = [each for each in status.trainers if each.lineage == self.trainer.lineage]
        return (
            all(
                name in found
                and found[name].connected
                and bool(found[name].engine.url)
                and len(found[name].workers) == rollout.workers
                and all(is_running(worker.pid) for worker in found[name].workers)
                and _answers(found[name].engine.url)
                for name, rollout in self.replicas.items()
            )
            and status.phase == "idle"
            and all(each.connected for each in status.holders if each.kind == "relay")
            and len(status.holders) >= len(relays)
            and bool(trainer)
            and trainer[0].connected
            and trainer[0].published
        )

    def update_all(self, timeout: float = 120.0) -> str:
        """An update that must bring every replica to the new version and into service; what is wrong, or ''."""
        self.heal()
        version = self.ask(timeout)
        answer = self.answer(timeout)
        if answer is None or not answer.get("ok"):
            return f"the next update failed: {answer}; {self.describe()}"
        if self.by_relay and answer["ways"] != ["relay_memory"]:
            return f"the next update did not go by way of the relay: {answer}; {self.describe()}"
        if self._together and answer["ways"] != ["nccl"]:
            return f"the next update did not go by the collective: {answer}; {self.describe()}"
        now = time.monotonic()
        for rollout in self.replicas.values():
            if not rollout.prober.answered(version, now, 120):
                return f"{rollout.name} does not answer with version {version}: {self.describe()}"
        return ""

    def take_violations(self) -> list[str]:
        """What nobody may ever see and somebody has seen since the last call."""
        found, self.violations = self.violations, []
        for rollout in self.replicas.values():
            found += rollout.prober.violations
            rollout.prober.violations = []
        return found

    def _url(self, name: str, port: int) -> str:
        return f"http://127.0.0.1:{port}"

    def _proxy(self) -> Proxy:
        return Proxy(self.loop, ("127.0.0.1", self.manager_port))

    def _start_managers(self, cluster: str = "") -> list[Member]:
        return [start_manager(self.path, self.manager_port, self._environment, self.ledger, cluster)]

    def _dialled(self, proxy: Proxy) -> str:
        """What the member whose proxy it is names as its manager."""
        return proxy.address

    def _relay(self) -> Member | None:
        proxy = self.relay_proxy
        return None if proxy is None else start_relay(self.path, self._dialled(proxy), self._environment)

    def _agent(self, name: str, port: int, workers: int, proxy: Proxy, attached: bool) -> Member:
        if attached:
            return start_attached_agent(self.path, name, self._dialled(proxy), port, self._environment)
        return start_agent(self.path, name, self._dialled(proxy), self._model, port, workers, self._environment)

    def new_trainer(self, lineage: str = "", *options: str) -> TrainerMember:
        """A trainer process; options: see trainer_process.py."""
        return TrainerMember(
            self.path,
            self._dialled(self.trainer_proxy),
            lineage or f"run-{next(self._lineages)}",
            self._weights,
            self._environment,
            *self._options,
            *options,
        )


def is_running(pid: int) -> bool:
    """Whether there is such a process and it is not merely unreaped."""
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


def _answers(url: str) -> bool:
    """Whether the engine's API server does: its agent takes a moment to notice that it does not."""
    try:
        return httpx.get(f"{url}/health", timeout=2).status_code == 200
    except httpx.HTTPError:
        return False
