"""What the tests of this area share: a checkpoint in shared memory, a plan made by hand, and one worker's installer.

The plan is compiled here in the plainest way (every need against every shard), apart from `core.plan`, so that the two
check each other.
"""

from __future__ import annotations

import queue
import random
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ckpt_engine.core.boxes import Box, contains, intersect, whole
from ckpt_engine.core.manifest import blob_digest, canonical
from ckpt_engine.digest.boxes import digest_boxes
from ckpt_engine.engine.target import LoadTarget
from ckpt_engine.gate.page import EnginePage
from ckpt_engine.install.installer import Installer
from ckpt_engine.install.scrub import Scrub
from ckpt_engine.install.stage_memory import StageMemory
from ckpt_engine.record.record import record
from ckpt_engine.record.recording import Recording
from ckpt_engine.torch_dtypes import dtype_name
from ckpt_engine.transport.shared_memory.memory import SharedArena, SharedMemoryTransport
from ckpt_engine.v1 import manager_pb2, weights_pb2, worker_pb2


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float32).to(dtype)


def manifest_of(weights: dict[str, Tensor]) -> weights_pb2.Manifest:
    manifest = weights_pb2.Manifest()
    for name in sorted(weights):
        manifest.tensors.add(name=name, dtype=dtype_name(weights[name].dtype), shape=weights[name].shape)
    return manifest


def randomly_cut(box: Box, rng: random.Random) -> list[Box]:
    """Tiles a tensor as sharded trainers do, at random places."""
    for axis in range(box.rank):
        size = box.stop[axis] - box.start[axis]
        if size > 1 and rng.random() < 0.5:
            at = box.start[axis] + rng.randrange(1, size)
            low = Box(box.start, (*box.stop[:axis], at, *box.stop[axis + 1 :]))
            high = Box((*box.start[:axis], at, *box.start[axis + 1 :]), box.stop)
            return [low, *randomly_cut(high, rng)]
    return [box]


class Checkpoint:
    """Weights in two sources' shared memory, cut at random places; `seed` None: one piece each, one source.

    widened: what is served as bfloat16 lies there as float32, with values that round to the served ones.
    """

    def __init__(self, weights: dict[str, Tensor], seed: int | None = None, widened: bool = False) -> None:
        self.weights = weights
        self.widened = widened
        self.manifest = manifest_of(weights)
        self.manifest_bytes = canonical(self.manifest)
        rng = random.Random(seed)
        self.shards: list[tuple[int, Box, int, int]] = []  # tensor, box, source, offset
        ends = [0, 0]
        for index, spec in enumerate(self.manifest.tensors):
            box = whole(spec.shape)
            for shard in [box] if seed is None else randomly_cut(box, rng):
                source = 0 if seed is None else rng.randrange(2)
                self.shards.append((index, shard, source, ends[source]))
                ends[source] += -(-shard.volume * self.stored(index).itemsize // 64) * 64
        self.arenas = [SharedArena(max(end, 64)) for end in ends]
        self.seal()

    def shard(self, number: int) -> Tensor:
        """A shard as it lies in its source."""
        index, box, source, offset = self.shards[number]
        return self.arenas[source].tensor(offset, box.shape, self.stored(index))

    def stored(self, index: int) -> torch.dtype:
        """The dtype of a tensor of the manifest in its sources' memory."""
        dtype = self.weights[self.manifest.tensors[index].name].dtype
        return torch.float32 if self.widened and dtype == torch.bfloat16 else dtype

    def seal(self) -> None:
        """Writes `weights` to the sources."""
        for number, (index, box, _, _) in enumerate(self.shards):
            shard = self.shard(number).copy_(self.weights[self.manifest.tensors[index].name][slices(box)])
            if self.widened and shard.dtype == torch.float32:
                shard.mul_(1 + 2**-12)  # an eighth of what bfloat16 can tell apart

    def flip(self, name: str, element: tuple[int, ...]) -> None:
        """Changes one bit of one element in the source's memory."""
        for number, (index, box, _, _) in enumerate(self.shards):
            if self.manifest.tensors[index].name == name and contains(
                box, Box(element, tuple(each + 1 for each in element))
            ):
                inside = tuple(here - first for here, first in zip(element, box.start, strict=True))
                self.shard(number)[inside].view(1).view(torch.uint8)[0] ^= 1
                return
        raise AssertionError(f"{name} has no element {element}")

    def plan(self, recording: Recording) -> weights_pb2.WorkerPlan:
        plan = weights_pb2.WorkerPlan(manifest_digest=recording.manifest_digest, needs_digest=recording.needs_digest)
        for rank, arena in enumerate(self.arenas):
            plan.sources.add(
                source=f"rank {rank}",
                rank=rank,
                transport="shared_memory",
                reason="same host",
                regions=[arena.region(7)],
            )
        for number, need in enumerate(recording.needs):
            itemsize = self.weights[recording.name(number)].element_size()
            for index, box, source, offset in self.shards:
                common = intersect(need.box, box) if index == need.tensor else None
                if common is not None:
                    stride = torch.empty(box.shape, device="meta").stride()
                    first = sum(
                        (here - start) * step for here, start, step in zip(common.start, box.start, stride, strict=True)
                    )
                    plan.pieces.add(
                        need=number,
                        source=source,
                        region=7,
                        offset=offset + first * itemsize,
                        start=common.start,
                        stop=common.stop,
                        stride=stride,
                    )
                    plan.bytes += common.volume * itemsize
        return plan

    def expected(self, recording: Recording) -> bytes:
        views = [
            (self.weights[recording.name(number)][slices(need.box)], need.box.start)
            for number, need in enumerate(recording.needs)
        ]
        return canonical(weights_pb2.Digests(values=digest_boxes(views)))

    def poison_what_no_piece_reads(self, plan: weights_pb2.WorkerPlan, recording: Recording) -> int:
        """Overwrites every byte of the sources that the plan does not name; returns how many it does name."""
        read = [torch.zeros(arena.size, dtype=torch.bool) for arena in self.arenas]
        for piece in plan.pieces:
            dtype = self.weights[recording.name(piece.need)].dtype
            shape = [stop - start for start, stop in zip(piece.start, piece.stop, strict=True)]
            index = torch.arange(self.arenas[piece.source].size // dtype.itemsize)
            shown = index.as_strided(shape, list(piece.stride), piece.offset // dtype.itemsize).reshape(-1)
            for byte in range(dtype.itemsize):
                read[piece.source][shown * dtype.itemsize + byte] = True
        for arena, mask in zip(self.arenas, read, strict=True):
            arena.tensor(0, (arena.size,), torch.uint8)[~mask] = 0xA5
        return int(sum(mask.sum() for mask in read))

    def close(self) -> None:
        for arena in self.arenas:
            arena.close()


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(map(slice, box.start, box.stop))


class OneWorker:
    """An installer with its state page, and the orders that a manager and an agent would give it."""

    def __init__(
        self,
        target: LoadTarget,
        directory: Path,
        stage_memory: str = "0",
        device: str = "cpu",
        scrub_seconds: float = 0.0,
    ) -> None:
        """stage_memory: on `device`."""
        self.page = EnginePage(directory / "page")
        self.slot = self.page.claim(0, 1)
        self.stage = StageMemory(stage_memory, torch.device(device))
        self.news: queue.SimpleQueue[worker_pb2.WorkerEarly] = queue.SimpleQueue()
        self.waits = True  # for what the installer brings early
        self.asleep = False  # as its agent's mark would say
        self.scrubbed: list[manager_pb2.WorkerScrub] = []  # as told, the newest last
        self.scrub = Scrub(self.slot, scrub_seconds, self._hear, lambda: self.asleep)
        self.installer = Installer(
            target, self.slot, {"shared_memory": SharedMemoryTransport()}, self.stage, self._told, self.scrub
        )
        self.epoch = 0
        self.target = target

    def _told(self, news: worker_pb2.WorkerEarly) -> bool:
        self.news.put(worker_pb2.WorkerEarly.FromString(news.SerializeToString()))
        return self.waits

    def _hear(self, news: manager_pb2.WorkerScrub) -> None:
        self.scrubbed.append(manager_pb2.WorkerScrub.FromString(news.SerializeToString()))

    def ready(self, order: worker_pb2.InstallOrder, **options: Any) -> worker_pb2.WorkerReady:
        """Makes the plan of an install ready."""
        return self.installer.ready(
            worker_pb2.ReadyOrder(
                fence=order.fence, plan=order.plan, expected=order.expected, deadline_seconds=60.0, **options
            )
        )

    def brought(self, order: worker_pb2.InstallOrder) -> worker_pb2.WorkerEarly:
        """Makes it ready and waits for the end of what that brings early."""
        answer = self.ready(order)
        assert not answer.HasField("problem"), answer.problem.message
        assert answer.early_bytes, "nothing is brought early"
        while True:
            news = self.news.get(timeout=60)
            if news.verified or news.HasField("problem"):
                return news

    def fence(self) -> weights_pb2.Fence:
        return weights_pb2.Fence(cluster="test", epoch=self.epoch)

    def prepare(self, checkpoint: Checkpoint, seconds: float = 60.0) -> worker_pb2.WorkerPrepared:
        self.epoch += 1
        order = worker_pb2.PrepareOrder(
            fence=self.fence(), manifest=checkpoint.manifest_bytes, deadline_seconds=seconds
        )
        return self.installer.prepare(order)

    def recording(self, checkpoint: Checkpoint) -> Recording:
        """The one that a plan is made for. Equal to the installer's, which only leaves the worker as bytes."""
        return record(checkpoint.manifest, self.target, digest=blob_digest(checkpoint.manifest_bytes))

    def order(self, checkpoint: Checkpoint, seconds: float = 60.0) -> worker_pb2.InstallOrder:
        recording = self.recording(checkpoint)
        return worker_pb2.InstallOrder(
            fence=self.fence(),
            identity=weights_pb2.Identity(lineage="run", version=self.epoch, root=self.epoch.to_bytes(32, "big")),
            plan=canonical(checkpoint.plan(recording)),
            expected=checkpoint.expected(recording),
            deadline_seconds=seconds,
        )

    def update(self, checkpoint: Checkpoint) -> worker_pb2.WorkerInstalled:
        """Prepare and install; asserts that preparing worked."""
        prepared = self.prepare(checkpoint)
        assert not prepared.HasField("problem"), prepared.problem.message
        return self.installer.install(self.order(checkpoint))
