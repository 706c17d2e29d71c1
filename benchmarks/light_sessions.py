"""Light replicas, each a session over its own connection: python -m benchmarks.light_sessions MANAGER FIRST COUNT.

Each is a client of the wire contract: hello, heartbeats, the needs of one worker, and for each install what an agent
says and asks (its expected digests, four words of progress, the workers' words, the outcome). Nothing is read or
installed, and no code of the agent runs, so that one interpreter carries hundreds of them.

Prints "ready" when all were welcomed; then, for each line of its input, a JSON object of counts (see message_counts).
Ends with its input.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from typing import Any

import grpc.aio

from benchmarks.message_counts import CountingStub, kind
from ckpt_engine.channel import ManagerStub, channel_options
from ckpt_engine.v1 import manager_pb2, weights_pb2
from tests.manager.scripted_members import HOST, ScriptedReplica, get, put

STAGES = (manager_pb2.STAGE_QUIESCE, manager_pb2.STAGE_TRANSFER, manager_pb2.STAGE_INSTALL, manager_pb2.STAGE_VERIFY)


class CountedSession:
    """A session stream; counts what passes."""

    def __init__(self, call: Any, counts: Counter[str]) -> None:
        self._call, self._counts = call, counts
        self._writing = asyncio.Lock()  # a stream takes one message at a time; heartbeats come from a task of their own

    async def write(self, message: Any) -> None:
        self._counts[f"message {kind(message)}"] += 1
        async with self._writing:
            await self._call.write(message)

    async def read(self) -> Any:
        message = await self._call.read()
        if message is not grpc.aio.EOF:
            self._counts[f"message {kind(message)}"] += 1
        return message


class LightReplica(ScriptedReplica):
    """One replica with one worker."""

    def __init__(self, address: str, name: str, counts: Counter[str]) -> None:
        self._channel = grpc.aio.insecure_channel(address, options=channel_options())  # a connection of its own
        stub = ManagerStub(self._channel)  # type: ignore[no-untyped-call]
        super().__init__(CountingStub(stub, counts), name)  # type: ignore[arg-type]
        self._session = CountedSession(stub.ReplicaSession(), counts)
        self._needs: dict[bytes, manager_pb2.BlobRef] = {}
        self._outcome: manager_pb2.ReplicaOutcome | None = None

    async def say(self, **body: Any) -> None:
        await self._session.write(manager_pb2.ReplicaMessage(**body))

    async def run(self, welcomed: asyncio.Event) -> None:
        """Until the session ends."""
        await self.say(hello=self.hello())
        beats: asyncio.Future[None] | None = None
        while (message := await self._session.read()) is not grpc.aio.EOF:
            match message.WhichOneof("body"):
                case "welcome":
                    beats = asyncio.ensure_future(self._beats(message.welcome.heartbeat_seconds))
                    welcomed.set()
                case "prepare":
                    await self._prepare(message.prepare)
                case "install":
                    await self._install(message.install)
                case "refused":
                    raise RuntimeError(message.refused.problem.message)
        if beats is not None:
            beats.cancel()

    async def _beats(self, seconds: float) -> None:
        while True:
            await self.say(heartbeat=self.heartbeat())
            await asyncio.sleep(seconds)

    async def _prepare(self, order: manager_pb2.Prepare) -> None:
        digest = order.manifest.digest
        if digest not in self._needs:
            manifest = weights_pb2.Manifest.FromString(await get(self.stub, order.manifest))
            needs = weights_pb2.WorkerNeeds(manifest_digest=digest)
            for index, spec in enumerate(manifest.tensors):
                needs.needs.add(tensor=index, start=[0] * len(spec.shape), stop=spec.shape)
            self._needs[digest] = await put(self.stub, needs)
        (worker,) = self.workers
        told = manager_pb2.PreparedWorker(
            rank=0, needs=self._needs[digest], host=HOST, boot_id=worker.boot_id, manifest_digest=digest
        )
        await self.say(prepared=manager_pb2.Prepared(fence=order.fence, manifest_digest=digest, workers=[told]))

    async def _install(self, order: manager_pb2.Install) -> None:
        if self._outcome is None or self._outcome.fence != order.fence:
            (worker,), (part,) = self.workers, order.workers
            needs = len(weights_pb2.Digests.FromString(await get(self.stub, part.expected)).values)
            for stage in STAGES:
                await self.say(progress=manager_pb2.Progress(fence=order.fence, stage=stage))
            worker.state, worker.epoch = manager_pb2.WORKER_STATE_CLEAN, order.fence.epoch
            worker.identity.CopyFrom(order.identity)
            self._outcome = manager_pb2.ReplicaOutcome(
                replica=self.name, fence=order.fence, outcome=manager_pb2.OUTCOME_NEW_SERVING, after=order.identity
            )
            self._outcome.workers.add(rank=0, tensors=needs, verified=needs, copies=1)
            await self.say(heartbeat=self.heartbeat())
        await self.say(outcome=self._outcome)


async def serve(address: str, first: int, count: int) -> None:
    """Runs the sessions until the input ends."""
    counts: Counter[str] = Counter()
    replicas = [LightReplica(address, f"light-{number:03d}", counts) for number in range(first, first + count)]
    welcomed = [asyncio.Event() for _ in replicas]
    running = [asyncio.ensure_future(each.run(event)) for each, event in zip(replicas, welcomed, strict=True)]
    waiting = asyncio.ensure_future(asyncio.gather(*(event.wait() for event in welcomed)))
    await asyncio.wait([waiting, *running], return_when=asyncio.FIRST_COMPLETED)
    loop = asyncio.get_running_loop()
    for task in running:
        if task.done():
            task.result()
    print("ready", flush=True)
    while await loop.run_in_executor(None, sys.stdin.readline):
        for task in running:
            if task.done():
                task.result()
        print(json.dumps(counts), flush=True)
    for task in running:
        task.cancel()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
