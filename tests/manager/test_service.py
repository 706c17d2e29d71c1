"""What a manager is to anybody who connects: its ports, its manners at hello, its blobs, its end."""

import asyncio
import hashlib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import grpc.aio
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from scripted_members import (
    WAIT,
    ScriptedReplica,
    ScriptedTrainer,
    Stream,
    get,
    manager_process,
    put,
    refused,
    some_weights,
    stub_at,
)

from ckpt_engine.addresses import join_address, split_address
from ckpt_engine.channel import ManagerStub
from ckpt_engine.core.loopback import is_loopback
from ckpt_engine.core.manifest import DIGEST_FORMAT
from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.machines import events
from ckpt_engine.machines.manager.machine import ManagerMachine
from ckpt_engine.manager import shell
from ckpt_engine.manager.service import SERVICES, ManagerConfig, ManagerServer, running_manager
from ckpt_engine.v1 import manager_pb2, weights_pb2
from tests.waiting import until

Code = weights_pb2.Problem.Code


async def test_health_answers_and_ends_before_the_server(config: ManagerConfig) -> None:
    server = ManagerServer(config)
    await server.start()
    async with grpc.aio.insecure_channel(server.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for name in ("", *SERVICES):
            answer = await health.Check(health_pb2.HealthCheckRequest(service=name), timeout=60)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        watch = health.Watch(health_pb2.HealthCheckRequest(service=SERVICES[0]), timeout=60)
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        stopping = asyncio.ensure_future(server.stop())
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        await stopping


async def test_reflection_describes_both_services(manager: ManagerServer) -> None:
    async with grpc.aio.insecure_channel(manager.address) as channel:
        reflect = reflection_pb2_grpc.ServerReflectionStub(channel)

        async def ask(**question: str) -> reflection_pb2.ServerReflectionResponse:
            async def questions() -> AsyncIterator[reflection_pb2.ServerReflectionRequest]:
                yield reflection_pb2.ServerReflectionRequest(**question)

            async for answer in reflect.ServerReflectionInfo(questions(), timeout=60):
                return answer
            raise AssertionError("no answer")

        listed = (await ask(list_services="")).list_services_response.service
        assert {*SERVICES} <= {service.name for service in listed}
        files = (await ask(file_containing_symbol=SERVICES[0])).file_descriptor_response.file_descriptor_proto
        described = FileDescriptorProto.FromString(files[0])
        assert "UpdateWeights" in [method.name for service in described.service for method in service.method]
        told = {tuple(place.path): place.leading_comments for place in described.source_code_info.location}
        message = [each.name for each in described.message_type].index("VersionStatus")
        assert "that some replica serves" in told[(4, message)]
        assert "whose workers hold it" in told[(4, message, 2, 2)], "of its third field"
        assert all(len(place.span) == 3 for place in described.source_code_info.location), "grpcurl wants spans"


@pytest.mark.parametrize("kind", ["trainer", "replica"])
async def test_a_session_begins_with_hello(stub: ManagerStub, kind: str) -> None:
    envelope = manager_pb2.TrainerMessage if kind == "trainer" else manager_pb2.ReplicaMessage
    stream = Stream(stub.TrainerSession() if kind == "trainer" else stub.ReplicaSession(), envelope)
    await stream.send(goodbye=manager_pb2.Goodbye(reason="rude"))
    problem = await refused(stream.next())
    assert problem.code == Code.CODE_INVALID_ARGUMENT
    assert "Goodbye came first" in problem.message


async def test_a_silent_stream_is_closed(config: ManagerConfig) -> None:
    impatient = replace(config, deadlines=replace(config.deadlines, hello=0.3))
    async with ManagerServer(impatient) as server, stub_at(server.address) as stub:
        stream = Stream(stub.TrainerSession(), manager_pb2.TrainerMessage)
        problem = await refused(stream.next())
    assert problem.code == Code.CODE_DEADLINE_EXCEEDED
    assert "0.3 s" in problem.message


async def test_a_peer_that_ends_its_side_at_once_is_answered_first(
    stub: ManagerStub, caplog: pytest.LogCaptureFixture
) -> None:
    """No status is sent while a message is being written: gRPC takes that for a fault."""
    for number in range(10):
        call = stub.TrainerSession()
        hello = manager_pb2.TrainerHello(
            digest_format=DIGEST_FORMAT, lineage="run", world_size=1, session_id=f"session {number}"
        )
        await call.write(manager_pb2.TrainerMessage(hello=hello))
        await call.done_writing()
        assert [message.WhichOneof("body") async for message in call] == ["welcome"]
        assert await call.code() is grpc.StatusCode.OK
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_sessions_show_in_the_status_until_they_end(manager: ManagerServer, stub: ManagerStub) -> None:
    trainer, replica = ScriptedTrainer(stub), ScriptedReplica(stub)
    welcome = await trainer.open()
    assert welcome.lease_seconds > welcome.heartbeat_seconds > 0
    await replica.open()
    status = await stub.GetStatus(manager_pb2.GetStatusRequest(), timeout=60)
    assert [(found.lineage, found.connected) for found in status.trainers] == [("run", True)]
    assert [(found.name, found.connected) for found in status.replicas] == [("replica", True)]
    assert status.fence.cluster == welcome.fence.cluster
    replica.stream.call.cancel()
    await until(lambda: not any(found.connected for found in manager.status().replicas), "the session has ended")


async def test_another_engine_under_a_connected_name_is_refused(stub: ManagerStub) -> None:
    """Whatever its agent's epoch is: two servers must not be taken for one."""
    first = ScriptedReplica(stub)
    await first.open()
    for epoch in (1, 2):
        second = ScriptedReplica(stub)
        second.stream = Stream(stub.ReplicaSession(), manager_pb2.ReplicaMessage)
        await second.stream.send(hello=second.hello(agent_epoch=epoch))
        answer = await second.stream.expect(manager_pb2.Refused)
        assert answer.problem.code == Code.CODE_ABORTED
        assert "with another engine" in answer.problem.message
    status = await stub.GetStatus(manager_pb2.GetStatusRequest(), timeout=60)
    assert [(found.connected, found.workers[0].boot_id) for found in status.replicas] == [
        (True, first.workers[0].boot_id)
    ]


@pytest.mark.parametrize("change", ["rank", "lineage", "replica"])
async def test_a_session_that_speaks_for_a_second_member_ends_and_leaves_nobody_connected(
    manager: ManagerServer, stub: ManagerStub, change: str
) -> None:
    """Whatever it says hello as: else the first one would stay connected when the stream has ended."""
    member = ScriptedReplica(stub) if change == "replica" else ScriptedTrainer(stub, 0, 2)
    await member.open()
    if isinstance(member, ScriptedReplica):
        member.name = "another"
        await member.stream.send(hello=member.hello())
    else:
        lineage, rank = ("run", 1) if change == "rank" else ("another", 0)
        hello = manager_pb2.TrainerHello(
            digest_format=DIGEST_FORMAT, lineage=lineage, rank=rank, world_size=2, session_id=member.session_id
        )
        await member.stream.send(hello=hello)
    problem = await refused(member.stream.until(manager_pb2.PublicationAccepted))
    assert problem.code == Code.CODE_INVALID_ARGUMENT
    assert "one session speaks for one member" in problem.message

    def nobody() -> bool:
        status = manager.status()
        return not any(found.connected for found in (*status.trainers, *status.replicas))

    await until(nobody, "none is connected")


async def test_blobs_over_the_wire(stub: ManagerStub) -> None:
    message = weights_pb2.Digests(values=range(400_000))  # 3.2 MB: several chunks
    ref = manager_pb2.BlobRef(digest=hashlib.sha256(message.SerializeToString()).digest(), size=message.ByteSize())
    assert not (await stub.HasBlob(ref, timeout=60)).present
    assert await put(stub, message) == ref
    assert (await stub.HasBlob(ref, timeout=60)).present
    assert await get(stub, ref) == message.SerializeToString()
    assert await put(stub, message) == ref


async def test_a_corrupt_blob_is_refused(stub: ManagerStub) -> None:
    ref = manager_pb2.BlobRef(digest=hashlib.sha256(b"right").digest(), size=5)

    async def chunks() -> AsyncIterator[manager_pb2.BlobChunk]:
        yield manager_pb2.BlobChunk(ref=ref, data=b"wrong")

    assert (await refused(stub.PutBlob(chunks(), timeout=60))).code == Code.CODE_DATA_LOSS
    assert not (await stub.HasBlob(ref, timeout=60)).present
    assert (await refused(get(stub, ref))).code == Code.CODE_NOT_FOUND


async def test_an_oversized_blob_is_refused(stub: ManagerStub, config: ManagerConfig) -> None:
    async def chunks() -> AsyncIterator[manager_pb2.BlobChunk]:
        yield manager_pb2.BlobChunk(ref=manager_pb2.BlobRef(digest=bytes(32), size=config.max_blob_bytes + 1))

    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.PutBlob(chunks(), timeout=60)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_a_message_over_the_limit_does_not_reach_the_manager(stub: ManagerStub) -> None:
    stream = Stream(stub.TrainerSession(), manager_pb2.TrainerMessage)
    await stream.send(
        hello=manager_pb2.TrainerHello(digest_format=DIGEST_FORMAT, lineage="x" * (5 << 20), world_size=1)
    )
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stream.next()
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_a_second_manager_on_the_ledger_or_port_is_refused(manager: ManagerServer, config: ManagerConfig) -> None:
    with pytest.raises(CkptEngineError, match="is in use by pid"):
        await ManagerServer(config).start()
    assert config.ledger is not None
    other = replace(config, ledger=config.ledger.with_name("other.sqlite3"))
    for busy in (replace(other, listen=manager.address), replace(other, http=manager.http_address)):
        with pytest.raises(CkptEngineError, match="cannot listen"):
            await ManagerServer(busy).start()
    async with ManagerServer(other):  # nothing of the failed ones is left
        pass


async def test_what_members_published_stays_whatever_others_store(config: ManagerConfig) -> None:
    small = replace(config, max_total_bytes=100_000)
    async with ManagerServer(small) as server, stub_at(server.address) as stub:
        trainer = ScriptedTrainer(stub)
        await trainer.join(some_weights())
        for number in range(20):
            await put(stub, weights_pb2.Digests(values=[number] * 1000))
        data = trainer.table.SerializeToString(deterministic=True)
        table = manager_pb2.BlobRef(digest=hashlib.sha256(data).digest(), size=len(data))
        assert await get(stub, table) == data


async def test_a_restarted_manager_is_the_same_cluster(config: ManagerConfig) -> None:
    clusters = set()
    for _ in range(2):
        async with ManagerServer(config) as server:
            clusters.add(server.status().fence.cluster)
    assert len(clusters) == 1


def test_a_manager_on_a_thread_of_its_own(config: ManagerConfig) -> None:
    with running_manager(config) as address:
        with grpc.insecure_channel(address) as channel:
            status = ManagerStub(channel).GetStatus(manager_pb2.GetStatusRequest(), timeout=60)
        assert status.fence.cluster
        with pytest.raises(CkptEngineError, match="is in use"), running_manager(config):
            raise AssertionError("started")


async def test_stopping_tells_members_and_callers(config: ManagerConfig) -> None:
    server = ManagerServer(replace(config, stop_seconds=4.0))
    await server.start()
    async with stub_at(server.address) as stub:
        first, replica = ScriptedTrainer(stub, 0, 2), ScriptedReplica(stub)
        first.hold(some_weights())
        await first.open()
        await first.publish()
        await replica.open()
        call = first.update()  # waits for rank 1, which never comes
        await until(lambda: server.status().phase != "idle", "the call is known")
        stopping = asyncio.ensure_future(server.stop())
        await asyncio.sleep(0.2)
        late = await refused(ScriptedReplica(stub, "late").open())
        assert (late.code, call.done()) == (Code.CODE_UNAVAILABLE, False), (
            "no new member while the call may still finish"
        )
        await asyncio.wait_for(stopping, WAIT)
        problem = await refused(call)
        assert (problem.code, "stopping" in problem.message) == (Code.CODE_UNAVAILABLE, True)
        assert (await refused(replica.stream.until(manager_pb2.Refused))).code == Code.CODE_UNAVAILABLE


async def test_a_machine_that_raises_ends_the_manager_and_everybody_is_told(
    config: ManagerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The defect is put in; there is none that could be provoked."""
    original = ManagerMachine._message

    def message(self: ManagerMachine, peer: events.Peer, body: object, now: float) -> None:
        if isinstance(body, manager_pb2.Progress):
            self._state.out.append(events.Send(peer, manager_pb2.OutcomeReceived()))
            raise ZeroDivisionError("a defect of ours")
        original(self, peer, body, now)

    monkeypatch.setattr(ManagerMachine, "_message", message)
    async with ManagerServer(config) as server, stub_at(server.address) as stub:
        serving = asyncio.ensure_future(server.serve(asyncio.Event()))
        first, sender, other = ScriptedTrainer(stub, 0, 2), ScriptedReplica(stub, "sender"), ScriptedReplica(stub)
        first.hold(some_weights())
        await first.open()
        await first.publish()
        await sender.open()
        await other.open()
        call = first.update()  # waits for rank 1, which never comes
        while not server._shell._calls:  # noqa: ASYNC110 - the call is on its way
            await asyncio.sleep(0.01)
        await sender.stream.send(progress=manager_pb2.Progress())
        answer = await sender.stream.expect(manager_pb2.Refused)  # and not what the event had commanded
        assert answer.problem.code == Code.CODE_INTERNAL
        assert "the manager failed on Progress: ZeroDivisionError('a defect of ours')" in answer.problem.message
        for stream in (other.stream, first.stream):
            told = await stream.until(manager_pb2.Refused)
            assert told.problem.code == weights_pb2.Problem.CODE_UNAVAILABLE
            assert "a defect of ours" in told.problem.message
        assert (await refused(call)).code == Code.CODE_UNAVAILABLE
        for late in (ScriptedReplica(stub, "late").open(), ScriptedTrainer(stub, lineage="late").update()):
            with pytest.raises((grpc.aio.AioRpcError, AssertionError), match=r"UNAVAILABLE|the manager ends"):
                await late
        with pytest.raises(CkptEngineError, match="a defect of ours"):
            await asyncio.wait_for(serving, WAIT)


async def test_a_member_that_does_not_read_is_closed(config: ManagerConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The replica says so much that the answers fill the connection; the manager ends it and goes on."""
    monkeypatch.setattr(shell, "SESSION_QUEUE", 16)
    impatient = replace(config, deadlines=replace(config.deadlines, write=0.5))
    async with ManagerServer(impatient) as server, stub_at(server.address) as stub:
        replica = ScriptedReplica(stub)
        await replica.open()
        closed = False
        for _ in range(40_000):
            try:
                await replica.beat()
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                closed = True
                break
        assert closed
        assert (await stub.GetStatus(manager_pb2.GetStatusRequest(), timeout=60)).fence.cluster


@pytest.mark.parametrize("address", ["", "50051", "host:", ":1", "host:x", "host:65536", "::1:5", "host:-1"])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(CkptEngineError, match=r"write host:port|stands in brackets"):
        split_address(address)


def test_addresses() -> None:
    for address, parts in (("127.0.0.1:0", ("127.0.0.1", 0)), ("[::1]:50051", ("::1", 50051)), ("box:8", ("box", 8))):
        assert split_address(address) == parts
        assert join_address(*parts) == address
    assert [is_loopback(host) for host in ("127.0.0.2", "::1", "localhost", "0.0.0.0", "::", "box")] == [
        *(True, True, True, False, False, False)
    ]


async def test_serve_runs_until_it_is_told_to_end(tmp_path: Path) -> None:
    async with manager_process(tmp_path) as address, stub_at(address) as stub:
        assert (await stub.GetStatus(manager_pb2.GetStatusRequest(), timeout=60)).fence.cluster
