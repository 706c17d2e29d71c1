"""Everything that reads what another process sent, as functions of bytes.

Each may refuse what it is given with a CkptEngineError; anything else that comes out of one is a defect of ours. What
they remember from one input to the next (machines, stores) is made anew every so often.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from google.protobuf.message import DecodeError, Message

from ckpt_engine.core.manifest import canonical
from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.v1 import manager_pb2, weights_pb2, worker_pb2
from tests.fuzz.machines import agent, manager, relay, trainer, worker_requests
from tests.fuzz.meetings import ANSWERS, HELLOS, QUESTIONS, answers, hellos, questions
from tests.fuzz.mutation import mutated
from tests.fuzz.nodes import MESSAGES, NODE_COMMANDS, follower, leader
from tests.fuzz.readers import (
    SLOT,
    atoms,
    configs,
    gate_requests,
    indexes,
    orders,
    records,
    regions,
    relay_answers,
    relay_askers,
    safetensors,
    state_page,
    tables,
    tcp_locators,
    texts,
    ucx_helpers,
    ucx_locators,
    uploads,
    worker_needs,
)
from tests.fuzz.seeds import (
    COMMANDS,
    DIGEST,
    REQUESTS,
    SAID,
    blob_chunk,
    fence,
    install_order,
    model_config,
    needs_seed,
    prepare_order,
    ready_order,
    ref,
    region_seeds,
    relay_asker,
    relay_owner,
    safetensors_file,
    sealed_record,
    serialised,
    table,
    tcp_region,
    ucx_helper,
    ucx_region,
)

IDENTITY = weights_pb2.Identity(lineage="run", version=1, root=b"r" * 32)


@dataclass
class Target:
    """One reader. kind: the message that its seeds are, if they are one. open: gives the function that takes inputs."""

    name: str
    seeds: Sequence[bytes]
    open: Callable[[], contextlib.AbstractContextManager[Callable[[bytes], None]]]
    kind: type[Message] | None = None
    lives: int = field(default=200)
    """Inputs that one opening takes, before what it remembers is thrown away."""
    weight: float = 1.0
    """Its share of the inputs; less for readers that wait (a torn state word is looked at again) or write files."""


TARGETS = [
    Target(
        "trainer messages",
        serialised(SAID[manager_pb2.TrainerMessage]),
        lambda: manager(manager_pb2.TrainerMessage),
        manager_pb2.TrainerMessage,
        20,
    ),
    Target(
        "holder messages",
        serialised(SAID[manager_pb2.HolderMessage]),
        lambda: manager(manager_pb2.HolderMessage),
        manager_pb2.HolderMessage,
        20,
    ),
    Target("sealed records", [canonical(sealed_record())], records, weights_pb2.SealedRecord),
    Target(
        "replica messages",
        serialised(SAID[manager_pb2.ReplicaMessage]),
        lambda: manager(manager_pb2.ReplicaMessage),
        manager_pb2.ReplicaMessage,
        20,
    ),
    Target(
        "rollback calls",
        [
            canonical(
                manager_pb2.RollbackRequest(
                    lineage="run", version=1, options=manager_pb2.UpdateOptions(timeout_seconds=9.0, replicas=["one"])
                )
            )
        ],
        lambda: manager(manager_pb2.RollbackRequest),
        manager_pb2.RollbackRequest,
        20,
    ),
    Target(
        "wait calls",
        [canonical(manager_pb2.WaitForUpdateRequest(lineage="run", version=1, timeout_seconds=9.0))],
        lambda: manager(manager_pb2.WaitForUpdateRequest),
        manager_pb2.WaitForUpdateRequest,
        20,
    ),
    Target("members' hellos", HELLOS, hellos),
    Target("members' questions", QUESTIONS, questions),
    Target("a lead's answers", ANSWERS, answers, weight=0.5),
    Target("agent commands", serialised(COMMANDS), agent, manager_pb2.ReplicaCommand, 20),
    Target("worker requests", serialised(REQUESTS), worker_requests, worker_pb2.WorkerRequest, 20),
    Target(
        "trainer commands",
        serialised(
            [
                manager_pb2.TrainerCommand(
                    seal=manager_pb2.Seal(fence=fence(1), version=1, atoms=ref(), deadline_seconds=9.0)
                ),
                manager_pb2.TrainerCommand(release=manager_pb2.Release(fence=fence(1))),
                manager_pb2.TrainerCommand(
                    publication_accepted=manager_pb2.PublicationAccepted(table=ref(), manifest=ref())
                ),
                manager_pb2.TrainerCommand(heartbeat=manager_pb2.Heartbeat()),
            ]
        ),
        trainer,
        manager_pb2.TrainerCommand,
        20,
    ),
    Target(
        "relay commands",
        serialised(
            [
                manager_pb2.HolderCommand(
                    fill=manager_pb2.FillRelay(
                        fence=fence(1), identity=IDENTITY, record=ref(), tables=[ref()], deadline_seconds=9.0
                    )
                ),
                manager_pb2.HolderCommand(let_go=manager_pb2.LetGo(tables=[b"a table's digest"])),
                manager_pb2.HolderCommand(
                    seal=manager_pb2.Seal(fence=fence(3), version=1, atoms=ref(), keep=True, deadline_seconds=9.0)
                ),
                manager_pb2.HolderCommand(refused=manager_pb2.Refused(problem=weights_pb2.Problem(message="no"))),
            ]
        ),
        relay,
        manager_pb2.HolderCommand,
        20,
    ),
    Target("node messages", MESSAGES, leader, worker_pb2.NodeMessage, 20),
    Target("node commands", NODE_COMMANDS, follower, worker_pb2.NodeCommand, 20),
    Target("tables", [canonical(table())], tables, weights_pb2.SourceTable),
    Target("needs", [canonical(needs_seed())], worker_needs, weights_pb2.WorkerNeeds),
    Target(
        "atoms",
        [canonical(weights_pb2.Atoms(atoms=[weights_pb2.Atom(shard=0, start=[0, 0], stop=[2, 3])]))],
        atoms,
        weights_pb2.Atoms,
    ),
    Target("prepare orders", [prepare_order()], lambda: orders(worker_pb2.PrepareOrder), worker_pb2.PrepareOrder),
    Target("ready orders", [ready_order()], lambda: orders(worker_pb2.ReadyOrder), worker_pb2.ReadyOrder),
    Target("install orders", [install_order()], lambda: orders(worker_pb2.InstallOrder), worker_pb2.InstallOrder),
    Target("regions", region_seeds(), regions, weights_pb2.Region),
    Target("relays that ask", [relay_asker()], relay_askers),
    Target("answers of relays", [relay_owner()], relay_answers),
    Target("TCP locators", [tcp_region()], tcp_locators, weights_pb2.Region),
    Target("UCX locators", [ucx_region()], ucx_locators, weights_pb2.Region),
    Target("answers of UCX helpers", [ucx_helper()], ucx_helpers),
    Target("state page", [bytes(SLOT)], state_page, weight=0.02),
    Target("gate", [b"generate\nx-ckpt-engine-token: x", b"pause", b"ckpt_engine/install"], gate_requests),
    Target(
        "blob chunks",
        [blob_chunk()],
        uploads,
        manager_pb2.BlobChunk,
    ),
    Target("configs", [model_config()], configs, weight=0.2),
    Target("indexes", [b'{"weight_map":{"a":"a.safetensors"}}'], indexes, weight=0.2),
    Target("safetensors", [safetensors_file()], safetensors, weight=0.2),
    Target("texts", [b"127.0.0.1:50051", b"lease=20 quiesce=90", b"viewer " + DIGEST.hex().encode()], texts),
]
"""Everything that reads what another process sent, as functions of bytes.

Each may refuse what it is given with a CkptEngineError; anything else that comes out of one is a defect of ours. What
they remember from one input to the next (machines, stores) is made anew every so often.
"""


def refused(take: Callable[[bytes], None], data: bytes) -> bool:
    """Whether the target refused the input. What else it raises comes out."""
    try:
        take(data)
    except (CkptEngineError, DecodeError):
        return True
    return False


def inputs(target: Target, rng: random.Random) -> Iterator[bytes]:
    """Seeds, and damaged ones, without end; what was damaged may be damaged further."""
    pool = list(target.seeds)
    yield from target.seeds
    while True:
        data = mutated(rng.choice(pool), target.kind, rng)
        yield data
        if len(data) < 4096 and rng.random() < 0.1:
            if len(pool) < 64:
                pool.append(data)
            else:
                pool[rng.randrange(len(target.seeds), 64)] = data
