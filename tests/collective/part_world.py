"""Ranks and workers of a collective in one process, each on a thread of its own, told by hand what a manager tells."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch

from ckpt_engine.core.collective import CollectiveMember, arrange
from ckpt_engine.core.collective_buckets import wants_of
from ckpt_engine.core.collective_plan import collective_plan
from ckpt_engine.core.manifest import canonical
from ckpt_engine.engine.target import LoadTarget
from ckpt_engine.machines.events import PartTaken, RunPart
from ckpt_engine.trainer.part import RankPart
from ckpt_engine.transport.collective.door import MeetingDoor
from ckpt_engine.transport.collective.seat import Held
from ckpt_engine.v1 import manager_pb2, weights_pb2, worker_pb2
from tests.install.install_world import Checkpoint, OneWorker

LIMIT = 60.0
BUCKET = 16 << 10


class PartWorld:
    """The sources of a checkpoint are ranks; each target is the only worker of a replica."""

    def __init__(self, checkpoint: Checkpoint, targets: Sequence[LoadTarget], directory: Path) -> None:
        self.checkpoint = checkpoint
        self.workers = []
        for number, target in enumerate(targets):
            path = directory / str(number)
            path.mkdir()
            self.workers.append(OneWorker(target, path))
        sources = sorted({source for _, _, source, _ in checkpoint.shards})
        self.names = [*(f"rank {source}" for source in sources), *(f"{n}, worker 0" for n in "abcd"[: len(targets)])]
        self.sources = sources
        self.ranks = [RankPart() for _ in sources]
        self.door = MeetingDoor()
        self.key = os.urandom(32)
        self.epoch = 0
        self.arm = LIMIT
        self.taken: dict[int, PartTaken] = {}
        self.ready: dict[int, worker_pb2.WorkerReady] = {}
        self.installed: dict[int, worker_pb2.WorkerInstalled] = {}

    def renew(self, weights: dict[str, torch.Tensor]) -> None:
        """The next version of the weights lies in the sources, and the next epoch begins."""
        self.checkpoint.weights = weights
        self.checkpoint.seal()
        self.epoch += 1
        for worker in self.workers:
            worker.epoch = self.epoch

    def prepare(self) -> None:
        """Every worker is told the manifest; the plan of the collective is made of what they need."""
        self.epoch += 1
        members = arrange([CollectiveMember(name, "h", name.startswith("rank")) for name in self.names])
        sources = {f"rank {source}": number for number, source in enumerate(self.sources)}
        wants, self.plans = [], []
        for number, worker in enumerate(self.workers):
            worker.epoch = self.epoch - 1
            prepared = worker.prepare(self.checkpoint)
            assert not prepared.HasField("problem"), prepared.problem.message
            plan = self.checkpoint.plan(worker.recording(self.checkpoint))
            for source in plan.sources:
                source.transport = "nccl"
            self.plans.append(plan)
            needs = weights_pb2.WorkerNeeds.FromString(prepared.needs)
            wants += wants_of(plan, needs, len(sources) + number, sources, "nccl")
        self.plan = collective_plan(members, wants, [spec.dtype for spec in self.checkpoint.manifest.tensors], BUCKET)

    def order(self, member: int, communicator: bytes) -> worker_pb2.CollectiveOrder:
        meeting = weights_pb2.CollectiveMeeting(host=self.door.host, port=self.door.port, key=self.key)
        return worker_pb2.CollectiveOrder(
            members=self.names,
            member=member,
            plan=self.plan,
            meeting=canonical(meeting),
            communicator=communicator,
            arm_seconds=self.arm,
        )

    def rank(self, number: int, communicator: bytes = b"first", held: Callable[[], Held] | None = None) -> None:
        """A rank's part of this epoch, as it is told and takes it."""
        told = self.order(number, communicator)
        collective = manager_pb2.Collective(
            members=told.members, meeting=told.meeting, communicator=communicator, arm_seconds=told.arm_seconds
        )
        task = RunPart(self.epoch, self.epoch, collective, number, LIMIT)
        rank = self.ranks[number]
        meeting = rank.begin(task)
        held = held or partial(self.held, number)
        self.taken[number] = rank.take(task, self.plan, held, meeting, time.monotonic() + LIMIT)

    def held(self, number: int) -> Held:
        shards = enumerate(self.checkpoint.shards)
        return [
            (index, box, self.checkpoint.shard(shard))
            for shard, (index, box, source, _) in shards
            if source == self.sources[number]
        ]

    def get_ready(self, number: int, communicator: bytes = b"first", asleep: bool = False) -> worker_pb2.WorkerReady:
        worker = self.workers[number]
        self.ready[number] = worker.installer.ready(
            worker_pb2.ReadyOrder(
                fence=worker.fence(),
                plan=canonical(self.plans[number]),
                deadline_seconds=LIMIT,
                asleep=asleep,
                collective=self.order(len(self.sources) + number, communicator),
            )
        )
        return self.ready[number]

    def install(self, number: int, communicator: bytes = b"first") -> worker_pb2.WorkerInstalled:
        worker = self.workers[number]
        order = worker.order(self.checkpoint)
        order.plan = canonical(self.plans[number])
        order.collective.CopyFrom(self.order(len(self.sources) + number, communicator))
        self.installed[number] = worker.installer.install(order)
        return self.installed[number]

    def worker(self, number: int, communicator: bytes = b"first") -> None:
        """A worker's part of this epoch, if it gets ready."""
        if not self.get_ready(number, communicator).HasField("problem"):
            self.install(number, communicator)

    def update(self, communicator: bytes = b"first", but: Sequence[str] = ()) -> None:
        """All members take their parts at once, but these."""
        parts = [partial(self.rank, number, communicator) for number in range(len(self.sources))]
        parts += [partial(self.worker, number, communicator) for number in range(len(self.workers))]
        at_once([part for name, part in zip(self.names, parts, strict=True) if name not in but])

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()
        for worker in self.workers:
            worker.installer.close()
        self.door.close()
        self.checkpoint.close()


def at_once(parts: Sequence[Callable[[], None]]) -> None:
    failed: list[BaseException] = []

    def run(part: Callable[[], None]) -> None:
        try:
            part()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(part,)) for part in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * LIMIT)
        assert not thread.is_alive()
    if failed:
        raise failed[0]


@contextmanager
def part_world(checkpoint: Checkpoint, targets: Sequence[LoadTarget], directory: Path) -> Iterator[PartWorld]:
    made = PartWorld(checkpoint, targets, directory)
    try:
        made.prepare()
        yield made
    finally:
        made.close()


def content(target: LoadTarget) -> dict[str, torch.Tensor]:
    """Copies of all that a model holds."""
    return {name: tensor.detach().clone() for name, tensor in target.named_tensors()}
