"""A trainer's checkpoint in shared memory, its sealed record, and tensor-parallel workers that install from a relay."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import nn

from ckpt_engine.core.manifest import canonical
from ckpt_engine.core.plan import PlanRequest, compile_plans
from ckpt_engine.core.publication import join_sources, merge_tables
from ckpt_engine.core.sealed import check_replicas
from ckpt_engine.core.sealed_record import ProvenRecord, finer_atoms, read_record, seal_from_record
from ckpt_engine.engine.target import ModuleTarget
from ckpt_engine.host.facts import this_host
from ckpt_engine.install.installer import Installer
from ckpt_engine.relay.slots import FillWish, Want
from ckpt_engine.transport.relay_memory.reader import RelayMemoryTransport
from ckpt_engine.v1.weights_pb2 import Identity, SourceTable, WorkerNeeds
from ckpt_engine.v1.worker_pb2 import InstallOrder, ReadyOrder, WorkerInstalled
from tests.install.install_models import TensorParallel
from tests.install.install_world import Checkpoint, OneWorker
from tests.install.published import sealed, tables
from tests.sealing import expected_digests, record_of

RELAYS = ["relay_memory"]


class Replica:
    """Tensor-parallel workers of one engine, prepared for a checkpoint. All of them read relays only."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        directory: Path,
        size: int = 2,
        models: Sequence[nn.Module] = (),
        scrub_seconds: float = 0.0,
        **shape: int,
    ) -> None:
        """models: one a worker; none: layers of a decoder, cut for so many."""
        self.models = [*models] or [TensorParallel(rank, size, **shape) for rank in range(size)]
        self.workers: list[OneWorker] = []
        self.needs: list[WorkerNeeds] = []
        for rank, model in enumerate(self.models):
            (directory / str(rank)).mkdir(parents=True)
            worker = OneWorker(ModuleTarget(model), directory / str(rank), scrub_seconds=scrub_seconds)
            transports = {"relay_memory": RelayMemoryTransport()}
            worker.installer = Installer(worker.target, worker.slot, transports, scrub=worker.scrub)
            prepared = worker.prepare(checkpoint)
            assert not prepared.HasField("problem"), prepared.problem.message
            self.workers.append(worker)
            self.needs.append(WorkerNeeds.FromString(prepared.needs))

    def requests(self, transports: Sequence[str]) -> list[PlanRequest]:
        host = this_host()
        return [PlanRequest(rank, needs, host, transports) for rank, needs in enumerate(self.needs)]

    def install(
        self, table: SourceTable, recorded: ProvenRecord, version: int, ahead: bool = False
    ) -> list[WorkerInstalled]:
        """What a manager and an agent would order, from a table of a relay and the sealed record alone. ahead: plans
        are made ready first."""
        joined = join_sources(recorded.record.manifest, [table])
        plans = compile_plans(joined, joined.table_digests, self.requests(RELAYS), along=recorded.boxes)
        assert not finer_atoms(plans, recorded), "the record was cut along these needs"
        found = seal_from_record(plans, recorded, {})
        answers = []
        for rank, worker in enumerate(self.workers):
            worker.epoch += 1
            plan, expected = canonical(plans.workers[rank]), canonical(expected_digests(plans, rank, found))
            order = InstallOrder(
                fence=worker.fence(),
                identity=Identity(lineage="run", version=version, root=recorded.root),
                plan=plan,
                expected=expected,
                deadline_seconds=60,
            )
            if ahead:
                worker.installer.ready(
                    ReadyOrder(fence=worker.fence(), plan=plan, expected=expected, deadline_seconds=60)
                )
            answers.append(worker.installer.install(order))
        return answers


def seal(checkpoint: Checkpoint, replicas: Sequence[Replica]) -> ProvenRecord:
    """The trainer seals its weights; the record that a manager would keep."""
    checkpoint.seal()
    publication = merge_tables(tables(checkpoint))
    asked = [
        PlanRequest((number, each.key), each.needs, each.host, each.transports)
        for number, replica in enumerate(replicas)
        for each in replica.requests(["shared_memory"])
    ]
    plans = compile_plans(publication, publication.table_digests, asked)
    found = check_replicas(plans, sealed(plans, checkpoint.weights))
    return read_record(record_of(found), found.root())


def wish(
    recorded: ProvenRecord,
    version: int,
    sources: Sequence[SourceTable],
    replicas: Sequence[Replica] = (),
    everything: bool = False,
) -> FillWish:
    """The version that a manager would order from a relay."""
    identity = Identity(lineage="run", version=version, root=recorded.root)
    needs = [needs for replica in replicas for needs in replica.needs]
    return FillWish(identity, recorded.record, sources, Want(needs, everything))
