"""A replica on a thread of the test: a client of the wire contract alone that really reads and checks the weights.

It holds every tensor whole, in plain tensors of its own. What it does at prepare and install a test can change.
"""

from __future__ import annotations

import contextlib
import hashlib
import queue
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import torch

from ckpt_engine.channel import ManagerStub, open_blocking_channel
from ckpt_engine.core.manifest import DIGEST_FORMAT
from ckpt_engine.digest.boxes import digest_boxes
from ckpt_engine.host.facts import this_host
from ckpt_engine.torch_dtypes import torch_dtype
from ckpt_engine.transport.base import Move
from ckpt_engine.transport.registry import all_transports
from ckpt_engine.v1 import manager_pb2, weights_pb2

BEAT_SECONDS = 0.2


class PlainReplica:
    """Connects on `start` and again whenever the manager comes back, until `stop`.

    weights: what it holds after the last install, by name; identity: of which version. prepare_problem: the answer to
    every prepare, if set. before_preparing, before_reading: called before a prepare is answered, and before the first
    byte of an install is read.
    """

    def __init__(self, address: str, name: str = "plain", pool: str = "") -> None:
        self.name, self.pool = name, pool
        self.weights: dict[str, torch.Tensor] = {}
        self.identity: weights_pb2.Identity | None = None
        self.installs: list[manager_pb2.Install] = []
        self.before_reading: Callable[[], object] = lambda: None
        self.before_preparing: Callable[[], object] = lambda: None
        self.prepare_problem: weights_pb2.Problem | None = None
        self._address = address
        self._transports = all_transports()
        self._worker = manager_pb2.WorkerStatus(
            rank=0, boot_id=uuid.uuid4().bytes, pid=1, state=manager_pb2.WORKER_STATE_NONE
        )
        self._session_id = uuid.uuid4().hex
        self._manifest = weights_pb2.Manifest()
        self._answered: dict[int, manager_pb2.ReplicaOutcome] = {}
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> PlainReplica:
        self._thread.start()
        return self

    def stop(self) -> None:
        self._ending.set()
        self._thread.join(60)

    def _run(self) -> None:
        while not self._ending.is_set():
            with open_blocking_channel(self._address) as channel:
                self._stub: Any = ManagerStub(channel)
                self._outgoing: queue.SimpleQueue[manager_pb2.ReplicaMessage | None] = queue.SimpleQueue()
                self._send(hello=self._hello())
                with contextlib.suppress(grpc.RpcError):
                    for command in self._stub.ReplicaSession(self._messages()):
                        self._obey(command)
            self._ending.wait(0.1)

    def _messages(self) -> Iterator[manager_pb2.ReplicaMessage]:
        while not self._ending.is_set():
            try:
                message = self._outgoing.get(timeout=BEAT_SECONDS)
            except queue.Empty:
                message = manager_pb2.ReplicaMessage(heartbeat=self._beat())
            if message is not None:
                yield message

    def _send(self, **body: Any) -> None:
        self._outgoing.put(manager_pb2.ReplicaMessage(**body))

    def _hello(self) -> manager_pb2.ReplicaHello:
        return manager_pb2.ReplicaHello(
            digest_format=DIGEST_FORMAT,
            name=self.name,
            session_id=self._session_id,
            agent_epoch=1,
            engine=manager_pb2.Engine(kind="plain", version="1", url="http://127.0.0.1:1"),
            mode=manager_pb2.MODE_STANDALONE,
            host=this_host(),
            workers=[self._worker],
            transports=list(self._transports),
            pool=self.pool,
        )

    def _beat(self) -> manager_pb2.ReplicaHeartbeat:
        return manager_pb2.ReplicaHeartbeat(
            sequence=1, workers=[self._worker], serving=self._worker.state == manager_pb2.WORKER_STATE_CLEAN
        )

    def _obey(self, command: manager_pb2.ReplicaCommand) -> None:
        match command.WhichOneof("body"):
            case "prepare":
                self._prepare(command.prepare)
            case "install":
                self._install(command.install)

    def _prepare(self, order: manager_pb2.Prepare) -> None:
        self.before_preparing()
        prepared = manager_pb2.Prepared(fence=order.fence, manifest_digest=order.manifest.digest)
        if self.prepare_problem is not None:
            prepared.problem.CopyFrom(self.prepare_problem)
        else:
            self._manifest = weights_pb2.Manifest.FromString(self._get(order.manifest))
            needs = weights_pb2.WorkerNeeds(manifest_digest=order.manifest.digest)
            for index, spec in enumerate(self._manifest.tensors):
                needs.needs.add(tensor=index, start=[0] * len(spec.shape), stop=spec.shape)
            prepared.workers.add(
                rank=0,
                needs=self._put(needs.SerializeToString(deterministic=True)),
                host=this_host(),
                boot_id=self._worker.boot_id,
                manifest_digest=order.manifest.digest,
            )
        self._send(prepared=prepared)

    def _install(self, order: manager_pb2.Install) -> None:
        if order.fence.epoch not in self._answered:
            self.installs.append(order)
            self._send(
                progress=manager_pb2.Progress(fence=order.fence, stage=manager_pb2.STAGE_TRANSFER, bytes_total=1)
            )
            self.before_reading()
            self._answered[order.fence.epoch] = self._read(order)
        self._send(heartbeat=self._beat())
        self._send(outcome=self._answered[order.fence.epoch])

    def _read(self, order: manager_pb2.Install) -> manager_pb2.ReplicaOutcome:
        (part,) = order.workers
        plan = weights_pb2.WorkerPlan.FromString(self._get(part.plan))
        expected = weights_pb2.Digests.FromString(self._get(part.expected))
        wanted = [torch.empty(tuple(spec.shape), dtype=torch_dtype(spec.dtype)) for spec in self._manifest.tensors]
        outcome = manager_pb2.ReplicaOutcome(replica=self.name, fence=order.fence)
        started = time.monotonic()
        for number, source in enumerate(plan.sources):
            regions = {region.id: region for region in source.regions}
            moves = [
                Move(
                    regions[piece.region],
                    piece.offset,
                    tuple(b - a for a, b in zip(piece.start, piece.stop, strict=True)),
                    tuple(piece.stride),
                    self._manifest.tensors[piece.need].dtype,
                    wanted[piece.need][tuple(slice(a, b) for a, b in zip(piece.start, piece.stop, strict=True))],
                )
                for piece in plan.pieces
                if piece.source == number
            ]
            opened = self._transports[source.transport].open(list(source.regions))
            copied = opened.prepare(moves).run()
            opened.close()
            outcome.edges.add(
                source=source.source,
                source_rank=source.rank,
                transport=source.transport,
                reason=source.reason,
                bytes=copied,
            )
        found = digest_boxes([(tensor, [0] * tensor.dim()) for tensor in wanted])
        equal = sum(a == b for a, b in zip(found, expected.values, strict=True))
        report = outcome.workers.add(
            bytes=plan.bytes, tensors=len(wanted), verified=equal, copies=1, transfer_seconds=time.monotonic() - started
        )
        outcome.bytes = plan.bytes
        outcome.sync_seconds = outcome.pause_seconds = time.monotonic() - started
        if equal == len(wanted):
            self.weights = {spec.name: tensor for spec, tensor in zip(self._manifest.tensors, wanted, strict=True)}
            self.identity = order.identity
            self._worker.state, self._worker.epoch = manager_pb2.WORKER_STATE_CLEAN, order.fence.epoch
            self._worker.identity.CopyFrom(order.identity)
            outcome.outcome = manager_pb2.OUTCOME_NEW_SERVING
            outcome.after.CopyFrom(order.identity)
        else:
            self._worker.state = manager_pb2.WORKER_STATE_DIRTY
            outcome.outcome = manager_pb2.OUTCOME_QUARANTINED
            report.problem.code = weights_pb2.Problem.CODE_DATA_LOSS
            report.problem.message = f"{len(wanted) - equal} tensors differ from what was sealed"
            outcome.problem.CopyFrom(report.problem)
        return outcome

    def _get(self, ref: manager_pb2.BlobRef) -> bytes:
        return b"".join(chunk.data for chunk in self._stub.GetBlob(ref, timeout=60))

    def _put(self, data: bytes) -> manager_pb2.BlobRef:
        ref = manager_pb2.BlobRef(digest=hashlib.sha256(data).digest(), size=len(data))
        chunks = [manager_pb2.BlobChunk(ref=ref, data=data)]
        stored: manager_pb2.BlobRef = self._stub.PutBlob(iter(chunks), timeout=60)
        return stored
