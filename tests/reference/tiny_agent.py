"""The least agent that can bring weights to an engine: the real channel, driver and source, and no manager.

There is one source that holds every tensor whole, so a plan is short: each need is one piece of one shard.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Any

from ckpt_engine.agent.channel import AgentChannel
from ckpt_engine.core.dtypes import itemsize
from ckpt_engine.core.manifest import blob_digest, canonical, manifest_of
from ckpt_engine.core.offers import by_transport
from ckpt_engine.gate.page import CLEAN, EnginePage
from ckpt_engine.host.facts import this_host
from ckpt_engine.source.memory import MemorySource
from ckpt_engine.source.named import named_source
from ckpt_engine.v1 import manager_pb2, weights_pb2, worker_pb2
from ckpt_engine_adapters.reference.driver import ReferenceAdapter
from tests.reference.engine_process import CALL_SECONDS, EngineProcess
from tests.sealing import root
from tests.tiny_model import named_weights


class RefusedError(Exception):
    """A worker cannot do it; the problem is its own."""

    def __init__(self, problem: weights_pb2.Problem) -> None:
        super().__init__(problem.message)
        self.problem = problem


class TinyAgent:
    """Context manager; listens on the engine's channel. `root` and `reports` are of the last install."""

    lineage = "run"

    def __init__(self, engine: EngineProcess, adapter: ReferenceAdapter) -> None:
        self.adapter = adapter
        self.root = bytes(32)
        self.reports: dict[int, manager_pb2.WorkerReport] = {}
        self._all_reported = asyncio.Event()
        self.needs: dict[int, weights_pb2.WorkerNeeds] = {}
        self._engine = engine
        self._channel = AgentChannel(engine.directory, self._answer)
        self._prepare: worker_pb2.PrepareOrder | None = None
        self._prepared: dict[int, worker_pb2.WorkerPrepared] = {}
        self._orders: dict[int, worker_pb2.InstallOrder] = {}
        self._sources: list[MemorySource] = []
        self._late_seconds = 0.0

    async def __aenter__(self) -> TinyAgent:
        await self._channel.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._channel.close()
        for source in self._sources:
            source.close()

    async def install(
        self, model: Any, version: int, *, without: str = "", torn: bool = False, late_seconds: float = 0.0
    ) -> None:
        """Brings the model's weights into the paused engine. Their source stays open as long as the agent.

        without: leaves this tensor out. torn: expects another digest than the source's. late_seconds: gives workers
        their orders so late that the engine's call has long ended.
        Raises RefusedError if a worker refuses the manifest or reports a failed install, and what the driver raises.
        """
        weights = {name: tensor for name, tensor in named_weights(model) if name != without}
        source = named_source(weights, host=this_host())
        self._sources.append(source)
        source.seal()
        self._late_seconds = late_seconds
        await self._install(source, version, torn, late_seconds / 4 if late_seconds else CALL_SECONDS)

    async def _install(self, source: MemorySource, version: int, torn: bool, seconds: float) -> None:
        self._engine.epoch += 1
        fence = weights_pb2.Fence(cluster="test", epoch=self._engine.epoch)
        table: weights_pb2.SourceTable = source.table()
        manifest = manifest_of(table.tensors)
        self._prepare = worker_pb2.PrepareOrder(
            fence=fence, manifest=canonical(manifest), deadline_seconds=CALL_SECONDS
        )
        self._prepared.clear()
        await self.adapter.prepare(CALL_SECONDS)
        for _, prepared in sorted(self._prepared.items()):
            if prepared.HasField("problem"):
                raise RefusedError(prepared.problem)

        whole = [
            weights_pb2.Atom(shard=index, start=shard.start, stop=shard.stop)
            for index, shard in enumerate(table.shards)
        ]
        self.root = root(manifest, source.digest(weights_pb2.Atoms(atoms=whole)))
        identity = weights_pb2.Identity(lineage=self.lineage, version=version, root=self.root)
        for rank, prepared in self._prepared.items():
            self.needs[rank] = weights_pb2.WorkerNeeds.FromString(prepared.needs)
            atoms = [
                weights_pb2.Atom(shard=_shard_of(table, need.tensor), start=need.start, stop=need.stop)
                for need in self.needs[rank].needs
            ]
            expected = source.digest(weights_pb2.Atoms(atoms=atoms))
            if torn:
                expected[0] ^= 1
            self._orders[rank] = worker_pb2.InstallOrder(
                fence=fence,
                identity=identity,
                plan=canonical(_plan(table, prepared, self.needs[rank])),
                expected=canonical(weights_pb2.Digests(values=expected)),
                deadline_seconds=CALL_SECONDS,
            )
        self.reports.clear()
        self._all_reported.clear()
        await self.adapter.install(fence.epoch, seconds)
        # Workers send their reports before the engine answers, another way.
        await asyncio.wait_for(self._all_reported.wait(), CALL_SECONDS)
        for _, report in sorted(self.reports.items()):
            if report.HasField("problem"):
                raise RefusedError(report.problem)
        page = EnginePage(self._engine.directory.page)
        assert [(word.state, word.identity) for word in page.read()] == [(CLEAN, identity)] * len(self._orders)
        page.close()
        await self.adapter.stamp(identity, CALL_SECONDS)

    async def _answer(self, request: worker_pb2.WorkerRequest) -> worker_pb2.AgentReply:
        match request.WhichOneof("body"):
            case "want_prepare":
                return worker_pb2.AgentReply(prepare=self._prepare)
            case "want_install":
                await asyncio.sleep(self._late_seconds)
                return worker_pb2.AgentReply(install=self._orders[request.rank])
            case "prepared":
                self._prepared[request.rank] = request.prepared
            case "installed":
                self.reports[request.rank] = request.installed.report
                if self.reports.keys() == self._orders.keys():
                    self._all_reported.set()
        return worker_pb2.AgentReply(acknowledged=worker_pb2.Acknowledged())


def _shard_of(table: weights_pb2.SourceTable, tensor: int) -> int:
    return next(index for index, shard in enumerate(table.shards) if shard.tensor == tensor)


def _plan(
    table: weights_pb2.SourceTable, prepared: worker_pb2.WorkerPrepared, needs: weights_pb2.WorkerNeeds
) -> weights_pb2.WorkerPlan:
    plan = weights_pb2.WorkerPlan(manifest_digest=needs.manifest_digest, needs_digest=blob_digest(prepared.needs))
    regions = [by_transport(region)["shared_memory"] for region in table.regions]
    plan.sources.add(source=table.id, host=table.host, transport="shared_memory", reason="one host", regions=regions)
    for number, need in enumerate(needs.needs):
        shard = table.shards[_shard_of(table, need.tensor)]
        width = itemsize(table.tensors[need.tensor].dtype)
        first = sum(start * stride for start, stride in zip(need.start, shard.stride, strict=True))
        piece = plan.pieces.add(need=number, region=shard.region, start=need.start, stop=need.stop, stride=shard.stride)
        piece.offset = shard.offset + first * width
        elements = 1
        for start, stop in zip(need.start, need.stop, strict=True):
            elements *= stop - start
        plan.bytes += elements * width
    return plan
