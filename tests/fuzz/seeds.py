"""What honest processes send: the messages that are damaged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from google.protobuf.message import Message

from ckpt_engine.core.manifest import DIGEST_FORMAT, blob_digest, canonical
from ckpt_engine.engine.target import ModuleTarget
from ckpt_engine.record.record import record
from ckpt_engine.transport.base import ChunkAsk
from ckpt_engine.transport.file.files import file_region
from ckpt_engine.transport.shared_memory.memory import SharedArena
from ckpt_engine.transport.tcp import wire
from ckpt_engine.transport.ucx import channel
from ckpt_engine.v1 import manager_pb2, weights_pb2, worker_pb2
from ckpt_engine.v1.relay_pb2 import TcpLocator
from ckpt_engine.v1.ucx_pb2 import UcxLocator

HOST = weights_pb2.Host(boot_id="boot", pid_namespace="pid", name="here")
DIGEST = bytes(range(32))
ARENA = SharedArena(4096)


def table(rank: int = 0) -> weights_pb2.SourceTable:
    table = weights_pb2.SourceTable(host=HOST, id=f"rank {rank}", rank=rank, stays_sealed=True)
    table.tensors.add(name="a", dtype="float32", shape=[4, 3])
    table.tensors.add(name="b", dtype="bfloat16", shape=[8])
    table.regions.add(id=7, size=64).offers.add(transport="shared_memory")
    table.shards.add(tensor=0, start=[0, 0], stop=[4, 3], region=7, offset=0, stride=[3, 1])
    table.shards.add(tensor=1, start=[0], stop=[8], region=7, offset=48, stride=[1])
    return table


def sealed_record() -> weights_pb2.SealedRecord:
    record = weights_pb2.SealedRecord(manifest=weights_pb2.Manifest(tensors=table().tensors), digests=[1, 2, 3])
    record.cells.add(tensor=0, start=[0, 0], stop=[2, 3])
    record.cells.add(tensor=0, start=[2, 0], stop=[4, 3])
    record.cells.add(tensor=1, start=[0], stop=[8])
    return record


def needs_seed() -> weights_pb2.WorkerNeeds:
    manifest = weights_pb2.Manifest(tensors=table().tensors)
    needs = weights_pb2.WorkerNeeds(manifest_digest=blob_digest(canonical(manifest)))
    needs.needs.add(tensor=0, start=[0, 0], stop=[4, 3])
    needs.needs.add(tensor=1, start=[0], stop=[8])
    needs.accounted.add(name="a", kind=weights_pb2.Accounted.KIND_LOADED, bytes=48)
    return needs


def blob_chunk() -> bytes:
    """The only chunk of a blob."""
    data = b"0123456789"
    name = manager_pb2.BlobRef(digest=blob_digest(data), size=len(data))
    return manager_pb2.BlobChunk(ref=name, data=data).SerializeToString()


def ref() -> manager_pb2.BlobRef:
    return manager_pb2.BlobRef(digest=DIGEST, size=10)


def fence(epoch: int = 1) -> weights_pb2.Fence:
    return weights_pb2.Fence(cluster="cluster", epoch=epoch)


SAID: dict[type[Message], list[Any]] = {
    manager_pb2.TrainerMessage: [
        manager_pb2.TrainerMessage(
            hello=manager_pb2.TrainerHello(
                digest_format=DIGEST_FORMAT, lineage="run", rank=0, world_size=1, session_id="s", host=HOST, table=ref()
            )
        ),
        manager_pb2.TrainerMessage(publish=manager_pb2.Publish(table=ref())),
        manager_pb2.TrainerMessage(sealed=manager_pb2.Sealed(fence=fence(), atoms=ref(), digests=ref())),
        manager_pb2.TrainerMessage(heartbeat=manager_pb2.Heartbeat(sequence=4)),
        manager_pb2.TrainerMessage(goodbye=manager_pb2.Goodbye(reason="done")),
    ],
    manager_pb2.HolderMessage: [
        manager_pb2.HolderMessage(
            hello=manager_pb2.HolderHello(
                digest_format=DIGEST_FORMAT,
                kind="keeper",
                name="one",
                session_id="s",
                host=HOST,
                held=[
                    manager_pb2.Held(
                        identity=weights_pb2.Identity(lineage="run", version=1, root=DIGEST), table=ref(), record=ref()
                    )
                ],
            )
        ),
        manager_pb2.HolderMessage(sealed=manager_pb2.Sealed(fence=fence(), atoms=ref(), digests=ref())),
        manager_pb2.HolderMessage(heartbeat=manager_pb2.Heartbeat(sequence=4)),
        manager_pb2.HolderMessage(goodbye=manager_pb2.Goodbye(reason="done")),
    ],
    manager_pb2.ReplicaMessage: [
        manager_pb2.ReplicaMessage(
            hello=manager_pb2.ReplicaHello(
                digest_format=DIGEST_FORMAT,
                name="one",
                session_id="r",
                agent_epoch=1,
                engine=manager_pb2.Engine(kind="reference", version="1", url="http://127.0.0.1:1"),
                mode=manager_pb2.MODE_STANDALONE,
                host=HOST,
                workers=[
                    manager_pb2.WorkerStatus(rank=0, boot_id=b"b" * 16, pid=3, state=manager_pb2.WORKER_STATE_NONE)
                ],
                transports=["shared_memory"],
                prepared=[
                    manager_pb2.PreparedWorker(
                        rank=0, needs=ref(), host=HOST, boot_id=b"b" * 16, manifest_digest=DIGEST
                    )
                ],
            )
        ),
        manager_pb2.ReplicaMessage(
            heartbeat=manager_pb2.ReplicaHeartbeat(
                sequence=1,
                workers=[manager_pb2.WorkerStatus(rank=0, boot_id=b"b" * 16, state=manager_pb2.WORKER_STATE_DIRTY)],
            )
        ),
        manager_pb2.ReplicaMessage(
            outcome=manager_pb2.ReplicaOutcome(replica="one", fence=fence(), outcome=manager_pb2.OUTCOME_NEW_SERVING)
        ),
        manager_pb2.ReplicaMessage(progress=manager_pb2.Progress(fence=fence(), stage=manager_pb2.STAGE_TRANSFER)),
        manager_pb2.ReplicaMessage(prepared=manager_pb2.Prepared(fence=fence(), manifest_digest=DIGEST)),
        manager_pb2.ReplicaMessage(sleep_wake_done=manager_pb2.SleepWakeDone(fence=fence())),
        manager_pb2.ReplicaMessage(goodbye=manager_pb2.Goodbye()),
    ],
}


COMMANDS: list[Any] = [
    manager_pb2.ReplicaCommand(
        welcome=manager_pb2.Welcome(
            digest_format=DIGEST_FORMAT, fence=fence(0), lease_seconds=8.0, heartbeat_seconds=1.0
        )
    ),
    manager_pb2.ReplicaCommand(prepare=manager_pb2.Prepare(fence=fence(), manifest=ref(), deadline_seconds=9.0)),
    manager_pb2.ReplicaCommand(
        install=manager_pb2.Install(
            fence=fence(2),
            identity=weights_pb2.Identity(lineage="run", version=3, root=DIGEST),
            workers=[manager_pb2.WorkerInstall(rank=0, plan=ref(), expected=ref())],
            pause_mode=manager_pb2.PAUSE_MODE_KEEP,
            deadline_seconds=9.0,
        )
    ),
    manager_pb2.ReplicaCommand(abandon=manager_pb2.Abandon(fence=fence(2), reason="why")),
    manager_pb2.ReplicaCommand(sleep_wake=manager_pb2.SleepWake(fence=fence(3), level=2, deadline_seconds=9.0)),
    manager_pb2.ReplicaCommand(
        seal=manager_pb2.SealForReaders(fence=fence(4), table=ref(), atoms=ref(), deadline_seconds=9.0)
    ),
    manager_pb2.ReplicaCommand(heartbeat=manager_pb2.Heartbeat(sequence=1)),
    manager_pb2.ReplicaCommand(outcome_received=manager_pb2.OutcomeReceived(fence=fence(2))),
    manager_pb2.ReplicaCommand(refused=manager_pb2.Refused()),
    manager_pb2.ReplicaCommand(not_brought=manager_pb2.NotBrought(reason="nobody holds it")),
]


REQUESTS: list[Any] = [
    worker_pb2.WorkerRequest(sequence=1, rank=0, boot_id=b"b" * 16, want_prepare=worker_pb2.WantOrder()),
    worker_pb2.WorkerRequest(sequence=2, rank=0, boot_id=b"b" * 16, want_install=worker_pb2.WantOrder()),
    worker_pb2.WorkerRequest(
        sequence=3, rank=0, boot_id=b"b" * 16, installed=worker_pb2.WorkerInstalled(fence=fence(2))
    ),
    worker_pb2.WorkerRequest(
        sequence=4,
        boot_id=b"b" * 16,
        prepared=worker_pb2.WorkerPrepared(digest_format=DIGEST_FORMAT, fence=fence(), needs=b"n"),
    ),
    worker_pb2.WorkerRequest(
        sequence=6, boot_id=b"b" * 16, early=worker_pb2.WorkerEarly(fence=fence(2), bytes_done=1, bytes_total=2)
    ),
    worker_pb2.WorkerRequest(sequence=5, boot_id=b"b" * 16, progress=worker_pb2.WorkerProgress(fence=fence(2))),
]


class TwoTensors(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Parameter(torch.zeros(4, 3))
        self.b = torch.nn.Parameter(torch.zeros(8, dtype=torch.bfloat16))

    def load_weights(self, weights: Any) -> None:
        for name, tensor in weights:
            getattr(self, name).data.copy_(tensor)


def prepare_order() -> bytes:
    manifest = weights_pb2.Manifest(tensors=table().tensors)
    order = worker_pb2.PrepareOrder(fence=fence(), manifest=canonical(manifest), deadline_seconds=1.0)
    return order.SerializeToString()


def install_order() -> bytes:
    """A plan that this worker would carry out, from memory that is there; only its weights hash to something else."""
    manifest = canonical(weights_pb2.Manifest(tensors=table().tensors))
    needs = record(weights_pb2.Manifest.FromString(manifest), ModuleTarget(TwoTensors()), digest=blob_digest(manifest))
    region = ARENA.region(7)
    plan = weights_pb2.WorkerPlan(
        manifest_digest=blob_digest(manifest),
        needs_digest=blob_digest(needs.needs_bytes),
        sources=[weights_pb2.PlanSource(rank=0, host=HOST, transport="shared_memory", regions=[region])],
        bytes=64,
    )
    for index, need in enumerate(needs.needs):
        box = need.box
        stride = [3, 1] if len(box.stop) == 2 else [1]
        plan.pieces.add(need=index, region=7, offset=48 * index, start=box.start, stop=box.stop, stride=stride)
    order = worker_pb2.InstallOrder(
        fence=fence(2),
        identity=weights_pb2.Identity(lineage="run", version=1, root=DIGEST),
        plan=canonical(plan),
        expected=canonical(weights_pb2.Digests(values=[1, 2])),
        deadline_seconds=1.0,
    )
    return order.SerializeToString()


def region_seeds() -> list[bytes]:
    cuda = weights_pb2.Region(id=1, transport="cuda_ipc", size=64)
    return [
        ARENA.region(7).SerializeToString(),
        file_region(1, __file__, 0, 64).SerializeToString(),
        cuda.SerializeToString(),
    ]


def relay_asker() -> bytes:
    """All that a relay says that asks another one for chunks over TCP."""
    key = bytes(16)
    return (
        wire.hello(bytes(16), bytes(32), "relay h1")
        + wire.question(wire.CHUNK, key, 1, ChunkAsk.GRANT, placed=True)
        + wire.question(wire.RELEASE, key, 1)
        + wire.question(wire.CHUNK, key, 0)
        + wire.question(wire.CHUNK, bytes(range(16)), 1, ChunkAsk.NOW)
        + wire.question(wire.CHUNK, key, 1, ChunkAsk.GRANT_ANOTHER)
        + wire.question(wire.LEAVE, key)
    )


def relay_owner() -> bytes:
    """Answers to it."""
    return (
        wire.frame(wire.YES)
        + wire.frame(wire.WAIT, wire.PULSE.pack(7))
        + wire.frame(wire.DATA, b"abc")
        + wire.frame(wire.TO, b"relay h2")
        + wire.refusal(wire.NOT, "no source has it")
        + wire.place(1, [(0, 64), (128, 3968)])
        + wire.refusal(wire.GONE, "it was given up")
    )


def ucx_region() -> bytes:
    lane = UcxLocator.Lane(metadata=b"nixlSerDes|Agent", memory=1 << 40)
    locator = UcxLocator(slot_bytes=32, lanes=[lane, lane])
    return weights_pb2.Region(transport="ucx", size=64, locator=locator.SerializeToString()).SerializeToString()


def ucx_helper() -> bytes:
    """Messages of 40 bytes each."""
    said = [
        channel.message(channel.READY, 0),
        channel.message(channel.DONE, 1, 0, b"answer"),
        channel.message(channel.DONE, 2),
    ]
    return b"".join(each.ljust(40, b"\0") for each in said)


def tcp_region() -> bytes:
    locator = TcpLocator(addresses=["10.0.0.1:7000"], arena=bytes(16), token=bytes(32))
    return weights_pb2.Region(transport="tcp", size=64, locator=locator.SerializeToString()).SerializeToString()


def safetensors_file() -> bytes:
    header = b'{"a":{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]},"__metadata__":{"format":"pt"}}'
    return len(header).to_bytes(8, "little") + header + bytes(16)


def model_config() -> bytes:
    """Of a model with one layer."""
    return (
        b'{"architectures":["LlamaForCausalLM"],"hidden_size":8,"intermediate_size":16,"num_attention_heads":2,'
        b'"num_hidden_layers":1,"vocab_size":32,"torch_dtype":"bfloat16"}'
    )


def serialised(messages: Sequence[Message]) -> list[bytes]:
    return [message.SerializeToString() for message in messages]


def ready_order() -> bytes:
    """To get ready for the same plan."""
    order = worker_pb2.InstallOrder.FromString(install_order())
    return worker_pb2.ReadyOrder(
        fence=order.fence, plan=order.plan, expected=order.expected, deadline_seconds=1.0
    ).SerializeToString()
