"""The demo's processes: a manager, a gateway, agents with an engine each, trainer ranks, and with several hosts a relay
on each. Starts and ends them together.

Every process is started through the agents' launcher, so its whole tree ends on request, and also when the demo itself
is killed. All files lie in one directory that the demo removes.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import grpc
import httpx

from ckpt_engine.agent.ports import ReservedPort
from ckpt_engine.agent.process import EngineProcess, EngineProcessError
from ckpt_engine.channel import ManagerStub, open_channel
from ckpt_engine.demo import task
from ckpt_engine.demo.database import DatabaseError, DemoDatabase
from ckpt_engine.demo.hosts import NetworkHost
from ckpt_engine.demo.servers import DEFAULT, server_of
from ckpt_engine.demo.sites import Site, sites_of
from ckpt_engine.gate.directory import default_root
from ckpt_engine.v1 import manager_pb2

LINE_MARK = "demo: "
"""Stands before each JSON line of a trainer, since libraries print to standard output too."""

TURNS = "turns"
"""The name of the pipe through which the demo lets the trainer update."""

STOP_SECONDS = 5.0
"""Seconds between SIGTERM and SIGKILL."""

POLL_SECONDS = 0.1

OVERLAY = "CKPT_ENGINE_OVERLAY"
"""Environment variable, set by `engines/run`: a copy of ckpt-engine, for the PYTHONPATH of an engine's environment."""


class DemoError(Exception):
    """The demo cannot go on; the message says why, for a person."""


@dataclass(frozen=True)
class DemoSettings:
    """What the demo runs."""

    engine: str = DEFAULT
    updates: int = 6
    tensor_parallel: int = 1
    replicas: int = 2
    trainers: int = 2
    hosts: int = 1  # 1: this machine; else trainer and manager on the first, a replica on each of the others
    standby: bool = False  # two managers, of which the one that leads is killed in the middle of an update
    page: bool = False  # the manager serves its page, and everything keeps running until Ctrl-C


class Stage:
    """The processes of one run in `directory`. On one event loop; `start` once, `stop` always.

    hosts: those of the settings, if there are several; the caller's thread is on the network of the first one.
    database: for the ledger of two managers, if the settings have a standby. Raises UnknownAdapterError for an engine
    that the demo cannot start.
    """

    def __init__(
        self,
        settings: DemoSettings,
        directory: Path,
        hosts: Sequence[NetworkHost] = (),
        database: DemoDatabase | None = None,
    ) -> None:
        self._settings = settings
        self._database = database
        self._server = server_of(settings.engine)
        self.sites = sites_of(hosts, directory)
        self._home = self.sites[0]
        self._directory = directory
        self._children: dict[str, EngineProcess] = {}
        self._lines: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._turns: int | None = None
        # Reserved until this process ends: a server binds its port only once its engine is imported.
        self._ports = [ReservedPort(default_root()) for _ in range(4 + settings.replicas)]
        manager, other, gateway, page, *ports = (port.number for port in self._ports)
        self._managers = {"manager": f"{self._home.address}:{manager}"}
        if database is not None:
            self._managers["manager-2"] = f"{self._home.address}:{other}"
        self.manager = ",".join(self._managers.values())
        self.gateway = f"http://127.0.0.1:{gateway}"
        self.page = f"http://127.0.0.1:{page}/" if settings.page else ""
        self._of_replica: dict[str, tuple[Site, int]] = {
            f"replica-{number}": (self.sites[(number + 1) % len(self.sites)], port) for number, port in enumerate(ports)
        }
        self.replicas = {name: f"http://{site.address}:{port}" for name, (site, port) in self._of_replica.items()}

    async def start(self, on_state: Callable[[str], None]) -> None:
        """Returns when every replica's engine is up and every trainer rank has published.

        on_state: called with a text that says what is being waited for. Raises DemoError if a process ends or time runs
        out.
        """
        engine, server = self._settings.engine, self._server
        if server.package and server.python not in os.environ and find_spec(server.package) is None:
            raise DemoError(
                f"{engine} is not installed here: install ckpt-engine[{engine}], or set {server.python} to the Python "
                f"of an environment that has both (from a checkout: `make demo ARGS='--engine {engine}'`)"
            )
        model = task.write_model(self._directory / "model")
        os.mkfifo(self._directory / TURNS, 0o600)
        self._turns = os.open(self._directory / TURNS, os.O_RDWR | os.O_NONBLOCK)
        if self._database is not None:
            await self._start("database", self._database.command, python=False)
            try:
                await asyncio.to_thread(self._database.wait)
            except DatabaseError as error:
                raise DemoError(self._tails(str(error))) from error
        starts = [self._start(name, self._manager_command(name)) for name in self._managers]
        starts += [self._start("gateway", self._gateway_command())]
        starts += [
            self._start(f"relay-{site.name}", self._relay_command(site), site=site)
            for site in self.sites
            if site.host is not None
        ]
        starts += [
            self._start(name, self._replica_command(name, site, port, model), site=site)
            for name, (site, port) in self._of_replica.items()
        ]
        starts += [
            self._start(f"trainer-{rank}", self._trainer_command(rank, model), on_line=self._on_trainer_line)
            for rank in range(self._settings.trainers)
        ]
        await asyncio.gather(*starts)
        try:
            async with asyncio.timeout(self._server.start_seconds):
                await self._all_present(on_state)
        except TimeoutError:
            raise DemoError(self._tails(f"not everything was up after {self._server.start_seconds:g} s")) from None

    def give_turn(self) -> None:
        """Lets the trainer make its next update, or end after the last one."""
        assert self._turns is not None
        os.write(self._turns, b"\n")

    async def line(self, seconds: float) -> dict[str, Any]:
        """The trainer's next line. Raises DemoError if a process ends instead, or nothing comes for `seconds`."""
        reading = asyncio.ensure_future(self._lines.get())
        deadline = self._loop.time() + seconds
        try:
            while not reading.done():
                self._raise_if_ended()
                if self._loop.time() > deadline:
                    raise DemoError(self._tails(f"the trainer said nothing for {seconds:g} s"))
                await asyncio.wait((reading,), timeout=POLL_SECONDS)
            return reading.result()
        finally:
            reading.cancel()

    async def stop(self) -> None:
        """Ends every process, trainers first, and waits until all have ended. May be repeated."""
        children, self._children = self._children, {}
        for kind in ("trainer", "gateway", "replica", "relay", "manager", "database"):
            ending = [child.stop() for name, child in children.items() if name.startswith(kind)]
            await asyncio.gather(*ending, return_exceptions=True)
        if self._turns is not None:
            os.close(self._turns)
            self._turns = None

    # ------------------------------------------------------------------------------------------- processes

    async def lose_leader(self) -> tuple[str, str]:
        """Kills the manager that leads, once the next update installs. Returns its address and what it was doing.

        A replica's agent is stopped until then: without it an update may be over before anybody sees it install.
        """
        agent = self._children["replica-1"].pid
        assert agent is not None
        os.kill(agent, signal.SIGSTOP)
        try:
            async with AsyncExitStack() as stack:
                stubs = {
                    name: ManagerStub(await stack.enter_async_context(open_channel(address)))
                    for name, address in self._managers.items()
                }
                while True:
                    self._raise_if_ended()
                    for name, stub in stubs.items():
                        if (phase := await _phase(stub)).startswith("update ") and "install" in phase:
                            await self._children.pop(name).kill()
                            return self._managers[name], phase
                    await asyncio.sleep(0.02)
        finally:
            with suppress(ProcessLookupError):
                os.kill(agent, signal.SIGCONT)

    def _manager_command(self, name: str) -> Sequence[str]:
        database = self._database
        ledger = str(self._directory / "ledger.sqlite3") if database is None else database.address
        beyond = ("--insecure",) if self._home.host is not None else ()
        page = self.page.removeprefix("http://").rstrip("/")
        listen = self._managers[name]
        return ("-m", "ckpt_engine", "manager", "--listen", listen, "--http", page, "--ledger", ledger, *beyond)

    def _gateway_command(self) -> Sequence[str]:
        listen = self.gateway.removeprefix("http://")
        return ("-m", "ckpt_engine", "gateway", "--manager", self.manager, "--listen", listen)

    def _relay_command(self, site: Site) -> Sequence[str]:
        return ("-m", "ckpt_engine", "relay", "--manager", self.manager, *site.relay)

    def _replica_command(self, name: str, site: Site, port: int, model: Path) -> Sequence[str]:
        agent = ("--name", name, "--manager", self.manager, "--engine", self._settings.engine, "--model", str(model))
        agent_options, engine_options = site.listen_options
        options = ("--port", str(port), "--restart", "no", *agent_options)
        return ("-m", "ckpt_engine", "agent", *agent, *options, "--", *self._server_command(), *engine_options)

    def _server_command(self) -> Sequence[str]:
        """The command of a server: in the environment that `engines/run` names, if it names one, and its arguments."""
        python, overlay = os.environ.get(self._server.python), os.environ.get(OVERLAY)
        environment = ("env", f"PYTHONPATH={overlay}") if overlay else ()
        command = (*environment, python, "-m", self._server.module) if python else ()
        return (*command, *self._server.arguments(self._settings.tensor_parallel))

    def _trainer_command(self, rank: int, model: Path) -> Sequence[str]:
        options = {
            "--manager": self.manager,
            "--rank": rank,
            "--world-size": self._settings.trainers,
            "--directory": self._directory,
            "--model": model,
            "--updates": self._settings.updates,
            "--replicas": self._settings.replicas,
        }
        return ("-m", "ckpt_engine.demo.train", *(str(part) for option in options.items() for part in option))

    async def _start(
        self,
        name: str,
        arguments: Sequence[str],
        site: Site | None = None,
        on_line: Callable[[str], None] | None = None,
        python: bool = True,
    ) -> None:
        """python: the arguments are for our Python; else they are a command."""
        site = self._home if site is None else site
        child = EngineProcess(
            (*site.prefix, *((sys.executable,) if python else ()), *arguments),
            {**self._environment(site), **site.variables},
            self._directory / f"{name}.log",
            on_line=on_line,
            grace_seconds=STOP_SECONDS,
        )
        self._children[name] = child
        try:
            await child.start()
        except EngineProcessError as error:
            raise DemoError(f"{name}: {error}") from error

    def _environment(self, site: Site) -> dict[str, str]:
        directory = str(self._directory)
        return {
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "HF_HUB_OFFLINE": "1",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            "XDG_RUNTIME_DIR": directory,
            "XDG_STATE_HOME": directory,
            "TMPDIR": directory,
            **self._server.environment(directory, self._settings.tensor_parallel),
            **({} if site.host is None else dict.fromkeys(self._server.address_variables, "127.0.0.1")),
        }

    def _on_trainer_line(self, line: str) -> None:
        """Takes a line of the trainer, on the log pump's thread."""
        if line.startswith(LINE_MARK):
            with suppress(json.JSONDecodeError, RuntimeError):
                content = json.loads(line.removeprefix(LINE_MARK))
                self._loop.call_soon_threadsafe(self._lines.put_nowait, content)

    async def _all_present(self, on_state: Callable[[str], None]) -> None:
        async with open_channel(self.manager) as channel:
            stub = ManagerStub(channel)
            while True:
                self._raise_if_ended()
                try:
                    status = await stub.GetStatus(manager_pb2.GetStatusRequest(), timeout=2.0)
                except grpc.RpcError:
                    on_state("starting the manager")
                else:
                    # Agents connect before their engine runs, and name it once it answers.
                    replicas = sum(replica.connected and replica.HasField("engine") for replica in status.replicas)
                    trainers = sum(trainer.published for trainer in status.trainers)
                    relays = sum(holder.connected for holder in status.holders)
                    relay_count = sum(site.host is not None for site in self.sites)
                    present = (replicas, trainers) == (self._settings.replicas, self._settings.trainers)
                    if present and relays == relay_count and await self._gateway_runs():
                        return
                    on_state(
                        f"starting: {replicas} of {self._settings.replicas} replicas are up, "
                        f"{trainers} of {self._settings.trainers} trainer ranks published"
                        + (f", {relays} of {relay_count} relays" if relay_count else "")
                    )
                await asyncio.sleep(POLL_SECONDS)

    async def _gateway_runs(self) -> bool:
        """Whether the gateway runs. It may not be ready: it is not as long as no replica has weights."""
        async with httpx.AsyncClient(timeout=10.0, trust_env=False, verify=False) as client:
            try:
                return (await client.get(f"{self.gateway}/livez")).status_code == 200
            except httpx.HTTPError:
                return False

    def _raise_if_ended(self) -> None:
        for name, child in self._children.items():
            if not child.running:
                raise DemoError(f"{name} {child.describe_exit().removeprefix('the engine ')}")

    def _tails(self, message: str) -> str:
        tails = [f"{name}:\n  " + "\n  ".join(child.last_lines(5)) for name, child in self._children.items()]
        return "\n".join([message, *tails])


async def _phase(stub: ManagerStub) -> str:
    """What a manager is doing; empty if it does not lead."""
    try:
        status = await stub.GetStatus(manager_pb2.GetStatusRequest(), timeout=2.0)
    except grpc.RpcError:
        return ""
    return str(status.phase)
