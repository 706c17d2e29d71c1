"""The gRPC calls of the manager, turned into sessions, calls and blobs. It decides nothing about updates."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeAlias

import grpc.aio
from google.protobuf.message import Message as ProtobufMessage

from ckpt_engine.core.deadlines import Deadlines
from ckpt_engine.core.enums import enum_word
from ckpt_engine.core.problems import CkptEngineError, deadline, invalid
from ckpt_engine.machines import events
from ckpt_engine.machines.events import Call, ManagerEvent
from ckpt_engine.machines.wire import unpack
from ckpt_engine.manager import update_records
from ckpt_engine.manager.access import Access
from ckpt_engine.manager.blobs import BlobStore, chunks_of, receive
from ckpt_engine.manager.errors import refuse, stopping
from ckpt_engine.manager.ledger import Ledger
from ckpt_engine.manager.publishers import Publishers, lineage_of
from ckpt_engine.manager.sessions import carry, first_message, write
from ckpt_engine.manager.shell import Shell
from ckpt_engine.manager.watchers import WatchOutbox
from ckpt_engine.security.grants import Caller
from ckpt_engine.v1 import manager_pb2, manager_pb2_grpc

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]

MEMBERS = ("trainer", "holder", "replica")
"""Roles that may store and fetch blobs."""

log = logging.getLogger("ckpt_engine.manager")


class ManagerServicer(
    manager_pb2_grpc.CheckpointEngineManagerServicer, manager_pb2_grpc.CheckpointEngineMembersServicer
):
    """Runs on the manager's event loop; each method is one call of one peer."""

    def __init__(
        self,
        shell: Shell,
        blobs: BlobStore,
        ledger: Ledger,
        deadlines: Deadlines,
        access: Access,
        publishers: Publishers,
    ) -> None:
        self._access = access
        self._ledger = ledger
        self._shell = shell
        self._blobs = blobs
        self._deadlines = deadlines
        self._publishers = publishers
        self._stopping = False

    def stop(self) -> None:
        """Refuses sessions and calls with UNAVAILABLE from now on; running ones continue."""
        self._stopping = True

    # -- sessions

    async def TrainerSession(self, requests: object, context: Context) -> None:  # noqa: N802
        await self._session("trainer", manager_pb2.TrainerHello, manager_pb2.TrainerCommand, context)

    async def ReplicaSession(self, requests: object, context: Context) -> None:  # noqa: N802
        await self._session("replica", manager_pb2.ReplicaHello, manager_pb2.ReplicaCommand, context)

    async def HolderSession(self, requests: object, context: Context) -> None:  # noqa: N802
        await self._session("holder", manager_pb2.HolderHello, manager_pb2.HolderCommand, context)

    async def _session(
        self, kind: str, hello_type: type[ProtobufMessage], envelope: type[ProtobufMessage], context: Context
    ) -> None:
        caller = await self._admit(context, kind)
        try:
            first = await first_message(context, self._deadlines.hello)
            if first is None:
                return
            hello = unpack(first)
            if not isinstance(hello, hello_type):
                first_name = "an unknown message" if hello is None else hello.DESCRIPTOR.name
                raise invalid(f"a session begins with {hello_type.DESCRIPTOR.name}, but {first_name} came first")
            caller.require(kind, _name_of(hello))
        except CkptEngineError as error:
            await refuse(context, error)
        await self._admit(context, kind)
        peer, outbox = self._shell.open_session(kind, envelope, hello)
        label, values = _log_fields(hello)
        log.info(f"session opened peer=%s {label} address=%s caller=%r", peer, *values, context.peer(), caller.name)
        goodbye = False  # whether it came

        def on_message(message: ProtobufMessage) -> None:
            nonlocal goodbye
            body = unpack(message)
            goodbye = goodbye or isinstance(body, manager_pb2.Goodbye)
            if isinstance(body, hello_type) and _name_of(body) != _name_of(hello):
                # Only the first name was checked against the grant. The machine compares the rank.
                why = f"one session speaks for one member: this one for {_name_of(hello)!r}, not {_name_of(body)!r}"
                outbox.close(invalid(why).problem)
                return
            if body is not None and not outbox.closed:
                self._shell.handle(events.Message(peer, body))

        reason = "the connection broke"
        try:
            reason = await carry(context, outbox, on_message, self._deadlines.write)
        finally:
            if outbox.problem is not None:
                reason = outbox.problem.message
            elif goodbye:
                reason = "it said goodbye"
            log.info(f"session ended peer=%s {label} reason=%r", peer, *values, reason)
            self._shell.end_session(peer, reason)

    # -- calls

    async def UpdateWeights(self, request: manager_pb2.UpdateWeightsRequest, context: Context) -> None:  # noqa: N802
        caller = await self._admit(context, "trainer")
        try:
            caller.require("trainer", request.lineage)
        except CkptEngineError as error:
            await refuse(context, error)
        await self._call("update", lambda call: events.UpdateCall(call, request), context)

    async def UpdateFromDirectory(  # noqa: N802
        self, request: manager_pb2.UpdateFromDirectoryRequest, context: Context
    ) -> None:
        caller = await self._admit(context, "trainer")
        try:
            caller.require("trainer", lineage_of(request))
            log.info("update from directory=%r lineage=%r caller=%r", request.directory, request.lineage, caller.name)
            async for event in self._publishers.update(request):
                await write(context, event, self._deadlines.write)
        except CkptEngineError as error:
            await refuse(context, error)

    async def Rollback(self, request: manager_pb2.RollbackRequest, context: Context) -> None:  # noqa: N802
        caller = await self._admit(context, "operator")
        log.info("rollback called lineage=%r version=%d caller=%r", request.lineage, request.version, caller.name)
        await self._call("rollback", lambda call: events.RollbackCall(call, request), context)

    async def SteerDeployment(  # noqa: N802
        self, request: manager_pb2.SteerDeploymentRequest, context: Context
    ) -> ProtobufMessage:
        caller = await self._admit(context, "operator")
        action = enum_word(manager_pb2.SteerDeploymentRequest.Action, request.action)
        log.info("deploy action=%s deployment=%d caller=%r", action, request.number, caller.name)
        return await self._answer("deploy", lambda call: events.OperatorCall(call, request), context)

    async def WaitForUpdate(  # noqa: N802
        self, request: manager_pb2.WaitForUpdateRequest, context: Context
    ) -> ProtobufMessage:
        await self._admit(context)
        return await self._answer("wait", lambda call: events.WaitCall(call, request), context)

    async def GetUpdate(  # noqa: N802
        self, request: manager_pb2.GetUpdateRequest, context: Context
    ) -> manager_pb2.UpdateRecord:
        await self._admit(context)
        try:
            return update_records.message(await update_records.find_update(self._ledger, request))
        except CkptEngineError as error:
            await refuse(context, error)

    async def ListUpdates(  # noqa: N802
        self, request: manager_pb2.ListUpdatesRequest, context: Context
    ) -> manager_pb2.ListUpdatesResponse:
        await self._admit(context)
        try:
            return await update_records.list_updates(self._ledger, self._shell.refusals, request)
        except CkptEngineError as error:
            await refuse(context, error)

    async def Sleep(self, request: manager_pb2.SleepRequest, context: Context) -> ProtobufMessage:  # noqa: N802
        caller = await self._admit(context, "operator", "trainer")
        response = await self._answer("sleep", lambda call: events.SleepCall(call, request), context)
        _log_results(f"asleep at level {request.level or 1}", response, caller)
        return response

    async def Wake(self, request: manager_pb2.WakeRequest, context: Context) -> ProtobufMessage:  # noqa: N802
        caller = await self._admit(context, "operator", "trainer")
        response = await self._answer("wake", lambda call: events.WakeCall(call, request), context)
        _log_results(f"awake ({', '.join(request.tags) or 'all'})", response, caller)
        return response

    async def RetryReplica(  # noqa: N802
        self, request: manager_pb2.RetryReplicaRequest, context: Context
    ) -> ProtobufMessage:
        await self._admit(context, "operator")
        return await self._answer("retry", lambda call: events.OperatorCall(call, request), context)

    async def HoldReplica(  # noqa: N802
        self, request: manager_pb2.HoldReplicaRequest, context: Context
    ) -> ProtobufMessage:
        caller = await self._admit(context, "operator")
        log.info("hold replica=%r reason=%r caller=%r", request.name, request.reason, caller.name)
        return await self._answer("hold", lambda call: events.OperatorCall(call, request), context)

    async def ReleaseReplica(  # noqa: N802
        self, request: manager_pb2.ReleaseReplicaRequest, context: Context
    ) -> ProtobufMessage:
        caller = await self._admit(context, "operator")
        log.info("release replica=%r caller=%r", request.name, caller.name)
        return await self._answer("release", lambda call: events.OperatorCall(call, request), context)

    async def EvictReplica(  # noqa: N802
        self, request: manager_pb2.EvictReplicaRequest, context: Context
    ) -> ProtobufMessage:
        await self._admit(context, "operator")
        return await self._answer("evict", lambda call: events.OperatorCall(call, request), context)

    async def EvictLineage(  # noqa: N802
        self, request: manager_pb2.EvictLineageRequest, context: Context
    ) -> ProtobufMessage:
        await self._admit(context, "operator")
        return await self._answer("evict", lambda call: events.OperatorCall(call, request), context)

    async def ForgetLineage(  # noqa: N802
        self, request: manager_pb2.ForgetLineageRequest, context: Context
    ) -> ProtobufMessage:
        caller = await self._admit(context, "operator")
        log.info("forget lineage=%r dry_run=%s caller=%r", request.lineage, request.dry_run, caller.name)
        return await self._answer("forget", lambda call: events.OperatorCall(call, request), context)

    async def GetStatus(  # noqa: N802
        self, request: manager_pb2.GetStatusRequest, context: Context
    ) -> manager_pb2.GetStatusResponse:
        await self._caller(context)
        return self._shell.status()

    async def LocateVersion(  # noqa: N802
        self, request: manager_pb2.LocateVersionRequest, context: Context
    ) -> manager_pb2.LocateVersionResponse:
        await self._admit(context, *MEMBERS)
        try:
            return self._shell.located(request)
        except CkptEngineError as error:
            await refuse(context, error)

    async def WatchReplicas(self, request: manager_pb2.WatchReplicasRequest, context: Context) -> None:  # noqa: N802
        caller = await self._admit(context)
        try:
            number, outbox = self._shell.watchers.open(request.watcher)
        except CkptEngineError as error:
            await refuse(context, error)
        log.info("watch began watcher=%r address=%s caller=%r", request.watcher, context.peer(), caller.name)
        try:
            while (message := await self._news_or_beat(outbox)) is not None:
                await write(context, message, self._deadlines.write)
        finally:
            self._shell.watchers.close(number)
            log.info("watch ended watcher=%r", request.watcher)
        if outbox.problem is not None:
            await refuse(context, CkptEngineError(outbox.problem))

    async def _news_or_beat(self, outbox: WatchOutbox) -> manager_pb2.WatchReplicasResponse | None:
        """The next news; if that takes long, a message that only shows that the manager is alive."""
        try:
            async with asyncio.timeout(self._deadlines.lease / 2):
                return await outbox.take()
        except TimeoutError:
            return self._shell.watchers.beat()

    async def _call(self, kind: str, event: Callable[[Call], ManagerEvent], context: Context) -> None:
        """Writes the machine's messages to this call until the machine ends it, then ends with its problem."""
        call, outbox = self._shell.open_call(kind, event)
        try:
            while (message := await outbox.take()) is not None:
                await write(context, message, self._deadlines.write)
        finally:
            self._shell.end_call(call)
        if outbox.problem is not None:
            await refuse(context, CkptEngineError(outbox.problem))

    async def _answer(self, kind: str, event: Callable[[Call], ManagerEvent], context: Context) -> ProtobufMessage:
        """Returns the machine's response to this call, or ends the call with the machine's problem."""
        try:
            return await self._shell.answer(kind, event)
        except CkptEngineError as error:
            await refuse(context, error)

    async def _admit(self, context: Context, *roles: str) -> Caller:
        """Admits a caller with one of these roles (none named: any grant), unless the manager is stopping."""
        caller = await self._caller(context)
        try:
            if roles:
                caller.require_any(*roles)
        except CkptEngineError as error:
            await refuse(context, error)
        if self._stopping:
            await refuse(context, stopping())
        return caller

    async def _caller(self, context: Context) -> Caller:
        try:
            return self._access.of_call(context)
        except CkptEngineError as error:
            await refuse(context, error)

    # -- blobs

    async def PutBlob(  # noqa: N802
        self, requests: AsyncIterator[manager_pb2.BlobChunk], context: Context
    ) -> manager_pb2.BlobRef:
        await self._admit(context, *MEMBERS)
        try:
            return await asyncio.wait_for(receive(self._blobs, requests), self._deadlines.blobs)
        except TimeoutError:
            await refuse(context, deadline(f"the blob did not arrive within {self._deadlines.blobs:g} s"))
        except CkptEngineError as error:
            await refuse(context, error)

    async def GetBlob(self, request: manager_pb2.BlobRef, context: Context) -> None:  # noqa: N802
        await self._admit(context, *MEMBERS)
        try:
            data = self._blobs.get(request)
        except CkptEngineError as error:
            await refuse(context, error)
        for chunk in chunks_of(request, data):
            await write(context, chunk, self._deadlines.write)

    async def HasBlob(  # noqa: N802
        self, request: manager_pb2.BlobRef, context: Context
    ) -> manager_pb2.HasBlobResponse:
        await self._admit(context, *MEMBERS)
        return manager_pb2.HasBlobResponse(present=self._blobs.has(request))


def _name_of(hello: ProtobufMessage) -> str:
    """The name that a member's grant must cover."""
    if isinstance(hello, manager_pb2.TrainerHello):
        return hello.lineage
    return hello.name if isinstance(hello, manager_pb2.ReplicaHello | manager_pb2.HolderHello) else ""


def _log_fields(hello: ProtobufMessage) -> tuple[str, tuple[object, ...]]:
    """The format and the values that name a session's member in the log."""
    if isinstance(hello, manager_pb2.TrainerHello):
        return "lineage=%r rank=%d world_size=%d", (hello.lineage, hello.rank, hello.world_size)
    return ("holder=%r" if isinstance(hello, manager_pb2.HolderHello) else "replica=%r"), (_name_of(hello),)


def _log_results(done: str, response: ProtobufMessage, caller: Caller) -> None:
    """Logs for each replica whether it is now asleep, or awake, as was asked."""
    assert isinstance(response, manager_pb2.SleepResponse | manager_pb2.WakeResponse)
    for result in response.results:
        if result.HasField("problem"):
            log.warning("replica=%r is not %s problem=%r", result.replica, done, result.problem.message)
        else:
            log.info("replica=%r is %s caller=%r", result.replica, done, caller.name)


def add_to(server: grpc.aio.Server, servicer: ManagerServicer) -> None:
    """Registers both services with a server."""
    manager_pb2_grpc.add_CheckpointEngineManagerServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
    manager_pb2_grpc.add_CheckpointEngineMembersServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
