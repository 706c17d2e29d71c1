"""Members that speak the raw protocol over a real channel, one step at a time, as a test tells them to.

They are clients written against the wire contract alone: none of the package's own trainer or agent code runs here.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import sys
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import torch
from google.protobuf.message import Message

from ckpt_engine.channel import ManagerStub
from ckpt_engine.core.manifest import DIGEST_FORMAT
from ckpt_engine.core.problems import code_of
from ckpt_engine.digest.boxes import digest_boxes
from ckpt_engine.v1 import manager_pb2, weights_pb2

WAIT = 60.0
"""Seconds that any expected message may take."""

HOST = weights_pb2.Host(boot_id="boot", pid_namespace="pid", name="here", network_namespace="network")


@contextlib.asynccontextmanager
async def stub_at(address: str) -> AsyncIterator[ManagerStub]:
    """The manager's calls over a channel of this test."""
    async with grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        yield ManagerStub(channel)  # type: ignore[no-untyped-call]


def problem_of(error: grpc.aio.AioRpcError) -> weights_pb2.Problem:
    """The Problem that came with a failed call."""
    (data,) = [value for key, value in error.trailing_metadata() if key == "ckpt-engine-problem-bin"]
    return weights_pb2.Problem.FromString(data)


async def refused(call: Awaitable[Any]) -> weights_pb2.Problem:
    """The Problem of a call that must fail; its code must be the status."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    problem = problem_of(caught.value)
    assert caught.value.code().name == code_of(problem)
    assert caught.value.details() == problem.message
    return problem


@contextlib.asynccontextmanager
async def manager_process(folder: Path) -> AsyncIterator[str]:
    """The address of a manager in a process of its own: in a test's it would share the interpreter lock."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "ckpt_engine", "manager", "--listen", "127.0.0.1:0", "--http", ""),
        *("--ledger", str(folder / "ledger.sqlite3")),
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stderr is not None
    line = (await asyncio.wait_for(process.stderr.readline(), WAIT)).decode()
    assert "manager started" in line
    rest = asyncio.ensure_future(process.stderr.read())
    yield dict(word.split("=", 1) for word in line.split() if "=" in word)["grpc"]
    process.terminate()
    assert await asyncio.wait_for(process.wait(), WAIT) == 0
    told = (await rest).decode()
    assert "manager stopped" in told
    assert "Traceback" not in told


async def put(stub: ManagerStub, message: Message) -> manager_pb2.BlobRef:
    """Stores a message as a blob, in chunks of half a mebibyte."""
    data = message.SerializeToString(deterministic=True)
    ref = manager_pb2.BlobRef(digest=hashlib.sha256(data).digest(), size=len(data))

    async def chunks() -> AsyncIterator[manager_pb2.BlobChunk]:
        yield manager_pb2.BlobChunk(ref=ref)
        for offset in range(0, len(data), 1 << 19):
            yield manager_pb2.BlobChunk(data=data[offset : offset + (1 << 19)])

    stored: manager_pb2.BlobRef = await stub.PutBlob(chunks(), timeout=WAIT)
    assert stored == ref
    return ref


async def get(stub: ManagerStub, ref: manager_pb2.BlobRef) -> bytes:
    """A blob's bytes."""
    return b"".join([chunk.data async for chunk in stub.GetBlob(ref, timeout=WAIT)])


class Stream:
    """One session stream: sends what it is told, and hands out what comes, heartbeats aside."""

    def __init__(self, call: Any, envelope: type[Message]) -> None:
        self.call = call
        self._envelope = envelope
        self.seen: Any = None
        self._epochs: dict[str, int] = {}
        self._writing = asyncio.Lock()

    async def send(self, **body: Message) -> None:
        async with self._writing:
            await self.call.write(self._envelope(**body))

    @contextlib.asynccontextmanager
    async def beating(self, heartbeat: Callable[[], Message]) -> AsyncIterator[None]:
        """Sends a heartbeat every half second, for tests that outlast a lease."""

        async def beat() -> None:
            while True:
                await self.send(heartbeat=heartbeat())
                await asyncio.sleep(0.5)

        beats = asyncio.ensure_future(beat())
        try:
            yield
        finally:
            beats.cancel()

    async def next(self) -> Any:
        """The next message's body. Raises AioRpcError when the stream ended with a status, EOFError when without."""
        end = time.monotonic() + WAIT
        while True:
            message = await asyncio.wait_for(self.call.read(), end - time.monotonic())
            if message is grpc.aio.EOF:
                if (code := await self.call.code()) is not grpc.StatusCode.OK:
                    metadata = await self.call.initial_metadata(), await self.call.trailing_metadata()
                    raise grpc.aio.AioRpcError(code, *metadata, await self.call.details())
                raise EOFError
            field = message.WhichOneof("body")
            if field != "heartbeat":
                return getattr(message, field)

    async def expect(self, kind: type[Message]) -> Any:
        """The next message's body, which must be of this kind."""
        body = await self.next()
        assert isinstance(body, kind), f"expected {kind.__name__}, got {type(body).__name__}: {body}"
        return body

    async def until(self, kind: type[Message]) -> Any:
        """The next message of this kind; others on the way are skipped, and so are repetitions of answered orders."""
        if self.seen is not None and isinstance(self.seen, kind):
            body, self.seen = self.seen, None
        else:
            body = await self.next()
            while not isinstance(body, kind) or self._answered(body):
                body = await self.next()
        if "fence" in kind.DESCRIPTOR.fields_by_name:
            self._epochs[kind.__name__] = body.fence.epoch
        return body

    def _answered(self, body: Any) -> bool:
        epoch = self._epochs.get(type(body).__name__)
        return epoch is not None and body.fence.epoch <= epoch

    async def wait_for(self, kind: type[Message]) -> None:
        """Waits until a message of this kind has come; it stays the next one of ``until``."""
        self.seen = None
        self.seen = await self.until(kind)


async def opened(session: Callable[[], Any], envelope: type[Message], hello: Message) -> Stream:
    """A stream that has sent its hello. Where a refusal overtakes the hello, grpc loses what the server said; members
    take that for a lost connection (connection.py) and connect again, and so does this."""
    for _ in range(20):
        stream = Stream(session(), envelope)
        try:
            await stream.send(hello=hello)
        except grpc.aio.AioRpcError as error:
            if error.details() != "Internal error from Core":
                raise
        else:
            return stream
    raise AssertionError("grpc has lost twenty refusals in turn")


class ScriptedTrainer:
    """One rank. It holds rows of each weight: [rank * n / world_size, (rank + 1) * n / world_size) of axis 0."""

    def __init__(
        self,
        stub: ManagerStub,
        rank: int = 0,
        world_size: int = 1,
        lineage: str = "run",
    ) -> None:
        self.stub = stub
        self.rank = rank
        self.world_size = world_size
        self.lineage = lineage
        self.session_id = str(uuid.uuid4())
        self.weights: dict[str, torch.Tensor] = {}
        self.table = weights_pb2.SourceTable()
        self.stream: Stream

    def rows(self, name: str) -> tuple[int, int]:
        count = self.weights[name].shape[0]
        return self.rank * count // self.world_size, (self.rank + 1) * count // self.world_size

    def hold(self, weights: dict[str, torch.Tensor], stays_sealed: bool = False) -> None:
        """Takes over weights (global tensors) and makes the table of this rank's rows."""
        self.weights = weights
        self.table = weights_pb2.SourceTable(
            host=HOST, id=f"rank {self.rank}", rank=self.rank, stays_sealed=stays_sealed
        )
        self.table.regions.add(id=7, size=1 << 40).offers.add(transport="shared_memory")
        offset = 0
        for index, name in enumerate(sorted(weights)):
            tensor = weights[name]
            self.table.tensors.add(name=name, dtype=str(tensor.dtype).removeprefix("torch."), shape=list(tensor.shape))
            first, last = self.rows(name)
            self.table.shards.add(
                tensor=index,
                start=[first, *(0 for _ in tensor.shape[1:])],
                stop=[last, *tensor.shape[1:]],
                region=7,
                offset=offset,
                stride=list(tensor.stride()),
            )
            offset += (last - first) * (tensor[0].numel() if tensor.numel() else 0) * tensor.itemsize

    async def open(self) -> manager_pb2.Welcome:
        hello = manager_pb2.TrainerHello(
            digest_format=DIGEST_FORMAT,
            lineage=self.lineage,
            rank=self.rank,
            world_size=self.world_size,
            session_id=self.session_id,
            host=HOST,
        )
        self.stream = await opened(self.stub.TrainerSession, manager_pb2.TrainerMessage, hello)
        welcome: manager_pb2.Welcome = await self.stream.expect(manager_pb2.Welcome)
        return welcome

    async def publish(self) -> None:
        await self.stream.send(publish=manager_pb2.Publish(table=await put(self.stub, self.table)))

    async def join(self, weights: dict[str, torch.Tensor], stays_sealed: bool = False) -> None:
        """Opens, publishes and is accepted; only for a world of one rank."""
        self.hold(weights, stays_sealed)
        await self.open()
        await self.publish()
        await self.stream.until(manager_pb2.PublicationAccepted)

    def update(self, **fields: Any) -> asyncio.Task[list[manager_pb2.UpdateEvent]]:
        """Calls UpdateWeights; the task gives all its events."""
        version, adapts = fields.pop("version", None), fields.pop("adapts", False)
        request = manager_pb2.UpdateWeightsRequest(
            lineage=self.lineage,
            rank=self.rank,
            session_id=self.session_id,
            version=version,
            adapts=adapts,
            options=manager_pb2.UpdateOptions(**fields),
        )

        async def collect() -> list[manager_pb2.UpdateEvent]:
            return [event async for event in self.stub.UpdateWeights(request, timeout=60.0)]

        return asyncio.ensure_future(collect())

    async def seal(self) -> manager_pb2.Seal:
        """Answers the next Seal with the digests of what this rank holds."""
        order: manager_pb2.Seal = await self.stream.until(manager_pb2.Seal)
        atoms = weights_pb2.Atoms.FromString(await get(self.stub, order.atoms))
        names = sorted(self.weights)
        boxes = []
        for atom in atoms.atoms:
            tensor = self.weights[names[self.table.shards[atom.shard].tensor]]
            part = tensor[tuple(slice(first, last) for first, last in zip(atom.start, atom.stop, strict=True))]
            boxes.append((part, list(atom.start)))
        digests = await put(self.stub, weights_pb2.Digests(values=await asyncio.to_thread(digest_boxes, boxes)))
        await self.stream.send(sealed=manager_pb2.Sealed(fence=order.fence, atoms=order.atoms, digests=digests))
        return order


class ScriptedReplica:
    """The agent of one replica whose workers each need all of every tensor."""

    def __init__(self, stub: ManagerStub, name: str = "replica", workers: int = 1) -> None:
        self.stub = stub
        self.name = name
        self.session_id = str(uuid.uuid4())
        self.transports = ["shared_memory"]
        self.engine = manager_pb2.Engine(kind="scripted", version="1", url="http://127.0.0.1:1")
        self.workers = [
            manager_pb2.WorkerStatus(
                rank=rank, boot_id=uuid.uuid4().bytes, pid=1000 + rank, state=manager_pb2.WORKER_STATE_NONE
            )
            for rank in range(workers)
        ]
        self.stream: Stream
        self.installed: list[manager_pb2.Install] = []

    def hello(self, **fields: Any) -> manager_pb2.ReplicaHello:
        return manager_pb2.ReplicaHello(
            digest_format=DIGEST_FORMAT,
            name=self.name,
            session_id=self.session_id,
            agent_epoch=fields.pop("agent_epoch", 1),
            engine=self.engine,
            mode=manager_pb2.MODE_STANDALONE,
            host=HOST,
            workers=self.workers,
            transports=self.transports,
            **fields,
        )

    async def open(self) -> manager_pb2.Welcome:
        self.stream = await opened(self.stub.ReplicaSession, manager_pb2.ReplicaMessage, self.hello())
        welcome: manager_pb2.Welcome = await self.stream.expect(manager_pb2.Welcome)
        await self.beat()
        return welcome

    def heartbeat(self) -> manager_pb2.ReplicaHeartbeat:
        return manager_pb2.ReplicaHeartbeat(sequence=1, workers=self.workers, serving=True)

    async def beat(self) -> None:
        await self.stream.send(heartbeat=self.heartbeat())

    async def prepare(self) -> manager_pb2.Prepare:
        """Answers the next Prepare: every worker needs every tensor, whole."""
        order: manager_pb2.Prepare = await self.stream.until(manager_pb2.Prepare)
        manifest = weights_pb2.Manifest.FromString(await get(self.stub, order.manifest))
        needs = weights_pb2.WorkerNeeds(manifest_digest=order.manifest.digest)
        for index, spec in enumerate(manifest.tensors):
            needs.needs.add(tensor=index, start=[0] * len(spec.shape), stop=spec.shape)
        ref = await put(self.stub, needs)
        await self.stream.send(
            prepared=manager_pb2.Prepared(
                fence=order.fence,
                manifest_digest=order.manifest.digest,
                workers=[
                    manager_pb2.PreparedWorker(
                        rank=worker.rank,
                        needs=ref,
                        host=HOST,
                        boot_id=worker.boot_id,
                        manifest_digest=order.manifest.digest,
                    )
                    for worker in self.workers
                ],
            )
        )
        return order

    async def install(self) -> manager_pb2.Install:
        """Takes the next Install and reports that every worker carried it out; reads no weights."""
        order: manager_pb2.Install = await self.stream.until(manager_pb2.Install)
        self.installed.append(order)
        before = self.workers[0].identity
        outcome = manager_pb2.ReplicaOutcome(
            replica=self.name,
            fence=order.fence,
            outcome=manager_pb2.OUTCOME_NEW_SERVING,
            before=before if self.workers[0].HasField("identity") else None,
            after=order.identity,
            pause_seconds=0.01,
            sync_seconds=0.02,
            stages=[manager_pb2.StageSeconds(stage=manager_pb2.STAGE_QUIESCE, seconds=0.01)],
        )
        for worker, part in zip(self.workers, order.workers, strict=True):
            plan = weights_pb2.WorkerPlan.FromString(await get(self.stub, part.plan))
            needs = len(weights_pb2.Digests.FromString(await get(self.stub, part.expected)).values)
            worker.state = manager_pb2.WORKER_STATE_CLEAN
            worker.epoch = order.fence.epoch
            worker.identity.CopyFrom(order.identity)
            outcome.workers.add(rank=worker.rank, bytes=plan.bytes, tensors=needs, verified=needs, copies=1)
            outcome.bytes += plan.bytes
            first = plan.sources[0]
            edge = {"source": first.source, "transport": first.transport, "reason": first.reason}
            outcome.edges.add(worker_rank=worker.rank, bytes=plan.bytes, **edge)
        await self.beat()
        await self.stream.send(outcome=outcome)
        await self.stream.until(manager_pb2.OutcomeReceived)
        return order


async def pair(stub: ManagerStub, name: str = "replica", workers: int = 1) -> tuple[ScriptedTrainer, ScriptedReplica]:
    """A trainer of one rank that has published, and a replica."""
    trainer, replica = ScriptedTrainer(stub), ScriptedReplica(stub, name, workers)
    await trainer.join(some_weights())
    await replica.open()
    return trainer, replica


async def ranks(stub: ManagerStub, *weights: dict[str, torch.Tensor]) -> list[ScriptedTrainer]:
    """A trainer of so many ranks, each with weights of its own, that have published."""
    trainers = [ScriptedTrainer(stub, rank, len(weights)) for rank in range(len(weights))]
    for trainer, held in zip(trainers, weights, strict=True):
        trainer.hold(held)
        await trainer.open()
        await trainer.publish()
    return trainers


async def one_update(
    trainers: list[ScriptedTrainer], replicas: list[ScriptedReplica], /, prepares: bool, **fields: Any
) -> manager_pb2.UpdateReport:
    """prepares: whether the replicas are asked what they need."""
    calls = [trainer.update(**fields) for trainer in trainers]
    if prepares:
        await asyncio.gather(*(replica.prepare() for replica in replicas))
    await asyncio.gather(*(trainer.seal() for trainer in trainers))
    await asyncio.gather(*(replica.install() for replica in replicas))
    reports = [(await call)[-1].report for call in calls]
    assert all(report == reports[0] for report in reports)
    return reports[0]


def some_weights(seed: int = 0, sizes: Sequence[int] = (8, 4)) -> dict[str, torch.Tensor]:
    """Two bfloat16 weights and a bias, small."""
    generator = torch.Generator().manual_seed(seed)
    rows, columns = sizes
    return {
        "layer.weight": torch.randn(rows, columns, generator=generator).bfloat16(),
        "layer.bias": torch.randn(rows, generator=generator),
        "head.weight": torch.randn(2 * rows, columns, generator=generator).bfloat16(),
    }
