"""The manager's public calls from Python, for all programs but trainer ranks: `Client` blocks, `AsyncClient` is for
asyncio. Neither needs torch or keeps a session.

Decides how a call is sent, waited for and ended. What calls there are, and how their answers are read, is in
client_calls.py; the manager decides what is accepted.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self, Unpack

import grpc
import grpc.aio

from ckpt_engine.addresses import MANAGER
from ckpt_engine.channel import ManagerStub, error_of, open_blocking_channel, open_channel
from ckpt_engine.client_calls import Answer, Ask, Asks, WatchedReplicas, held_versions
from ckpt_engine.connection import checked_address
from ckpt_engine.core.deadlines import Deadlines
from ckpt_engine.core.problems import CkptEngineError, aborted, internal, precondition
from ckpt_engine.leader import reached
from ckpt_engine.options import DeployAction, MemoryTag, Progress, RollbackOptions, UpdateOptions
from ckpt_engine.replica_wait import ReplicaWait
from ckpt_engine.report import UpdateReport
from ckpt_engine.security.client import ClientSecurity
from ckpt_engine.v1 import manager_pb2

POLL_SECONDS = 0.5
"""Seconds between two status calls of `wait_for_replicas`."""

logger = logging.getLogger("ckpt_engine.client")


class Client:
    """Calls the manager, and waits for its answers. Each method may be called from any thread.

    Each raises CkptEngineError with a `code` for the kind of problem: the manager's refusal, UNAVAILABLE if it cannot
    be reached, DEADLINE_EXCEEDED if it did not answer in time.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        security: ClientSecurity | None = None,
        deadlines: Deadlines | None = None,
    ) -> None:
        """address: the manager, host:port, or several with commas between them; none: CKPT_ENGINE_MANAGER, or
        127.0.0.1:50051. security: certificates and a token; none: those of the environment (CKPT_ENGINE_AUTHORITY,
        CKPT_ENGINE_TOKEN_FILE …). deadlines: none: the defaults, changed by CKPT_ENGINE_DEADLINES. Dials with the first
        call.

        Raises INVALID_ARGUMENT for an invalid address or environment.
        """
        self.address, self._asks = _settings(address, deadlines)
        self._channel = open_blocking_channel(self.address, security)
        self._calls: Any = ManagerStub(self._channel)
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connection; calls that wait end with ABORTED. May be repeated."""
        self._closed = True
        self._channel.close()

    # -- what there is

    def status(self) -> manager_pb2.GetStatusResponse:
        """Trainers, holders, replicas and the manager's phase: the message of the protocol (proto/ckpt_engine/v1)."""
        return self._answer(self._asks.status())

    def replicas(self, pool: str | None = None) -> list[manager_pb2.ReplicaStatus]:
        """The replicas, by name: what each serves and is to serve, and why these differ. pool: those of one pool; ""
        is the pool without a name; none: all."""
        return [each for each in self.status().replicas if pool in (None, each.pool)]

    def versions(self, lineage: str | None = None) -> list[manager_pb2.VersionStatus]:
        """The versions that can be gone back to or read, or that replicas hold, the newest first. lineage: only of this
        one; None: all."""
        return [each for each in held_versions(self.status()) if lineage in (None, each.identity.lineage)]

    def watch(self, watcher: str = "") -> Iterator[Mapping[str, manager_pb2.WatchedReplica]]:
        """Yields all replicas by name, now and whenever one changes, for ever: the state, version and URL of each, as
        gateways see them. watcher: this caller's name in the manager's log. Raises UNAVAILABLE when the connection
        ends; call again.
        """
        watched = WatchedReplicas()
        call: Any = self._stub.WatchReplicas(self._asks.watch(watcher))
        try:
            for message in call:
                if (replicas := watched.take(message)) is not None:
                    yield replicas
        except grpc.RpcError as error:
            raise error_of(error, self.address) from None
        finally:
            call.cancel()

    def wait_for_replicas(self, count: int, *, pool: str = "", timeout: float = 600.0) -> list[str]:
        """Returns the names of the replicas that updates bring weights to, once the pool has `count` of them.

        timeout: seconds; then raises DEADLINE_EXCEEDED. Waits also for a manager that does not run yet.
        """
        wait = ReplicaWait(count, pool, timeout, logger)
        while True:
            try:
                status = self.status()
            except CkptEngineError as error:
                wait.take_error(error)
            else:
                if (found := wait.look(status)) is not None:
                    return found
            time.sleep(wait.pause(POLL_SECONDS))

    # -- updates

    def update_from_directory(
        self,
        directory: str | os.PathLike[str],
        version: int | None = None,
        *,
        lineage: str | None = None,
        check_finite: bool = False,
        draft_directory: str | os.PathLike[str] | None = None,
        on_progress: Progress | None = None,
        **options: Unpack[UpdateOptions],
    ) -> UpdateReport:
        """Brings replicas to the safetensors files of a directory, without a trainer. Returns when that has ended.

        directory: its absolute path, or that of one file, the same on the manager's host and on those of the replicas
        (or of relays); the manager was started with `--allow-directory`. version: none: the lineage's last one plus
        one. lineage: what it counts in; none: "directory". check_finite: refuse weights that hold NaN or infinity.
        draft_directory: of the draft model, if the version is to have one (see `Trainer.publish`).
        on_progress: called on this thread with each UpdateProgress; what it raises ends the wait, and the update goes
        on. options: as for `Trainer.update_weights`, see `UpdateOptions`.

        Asked again for files that are unchanged, and that all replicas which took them serve, it returns the same
        report.

        Returns the report also if some replicas failed: look at `report.ok`. Raises when it was refused (no replica
        was touched): NOT_FOUND, INVALID_ARGUMENT or DATA_LOSS for a checkpoint that is not whole, PERMISSION_DENIED
        outside the roots, FAILED_PRECONDITION as `Trainer.update_weights`; UNAVAILABLE or DEADLINE_EXCEEDED if it
        could not be brought to a report.
        """
        ask = self._asks.from_directory(directory, version, lineage, check_finite, draft_directory, options)
        return self._report(ask, on_progress)

    def rollback(
        self,
        version: int,
        *,
        lineage: str | None = None,
        on_progress: Progress | None = None,
        **options: Unpack[RollbackOptions],
    ) -> UpdateReport:
        """Brings replicas back to a version that relays, or other holders, hold. Returns when that has ended.

        version: by its number. lineage: of which run; none: the only one of which that number is held. on_progress:
        called on this thread with each UpdateProgress; what it raises ends the wait. options: see `RollbackOptions`.

        Versions that are sealed later count on above the highest number ever used. Replicas that start late or again
        are brought to the version that was gone back to, until the next update.

        Returns the report also if some replicas failed: look at `report.ok`. Raises when it was refused (no replica
        was touched): NOT_FOUND, naming what is held by what, if nothing holds the version; INVALID_ARGUMENT if several
        lineages are meant; FAILED_PRECONDITION if what is held cannot be believed or read, or no replica can take it;
        ABORTED while an update of the lineage runs. KeyboardInterrupt ends the call, which is taken back unless the
        intent is on the disk already.
        """
        return self._report(self._asks.rollback(version, lineage, options), on_progress)

    def deploy(self, action: DeployAction, number: int | None = None, *, reason: str = "") -> manager_pb2.Deployment:
        """Approves the next wave of a staged deployment, pauses or resumes it, or undoes it. Returns it as it is then.

        number: of the deployment, as `status` and `report.deployment` say it; none: the only undecided one. reason: of
        an undo, for people. Raises NOT_FOUND if there is no such deployment; FAILED_PRECONDITION if it is decided, or
        if its wave goes on, so that there is nothing to approve yet.
        """
        return self._answer(self._asks.deploy(action, number, reason))

    def wait(self, lineage: str, version: int, *, timeout: float | None = None) -> UpdateReport:
        """Returns the report of the lineage's last update to a version, once that has ended. As `Trainer.wait`, but
        raises UNAVAILABLE while there is no manager."""
        return self._answer(self._asks.wait(lineage, version, timeout))

    def find_update(
        self, version: int | None = None, *, lineage: str | None = None, epoch: int | None = None
    ) -> manager_pb2.UpdateRecord:
        """The newest update to a version, or the one of an epoch, from the manager's ledger: its version, its `epoch`,
        and its `report` unless it still runs. lineage: with a version; None: the only one that has it.

        Raises NOT_FOUND, naming the updates that are kept; INVALID_ARGUMENT if several lineages have that version.
        """
        return self._answer(self._asks.update(version, lineage, epoch))

    def updates(self, limit: int = 50, *, before: int | None = None) -> list[manager_pb2.UpdateRecord]:
        """The last updates, newest first, at most 200; fewer if their reports are large. before: only epochs below this
        one."""
        return self._answer(self._asks.updates(limit, before))

    # -- replicas

    def sleep(
        self, level: int = 1, *, replicas: Sequence[str] = (), pool: str = "", timeout: float | None = None
    ) -> list[manager_pb2.SleepWakeResult]:
        """Has replicas close and give their memory up. level: 1 keeps weights on the host, 2 discards them. replicas:
        those that are named; empty: all of the pool. timeout: seconds for the slowest. Returns a result for each: one
        that does not sleep has a `problem`."""
        return self._answer(self._asks.sleep(level, replicas, pool, timeout))

    def wake(
        self,
        tags: Sequence[MemoryTag] = (),
        *,
        replicas: Sequence[str] = (),
        pool: str = "",
        timeout: float | None = None,
    ) -> list[manager_pb2.SleepWakeResult]:
        """Has replicas take their memory back. tags: "weights" before "kv_cache"; none: both. replicas, pool, timeout,
        and the results: as for `sleep`. A replica that discarded its weights serves again after its next update."""
        return self._answer(self._asks.wake(tags, replicas, pool, timeout))

    def retry(self, name: str) -> str:
        """Has a replica brought to what it is to serve now, however often that has failed. Returns a sentence about
        what will happen. Raises FAILED_PRECONDITION, with the reason, if that cannot work."""
        return self._answer(self._asks.retry(name))

    def hold(self, name: str, reason: str = "") -> manager_pb2.OperatorHold:
        """Leaves a replica as it is, also in updates, until `release`. reason: for people."""
        return self._answer(self._asks.hold(name, reason))

    def release(self, name: str) -> str:
        """Ends a hold. Returns a sentence about what comes next."""
        return self._answer(self._asks.release(name))

    def evict(self, name: str, reason: str = "") -> bool:
        """Takes a replica out: its agent ends for good. Returns whether that was connected. reason: for its log."""
        return self._answer(self._asks.evict(name, reason))

    # -- lineages

    def evict_lineage(self, lineage: str, reason: str = "") -> manager_pb2.EvictLineageResponse:
        """Ends a run: its ranks' sessions end for good, and what they published is released. Replicas keep what they
        serve. reason: for the ranks' logs."""
        return self._answer(self._asks.evict_lineage(lineage, reason))

    def forget(self, lineage: str, *, dry_run: bool = False) -> list[str]:
        """Forgets a lineage, but for the numbers of its versions: no replica is to serve it any more. Returns the
        effects, a sentence each. dry_run: only returns them. Raises FAILED_PRECONDITION while ranks or replicas use
        it."""
        return self._answer(self._asks.forget(lineage, dry_run))

    @property
    def _stub(self) -> Any:
        _check_open(self._closed)
        return self._calls

    def _answer(self, ask: Ask[Answer]) -> Answer:
        try:
            return ask.read(getattr(self._stub, ask.method)(ask.request, timeout=ask.seconds))
        except grpc.RpcError as error:
            raise error_of(error, self.address) from None

    def _report(self, ask: Ask[manager_pb2.UpdateEvent], on_progress: Progress | None) -> UpdateReport:
        report: UpdateReport | None = None
        call: Any = getattr(self._stub, ask.method)(ask.request, timeout=ask.seconds)
        try:
            for event in call:
                report = _report_of(event, on_progress) or report
        except grpc.RpcError as error:
            raise error_of(error, self.address) from None
        finally:
            call.cancel()
        return _require_report(report, ask)


class AsyncClient:
    """The methods of `Client` for an event loop. All calls are made on one loop. Cancelling a call's task cancels the
    call at the manager too."""

    def __init__(
        self,
        address: str | None = None,
        *,
        security: ClientSecurity | None = None,
        deadlines: Deadlines | None = None,
    ) -> None:
        """As `Client`."""
        self.address, self._asks = _settings(address, deadlines)
        checked_address(self.address)
        self._security = security
        self._channel: grpc.aio.Channel | None = None  # belongs to the loop of the first call
        self._calls: Any = None
        self._open: set[Any] = set()  # calls that wait
        self._closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def close(self) -> None:
        """As `Client.close`."""
        self._closed = True
        for call in tuple(self._open):  # grpc does not end streams that are read by a generator
            call.cancel()
        if self._channel is not None:
            await self._channel.close(None)

    async def status(self) -> manager_pb2.GetStatusResponse:
        """As `Client.status`."""
        return await self._answer(self._asks.status())

    async def replicas(self, pool: str | None = None) -> list[manager_pb2.ReplicaStatus]:
        """As `Client.replicas`."""
        return [each for each in (await self.status()).replicas if pool in (None, each.pool)]

    async def versions(self, lineage: str | None = None) -> list[manager_pb2.VersionStatus]:
        """As `Client.versions`."""
        return [each for each in held_versions(await self.status()) if lineage in (None, each.identity.lineage)]

    async def watch(self, watcher: str = "") -> AsyncIterator[Mapping[str, manager_pb2.WatchedReplica]]:
        """As `Client.watch`."""
        watched = WatchedReplicas()
        with self._pending_call(self._stub.WatchReplicas(self._asks.watch(watcher))) as call:
            async for message in call:
                if (replicas := watched.take(message)) is not None:
                    yield replicas

    async def wait_for_replicas(self, count: int, *, pool: str = "", timeout: float = 600.0) -> list[str]:  # noqa: ASYNC109
        """As `Client.wait_for_replicas`."""
        wait = ReplicaWait(count, pool, timeout, logger)
        while True:
            try:
                status = await self.status()
            except CkptEngineError as error:
                wait.take_error(error)
            else:
                if (found := wait.look(status)) is not None:
                    return found
            await asyncio.sleep(wait.pause(POLL_SECONDS))

    async def update_from_directory(
        self,
        directory: str | os.PathLike[str],
        version: int | None = None,
        *,
        lineage: str | None = None,
        check_finite: bool = False,
        draft_directory: str | os.PathLike[str] | None = None,
        on_progress: Progress | None = None,
        **options: Unpack[UpdateOptions],
    ) -> UpdateReport:
        """As `Client.update_from_directory`; on_progress is called on the loop."""
        ask = self._asks.from_directory(directory, version, lineage, check_finite, draft_directory, options)
        return await self._report(ask, on_progress)

    async def rollback(
        self,
        version: int,
        *,
        lineage: str | None = None,
        on_progress: Progress | None = None,
        **options: Unpack[RollbackOptions],
    ) -> UpdateReport:
        """As `Client.rollback`; on_progress is called on the loop."""
        return await self._report(self._asks.rollback(version, lineage, options), on_progress)

    async def deploy(
        self, action: DeployAction, number: int | None = None, *, reason: str = ""
    ) -> manager_pb2.Deployment:
        """As `Client.deploy`."""
        return await self._answer(self._asks.deploy(action, number, reason))

    async def wait(self, lineage: str, version: int, *, timeout: float | None = None) -> UpdateReport:  # noqa: ASYNC109
        """As `Client.wait`."""
        return await self._answer(self._asks.wait(lineage, version, timeout))

    async def find_update(
        self, version: int | None = None, *, lineage: str | None = None, epoch: int | None = None
    ) -> manager_pb2.UpdateRecord:
        """As `Client.find_update`."""
        return await self._answer(self._asks.update(version, lineage, epoch))

    async def updates(self, limit: int = 50, *, before: int | None = None) -> list[manager_pb2.UpdateRecord]:
        """As `Client.updates`."""
        return await self._answer(self._asks.updates(limit, before))

    async def sleep(
        self,
        level: int = 1,
        *,
        replicas: Sequence[str] = (),
        pool: str = "",
        timeout: float | None = None,  # noqa: ASYNC109
    ) -> list[manager_pb2.SleepWakeResult]:
        """As `Client.sleep`."""
        return await self._answer(self._asks.sleep(level, replicas, pool, timeout))

    async def wake(
        self,
        tags: Sequence[MemoryTag] = (),
        *,
        replicas: Sequence[str] = (),
        pool: str = "",
        timeout: float | None = None,  # noqa: ASYNC109
    ) -> list[manager_pb2.SleepWakeResult]:
        """As `Client.wake`."""
        return await self._answer(self._asks.wake(tags, replicas, pool, timeout))

    async def retry(self, name: str) -> str:
        """As `Client.retry`."""
        return await self._answer(self._asks.retry(name))

    async def hold(self, name: str, reason: str = "") -> manager_pb2.OperatorHold:
        """As `Client.hold`."""
        return await self._answer(self._asks.hold(name, reason))

    async def release(self, name: str) -> str:
        """As `Client.release`."""
        return await self._answer(self._asks.release(name))

    async def evict(self, name: str, reason: str = "") -> bool:
        """As `Client.evict`."""
        return await self._answer(self._asks.evict(name, reason))

    async def evict_lineage(self, lineage: str, reason: str = "") -> manager_pb2.EvictLineageResponse:
        """As `Client.evict_lineage`."""
        return await self._answer(self._asks.evict_lineage(lineage, reason))

    async def forget(self, lineage: str, *, dry_run: bool = False) -> list[str]:
        """As `Client.forget`."""
        return await self._answer(self._asks.forget(lineage, dry_run))

    @property
    def _stub(self) -> Any:
        _check_open(self._closed)
        if self._channel is None:
            self._channel = open_channel(self.address, self._security)
            self._calls = ManagerStub(self._channel)
        return self._calls

    async def _reached(self) -> Any:
        """The stub, once a manager that leads is reached, if several are named."""
        stub = self._stub
        assert self._channel is not None
        await reached(self._channel)
        return stub

    @contextmanager
    def _pending_call(self, call: Any) -> Iterator[Any]:
        """Registers a call while it waits, raises its failure as our error, and cancels it at the end. `close` cancels
        it too, which grpc reports as if the task had been cancelled."""
        self._open.add(call)
        try:
            yield call
        except grpc.RpcError as error:
            raise error_of(error, self.address) from None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._closed and (task is None or not task.cancelling()):
                raise aborted(f"manager {self.address}: this client was closed before an answer came") from None
            raise
        finally:
            self._open.discard(call)
            call.cancel()

    async def _answer(self, ask: Ask[Answer]) -> Answer:
        stub = await self._reached()
        with self._pending_call(getattr(stub, ask.method)(ask.request, timeout=ask.seconds)) as call:
            return ask.read(await call)

    async def _report(self, ask: Ask[manager_pb2.UpdateEvent], on_progress: Progress | None) -> UpdateReport:
        report: UpdateReport | None = None
        stub = await self._reached()
        with self._pending_call(getattr(stub, ask.method)(ask.request, timeout=ask.seconds)) as call:
            async for event in call:
                report = _report_of(event, on_progress) or report
        return _require_report(report, ask)


def _settings(address: str | None, deadlines: Deadlines | None) -> tuple[str, Asks]:
    resolved = address if address is not None else os.environ.get("CKPT_ENGINE_MANAGER") or MANAGER
    return resolved, Asks(resolved, deadlines or Deadlines.from_environment(os.environ))


def _check_open(closed: bool) -> None:
    if closed:
        raise precondition("this client is closed: make another one")


def _report_of(event: manager_pb2.UpdateEvent, on_progress: Progress | None) -> UpdateReport | None:
    """The report of an event, if it has one; else passes its progress on."""
    if event.HasField("report"):
        return UpdateReport(event.report)
    if on_progress is not None:
        on_progress(event.progress)
    return None


def _require_report(report: UpdateReport | None, ask: Ask[Any]) -> UpdateReport:
    if report is None:
        raise internal(f"the manager ended {ask.method} without a report")
    return report
