"""The manager as a whole: starts and stops the gRPC server, the HTTP side and everything behind them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, cast

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc
from starlette.types import ASGIApp

from ckpt_engine.addresses import (
    EVERY_ADDRESS,
    MANAGER,
    bound_socket,
    check_free,
    check_reach,
    join_address,
    split_address,
    with_port,
)
from ckpt_engine.channel import MESSAGE_BYTES
from ckpt_engine.core.deadlines import Deadlines
from ckpt_engine.core.loopback import is_loopback
from ckpt_engine.core.problems import CkptEngineError, invalid, unavailable
from ckpt_engine.grpc_loops import quiet_loop
from ckpt_engine.http_server import HttpServer
from ckpt_engine.machines import events
from ckpt_engine.machines.manager.machine import ManagerMachine
from ckpt_engine.machines.manager.members import Replica
from ckpt_engine.machines.manager.reconcile import Drift
from ckpt_engine.machines.manager.status import Watched
from ckpt_engine.manager.about import software_version
from ckpt_engine.manager.access import Access
from ckpt_engine.manager.blobs import MEBIBYTE, BlobStore
from ckpt_engine.manager.browsers import checked_names, host_of
from ckpt_engine.manager.compiler import Compiler
from ckpt_engine.manager.door import ServiceDoor
from ckpt_engine.manager.errors import stopping
from ckpt_engine.manager.http import build_app
from ckpt_engine.manager.http_access import HttpAccess
from ckpt_engine.manager.http_operate import OperatorRequest, OperatorResponse
from ckpt_engine.manager.ledger import Ledger
from ckpt_engine.manager.ledger_address import is_database
from ckpt_engine.manager.metrics import ManagerMetrics
from ckpt_engine.manager.publishers import Publishers
from ckpt_engine.manager.reflection import CommentedReflection
from ckpt_engine.manager.refusals import Refusals
from ckpt_engine.manager.servicer import ManagerServicer, add_to
from ckpt_engine.manager.shell import Shell
from ckpt_engine.manager.tasks import Tasks
from ckpt_engine.manager.term import Term
from ckpt_engine.publishing.roots import checked_roots
from ckpt_engine.security.server import ServerSecurity
from ckpt_engine.v1 import manager_pb2

SERVICES = tuple(service.full_name for service in manager_pb2.DESCRIPTOR.services_by_name.values())

LOOKED_BACK = 20
"""The last updates, among which the manager looks for a success when it starts."""

RECEIVED_MESSAGE_BYTES = 4 * MEBIBYTE
"""The largest message that members may send; unbounded data travels as blobs."""

log = logging.getLogger("ckpt_engine.manager")


@dataclass(frozen=True)
class ManagerConfig:
    """How a manager runs."""

    listen: str = MANAGER
    """host:port of the gRPC server; port 0 takes a free one. An address that other machines reach is refused unless
    `security` asks callers for a proof, or says that none is needed."""
    http: str = "127.0.0.1:8080"  # host:port of the HTTP side; empty: none
    ledger: Path | str | None = field(default=None, repr=False)
    """Its file, or the address of a database (postgresql://…), which has secrets; None: `ledger.default_path()`."""
    cluster: str = ""  # the id of a new ledger, in place of one that was lost; empty: a random id
    advertise: str = ""
    """The address that members on other hosts should use, for people. Without a port it gets that of `listen`; empty:
    the bound address."""
    http_names: tuple[str, ...] = ()  # further names of the HTTP side for browsers, without scheme and port
    security: ServerSecurity = field(default_factory=ServerSecurity)
    """How callers prove their identity; without it only this machine is served."""
    deadlines: Deadlines = field(default_factory=lambda: Deadlines.from_environment(os.environ))
    """Every wait; the defaults are changed by CKPT_ENGINE_DEADLINES."""
    max_blob_bytes: int = 256 * MEBIBYTE  # of one blob in the content store
    max_total_bytes: int = 2048 * MEBIBYTE  # of all blobs
    directories: tuple[Path, ...] = ()  # roots of checkpoints that callers with a trainer's grant may publish
    stop_seconds: float = 30.0  # how long `stop` waits for a running update before it ends that with UNAVAILABLE


class ManagerServer:
    """One manager that leads. Use it on one event loop: ``async with ManagerServer(config) as server``.

    After ``start``: ``address`` (gRPC, host:port as bound), ``http_address`` (empty without an HTTP side), ``ledger``,
    ``metrics`` and ``status()``.
    """

    address: str
    http_address: str
    ledger: Ledger
    metrics: ManagerMetrics

    def __init__(self, config: ManagerConfig, term: Term | None = None) -> None:
        """term: that this manager has in the ledger that it shares; None: its ledger is a file of its own."""
        self.config = config
        self._term = term
        self._undo = contextlib.AsyncExitStack()
        self._stopping = False
        self.deserted = False
        """Whether `serve` has returned because no member reaches this manager any more."""

    async def start(self) -> None:
        """Opens the ledger and both ports. Raises CkptEngineError if one cannot be opened; then nothing stays open."""
        try:
            await self._start()
        except BaseException:
            await self._undo.aclose()
            raise

    async def stop(self) -> None:
        """Ends everything in bounded time: a running update has ``stop_seconds`` to finish, then it is refused."""
        await self._undo.aclose()

    async def __aenter__(self) -> ManagerServer:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    @property
    def refusals(self) -> Refusals:
        """The recently refused updates."""
        return self._shell.refusals

    @property
    def publishers(self) -> Publishers:
        """The processes that publish directories."""
        return self._publishers

    def status(self, *, replicas: bool = True) -> manager_pb2.GetStatusResponse:
        """The answer of GetStatus. replicas: False leaves them out; they are nearly all of the work."""
        return self._shell.status(replicas=replicas)

    def replicas(self) -> Mapping[str, Replica]:
        """All replicas by name, as of their last message. Only read them, and at once."""
        return self._shell.replicas()

    def drifts(self) -> dict[str, Drift]:
        """The replicas that do not hold what they should serve, by name."""
        return self._shell.drifts()

    def holds(self) -> Mapping[str, events.OperatorHold]:
        """The replicas that operators hold, by name."""
        return self._shell.holds()

    @property
    def changes(self) -> int:
        """A number that changes whenever `status` or `watched` may have changed."""
        return self._shell.changes

    @property
    def dialled(self) -> str:
        """Where members on other hosts dial."""
        return dialled(self.config, getattr(self, "address", self.config.listen))

    def watched(self) -> Watched:
        """The state that WatchReplicas sends."""
        return self._shell.watched()

    async def operate(self, request: OperatorRequest) -> OperatorResponse:
        """Retries, holds, releases or evicts a replica, or decides about a deployment, as the gRPC calls do. Raises
        CkptEngineError."""
        if self._stopping:
            raise stopping()
        kind = request.DESCRIPTOR.name.removesuffix("Request").removesuffix("Replica").lower()
        response = await self._shell.answer(kind, lambda call: events.OperatorCall(call, request))
        return cast(OperatorResponse, response)

    async def serve(self, stop_event: asyncio.Event) -> None:
        """Serves until ``stop_event`` is set, its term is lost, or it is deserted; stop the manager then. Raises
        CkptEngineError (INTERNAL) once its state machine has failed: all callers have got the error, nothing more is
        done, and the manager must be restarted."""
        ends = [stop_event, self._shell.failed, *([self._term.lost] if self._term is not None else [])]
        waits = [asyncio.ensure_future(event.wait()) for event in ends]
        if self._term is not None:
            waits.append(asyncio.ensure_future(self._desertion(self._term)))
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in waits:
                each.cancel()
        if self._shell.problem is not None:
            raise CkptEngineError(self._shell.problem)

    async def _desertion(self, term: Term) -> Literal[True]:
        """Returns once members that were here have not been heard for a lease and a term: a network parts them from
        this manager, and may not part them from another one."""
        seconds = self.config.deadlines.lease + self.config.deadlines.term
        while True:
            if self._shell.deserted_for() >= seconds:
                log.warning("no member was heard for %g s: the term goes to a manager that they may reach", seconds)
                self.deserted = True
                return True
            await asyncio.sleep(term.pause)

    async def _start(self) -> None:
        config = self.config
        check_config(config)
        self._access = Access(config.security)
        self._public_names = checked_names(config.http_names)
        if config.advertise:
            self._public_names.append(host_of(dialled(config)))
        self.ledger = await self._open_ledger()
        self._undo.push_async_callback(self.ledger.close)
        blobs = BlobStore(config.max_blob_bytes, config.max_total_bytes)
        self.metrics = ManagerMetrics(self.status, blobs)
        for record in reversed(await self.ledger.history(None, LOOKED_BACK)):
            if record.report is not None and record.report.ok:
                self.metrics.succeeded(record.time + record.report.seconds)
        tasks = Tasks(self.ledger, Compiler(blobs), self.metrics)
        self._undo.callback(tasks.close)
        machine = ManagerMachine(
            self.ledger.cluster,
            self.ledger.epoch,
            config.deadlines,
            software_version(),
            await tasks.commits(),
            await self.ledger.highest(),
            await self.ledger.identities(),
            await self.ledger.holds(),
        )
        self._shell = Shell(machine, tasks, blobs, self.metrics, self._leads)
        publishers = Publishers(checked_roots(config.directories), config.deadlines)
        self._undo.push_async_callback(publishers.stop)
        self._publishers = publishers
        servicers = []
        if publishers.address:
            own = ManagerServicer(
                self._shell, blobs, self.ledger, config.deadlines, Access(ServerSecurity()), publishers
            )
            await self._start_own(own, publishers.address)
            servicers.append(own)
        self.http_address = await self._start_http() if config.http else ""
        servicers.append(ManagerServicer(self._shell, blobs, self.ledger, config.deadlines, self._access, publishers))
        self.address = await self._start_grpc(servicers)
        log.info(
            "manager started grpc=%s http=%s ledger=%s cluster=%s epoch=%d",
            self.dialled,
            self.http_address or "none",
            self.ledger.name,
            self.ledger.cluster,
            self.ledger.epoch,
        )
        if self.ledger.fresh:
            log.info(
                "ledger=%s is new: this manager knows of no version and no update before. If it had a ledger, stop it "
                "and name that one with --ledger",
                self.ledger.name,
            )

    async def _open_ledger(self) -> Ledger:
        ledger = self.config.ledger
        if self._term is not None:
            return await self._term.ledger()
        assert not is_database(ledger), "a manager on a database needs a term: standby.run_manager"
        path = None if ledger is None else Path(ledger)
        return await Ledger.open(path, self.config.deadlines.ledger_busy, self.config.cluster)

    def _leads(self) -> bool:
        """Whether this manager may decide anything, at this moment."""
        return self._term is None or self._term.held

    async def _start_own(self, servicer: ManagerServicer, address: str) -> None:
        """Serves the manager's own processes, which need no proof of identity: only its user can enter the
        directory."""
        server = grpc.aio.server(options=server_options(self.config.deadlines))
        add_to(server, servicer)
        server.add_insecure_port(address)
        await server.start()
        self._undo.push_async_callback(server.stop, 1.0)

    async def _start_grpc(self, servicers: Sequence[ManagerServicer]) -> str:
        """Starts the gRPC server. servicers: all that `stop` must stop; the last one is served here."""
        host, _ = split_address(self.config.listen)
        door = ServiceDoor(self._access, SERVICES)
        quiet_loop()
        server = grpc.aio.server(interceptors=(door,), options=server_options(self.config.deadlines))
        add_to(server, servicers[-1])
        healthy = health.aio.HealthServicer()  # type: ignore[attr-defined]  # the package fills it in at run time
        health_pb2_grpc.add_HealthServicer_to_server(healthy, server)
        described = CommentedReflection((*SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME))
        reflection_pb2_grpc.add_ServerReflectionServicer_to_server(described, server)
        port = add_port(server, self.config)
        await server.start()
        for name in ("", *SERVICES):
            await healthy.set(name, health_pb2.HealthCheckResponse.SERVING)
        self._undo.push_async_callback(self._stop_grpc, server, servicers, healthy)
        return join_address(host, port)

    async def _stop_grpc(self, server: grpc.aio.Server, servicers: Sequence[ManagerServicer], healthy: Any) -> None:
        self._stopping = True
        self._publishers.refuse()
        for servicer in servicers:
            servicer.stop()
        await healthy.enter_graceful_shutdown()
        ending = stopping()
        if not self._leads():
            ending = unavailable("this manager's term has ended: another one leads, or will in a moment")
        elif not self.deserted and not await self._shell.quiet(self.config.stop_seconds):
            log.warning("an update still ran after %g s: its callers are told UNAVAILABLE", self.config.stop_seconds)
        await self._shell.stop(ending.problem, self.config.deadlines.last_tasks)
        await server.stop(1.0)
        log.info("manager stopped")

    async def _start_http(self) -> str:
        host, _ = split_address(self.config.http)
        application = HttpAccess(build_app(self), self._access, is_loopback(host), self._public_names)
        return await self._undo.enter_async_context(serving_http(application, self.config.http, self.config.security))


def check_config(config: ManagerConfig) -> None:
    """Raises INVALID_ARGUMENT for addresses that are none, that would be served without a proof of identity, or that
    do not say where the manager that leads is."""
    config.security.check()
    for option, address in {"--listen": config.listen, "--http": config.http}.items():
        if address or option == "--listen":
            check_reach(
                split_address(address, option)[0],
                authenticates=config.security.authenticates,
                insecure=config.security.insecure,
            )
    host, port = split_address(dialled(config))
    if is_database(config.ledger) and host in EVERY_ADDRESS:
        raise invalid(
            f"--listen {config.listen}: managers that share a ledger tell callers where the one that leads is. Say "
            f"with --advertise at which name or IP other hosts reach this one, as --advertise NAME:{port}"
        )


def dialled(config: ManagerConfig, bound: str = "") -> str:
    """Where members on other hosts dial. bound: the address that is listened on, if it is not that of the
    configuration. Raises INVALID_ARGUMENT."""
    bound = bound or config.listen
    if not config.advertise:
        return bound
    return with_port(config.advertise, split_address(bound)[1], "--advertise")


def add_port(server: grpc.aio.Server, config: ManagerConfig) -> int:
    """Has a server listen where the configuration says. Returns the port. Raises UNAVAILABLE."""
    check_free(config.listen)
    try:
        credentials = config.security.credentials()
        if credentials is None:
            return server.add_insecure_port(config.listen)
        return server.add_secure_port(config.listen, credentials)
    except RuntimeError as error:
        raise unavailable(f"cannot listen on {config.listen}: {error}") from error


@contextlib.asynccontextmanager
async def serving_http(application: ASGIApp, address: str, security: ServerSecurity) -> AsyncIterator[str]:
    """Serves an application at an address, and yields it with the port that was taken. Raises UNAVAILABLE."""
    host, port = split_address(address)
    try:
        bound = bound_socket(host, port)
        bound.listen()
    except OSError as error:
        raise unavailable(
            f"cannot listen on {address} for HTTP: {error.strerror}; end what listens there, or name "
            "another port (--http; empty: no HTTP)"
        ) from error
    server = HttpServer(application, security)
    running = asyncio.ensure_future(server.serve(sockets=[bound]))
    try:
        yield join_address(host, bound.getsockname()[1])
    finally:
        server.should_exit = True
        await running


def server_options(deadlines: Deadlines) -> list[tuple[str, int]]:
    """Limits incoming messages, detects silent connections within a lease, and allows one server a port."""
    return [
        ("grpc.max_receive_message_length", RECEIVED_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MESSAGE_BYTES),
        ("grpc.keepalive_time_ms", int(deadlines.lease * 500)),
        ("grpc.keepalive_timeout_ms", int(deadlines.lease * 500)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", 100),  # that members send which name several managers
        ("grpc.so_reuseport", 0),
    ]


@contextlib.contextmanager
def running_manager(config: ManagerConfig) -> Iterator[str]:
    """Runs a manager on a background thread with an event loop of its own, and yields its gRPC address. For tests and
    demos.

    Raises as ``ManagerServer.start``. The manager stops when the context ends.
    """
    started: Future[tuple[str, asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    async def serve() -> None:
        stop_event = asyncio.Event()
        async with ManagerServer(config) as server:
            started.set_result((server.address, asyncio.get_running_loop(), stop_event))
            await server.serve(stop_event)

    def run() -> None:
        try:
            asyncio.run(serve())
        except BaseException as error:
            if started.done():
                log.exception("the manager's thread failed")
            else:
                started.set_exception(error)

    thread = threading.Thread(target=run, name="manager", daemon=True)
    thread.start()
    address, loop, stop_event = started.result(config.deadlines.start)
    try:
        yield address
    finally:
        loop.call_soon_threadsafe(stop_event.set)
        thread.join(config.stop_seconds + config.deadlines.start)
