"""The heavy work on blobs: merging tables, compiling plans, adding digests up; with what came out kept by digests.

Runs on one thread of its own, never two calls at once. It decides no transport: that is ``core.topology``.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

from google.protobuf.message import DecodeError, Message

from ckpt_engine.core.complete import check_complete
from ckpt_engine.core.machines.events import (
    Combined,
    CombineSeals,
    Compiled,
    CompilePlans,
    MergeTables,
    PlanWorker,
    Published,
    SourceOffer,
    WorkerKey,
)
from ckpt_engine.core.manifest import Publication, canonical, merge_tables
from ckpt_engine.core.plan import PlanRequest, Plans, compile_plans
from ckpt_engine.core.problems import internal, invalid
from ckpt_engine.core.sealed import check_replicas, expected_digests
from ckpt_engine.manager.blobs import BlobStore, describe
from ckpt_engine.v1 import manager_pb2, weights_pb2

KEPT_PUBLICATIONS = 2
KEPT_PLANS = 4
"""More than one of each: runs alternate on one manager, and so do a late replica alone and all replicas together."""

Key = TypeVar("Key")
Value = TypeVar("Value")
Parsed = TypeVar("Parsed", bound=Message)


class _Recent(Generic[Key, Value]):
    """The last few values by key, the least recently used going first."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._values: OrderedDict[Key, Value] = OrderedDict()

    def get(self, key: Key) -> Value | None:
        if key not in self._values:
            return None
        self._values.move_to_end(key)
        return self._values[key]

    def put(self, key: Key, value: Value) -> None:
        self._values[key] = value
        self._values.move_to_end(key)
        if len(self._values) > self._limit:
            self._values.popitem(last=False)


class Compiler:
    """The tasks MergeTables, CompilePlans and CombineSeals over one content store.

    Every method raises CkptEngineError with the Problem that the task ends with.
    """

    def __init__(self, blobs: BlobStore) -> None:
        self._blobs = blobs
        self._publications: _Recent[tuple[bytes, ...], Published] = _Recent(KEPT_PUBLICATIONS)
        self._plans: _Recent[tuple[object, ...], Compiled] = _Recent(KEPT_PLANS)

    def merge(self, task: MergeTables) -> Published:
        """Merges the tables of all ranks. NOT_FOUND when a table's blob is not held any more."""
        digests = tuple(ref.digest for ref in task.tables)
        published = self._publications.get(digests)
        if published is not None:
            self._blobs.put(_publication(published).manifest_bytes)
            return published
        tables = []
        for rank, ref in enumerate(task.tables):
            table = self._parsed(ref, weights_pb2.SourceTable(), f"the table of rank {rank}")
            if table.rank != rank:
                raise invalid(f"rank {rank} of lineage {task.lineage!r} published the table of rank {table.rank}")
            tables.append(table)
        publication = merge_tables(tables, digests)
        published = Published(
            manifest=self._blobs.put(publication.manifest_bytes),
            sources=tuple(
                SourceOffer(table.rank, ref, table.stays_sealed, table.source_copies, _outlives(table))
                for table, ref in zip(tables, task.tables, strict=True)
            ),
            tensors=len(publication.manifest.tensors),
            bytes=publication.bytes,
            handle=publication,
        )
        self._publications.put(digests, published)
        return published

    def compile(self, task: CompilePlans) -> Compiled:
        """Plans for these workers, from what is kept if nothing changed and its blobs are still there."""
        publication = _publication(task.published)
        key = (publication.table_digests, tuple(map(_identity, task.workers)))
        compiled = self._plans.get(key)
        if compiled is not None and all(map(self._blobs.has, (*compiled.plans.values(), *compiled.atoms.values()))):
            return compiled
        needs: dict[bytes, weights_pb2.WorkerNeeds] = {}
        requests = []
        for worker in task.workers:
            name = f"the needs of replica {worker.key[0]!r}, worker {worker.key[1]}"
            if worker.needs.digest not in needs:
                needs[worker.needs.digest] = self._parsed(worker.needs, weights_pb2.WorkerNeeds(), name)
            requests.append(PlanRequest(worker.key, needs[worker.needs.digest], worker.host, worker.transports))
        replicas: dict[str, list[weights_pb2.WorkerNeeds]] = {}
        for worker in task.workers:
            replicas.setdefault(worker.key[0], []).append(needs[worker.needs.digest])
        for replica, workers in replicas.items():
            check_complete(publication.manifest, workers, replica)
        plans = compile_plans(publication, publication.table_digests, requests)
        stored: dict[int, manager_pb2.BlobRef] = {}
        refs: dict[WorkerKey, manager_pb2.BlobRef] = {}
        for worker in task.workers:  # workers that need the same share one plan, so it is made into bytes once
            plan = plans.workers[worker.key]
            if id(plan) not in stored:
                stored[id(plan)] = self._blobs.put(canonical(plan))
            refs[worker.key] = stored[id(plan)]
        compiled = Compiled(
            plans=refs,
            atoms={
                publication.tables[source].rank: self._blobs.put(canonical(atoms))
                for source, atoms in plans.atoms.items()
            },
            bytes={worker.key: plans.workers[worker.key].bytes for worker in task.workers},
            handle=plans,
        )
        self._plans.put(key, compiled)
        return compiled

    def combine(self, task: CombineSeals) -> Combined:
        """What the sealed digests add up to, and what each worker must therefore find."""
        plans = task.compiled.handle
        if not isinstance(plans, Plans):
            raise internal("these plans were not compiled by this manager")
        sources = {table.rank: source for source, table in enumerate(plans.publication.tables)}
        digests = {
            sources[rank]: self._parsed(ref, weights_pb2.Digests(), f"the digests of rank {rank}")
            for rank, ref in task.digests.items()
        }
        sealed = check_replicas(plans, digests)
        stored: dict[int, manager_pb2.BlobRef] = {}
        expected: dict[WorkerKey, manager_pb2.BlobRef] = {}
        for key in task.compiled.plans:
            needs = plans.maps[key]
            if id(needs) not in stored:
                stored[id(needs)] = self._blobs.put(canonical(expected_digests(plans, key, sealed)))
            expected[key] = stored[id(needs)]
        return Combined(sealed.root(), expected)

    def _parsed(self, ref: manager_pb2.BlobRef, empty: Parsed, name: str) -> Parsed:
        """A blob as the message that it should hold. Raises INVALID_ARGUMENT saying which blob is none."""
        try:
            empty.ParseFromString(self._blobs.get(ref))
        except DecodeError as error:
            raise invalid(f"{name} (blob {describe(ref.digest)}) is no {empty.DESCRIPTOR.name}") from error
        return empty


def _outlives(table: weights_pb2.SourceTable) -> bool:
    return table.stays_sealed and all(region.transport == "file" for region in table.regions)


def _publication(published: Published) -> Publication:
    if not isinstance(published.handle, Publication):
        raise internal("this publication was not merged by this manager")
    return published.handle


def _identity(worker: PlanWorker) -> tuple[WorkerKey, bytes, bytes, tuple[str, ...]]:
    return worker.key, worker.needs.digest, canonical(worker.host), worker.transports
