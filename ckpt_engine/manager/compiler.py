"""The heavy work on blobs: merging tables, compiling plans, adding digests up. Results are cached by digests.

Runs on one thread of its own, never two calls at once. It chooses no transport: ``core.topology`` does.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Generic, TypeVar, cast

from google.protobuf.message import DecodeError, Message

from ckpt_engine.core.boxes import Box
from ckpt_engine.core.complete import check_complete, check_unfilled
from ckpt_engine.core.dtypes import itemsize
from ckpt_engine.core.manifest import canonical
from ckpt_engine.core.offers import by_transport, label
from ckpt_engine.core.plan import Choose, PlanRequest, Plans, compile_plans
from ckpt_engine.core.problems import CkptEngineError, internal, invalid
from ckpt_engine.core.publication import Publication, join_sources, merge_tables
from ckpt_engine.core.sealed import check_replicas, expected_blob
from ckpt_engine.core.sealed_record import ProvenRecord, RecordWriter, finer_atoms, read_record, seal_from_record
from ckpt_engine.core.topology import choose_transport
from ckpt_engine.core.transports import transport_kinds
from ckpt_engine.core.version import Version
from ckpt_engine.machines.events import (
    Combined,
    CombineSeals,
    Compiled,
    CompilePlans,
    HeldOffer,
    Joined,
    JoinSources,
    MergeTables,
    PlanWorker,
    Published,
    SourceOffer,
    StoredSeal,
    WorkerKey,
)
from ckpt_engine.manager.blobs import BlobStore, describe
from ckpt_engine.manager.collective import plan_together
from ckpt_engine.manager.ledger import SealEntry
from ckpt_engine.v1 import manager_pb2, weights_pb2

KEPT_PUBLICATIONS = 8
KEPT_PLANS = 8
KEPT_RECORDS = 2
"""More than one of each, since runs alternate on one manager, and so do a late replica alone and all replicas together.
Each relay has a publication and plans for each of its slots."""

log = logging.getLogger("ckpt_engine.manager")

Key = TypeVar("Key")
Value = TypeVar("Value")
Parsed = TypeVar("Parsed", bound=Message)


class _Recent(Generic[Key, Value]):
    """The last few values by key; the least recently used is dropped first."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._values: OrderedDict[Key, Value] = OrderedDict()

    def get(self, key: Key) -> Value | None:
        if key not in self._values:
            return None
        self._values.move_to_end(key)
        return self._values[key]

    def values(self) -> Sequence[Value]:
        return tuple(self._values.values())

    def put(self, key: Key, value: Value) -> None:
        self._values[key] = value
        self._values.move_to_end(key)
        if len(self._values) > self._limit:
            self._values.popitem(last=False)


@dataclass(frozen=True, eq=False)
class _PlanHandle:
    """The result of compiling plans."""

    plans: Plans
    recorded: ProvenRecord | None  # the record that cells were cut along, for a late replica; None: a record is made
    relays: frozenset[str]  # those of the task

    @cached_property
    def writer(self) -> RecordWriter:
        """The writer of this cutting's records; made at the first seal."""
        return RecordWriter(self.plans.cells)


class Compiler:
    """The tasks MergeTables, JoinSources, CompilePlans and CombineSeals over one content store.

    Every method raises CkptEngineError with the Problem that the task ends with.
    """

    def __init__(self, blobs: BlobStore) -> None:
        self._blobs = blobs
        self._publications: _Recent[tuple[str | bytes, ...], Published] = _Recent(KEPT_PUBLICATIONS)
        self._plans: _Recent[tuple[object, ...], Compiled] = _Recent(KEPT_PLANS)
        self._records: _Recent[tuple[bytes, bytes], ProvenRecord] = _Recent(KEPT_RECORDS)

    def merge(self, task: MergeTables) -> Published:
        """Merges the tables of all ranks. Raises NOT_FOUND if a table's blob is not stored any more."""
        digests = tuple(ref.digest for ref in task.tables)
        published = self._publications.get(digests)
        if published is not None:
            self._blobs.put(_publication(published).manifest_bytes)
            return published
        tables = []
        for rank, ref in enumerate(task.tables):
            table = self._parsed(ref, weights_pb2.SourceTable(), f"the table of rank {rank}")
            if not table.HasField("rank") or table.rank != rank:
                raise invalid(f"rank {rank} of lineage {task.lineage!r} published the table of {label(table)}")
            tables.append(table)
        published = self._published(merge_tables(tables, digests), task.tables)
        self._publications.put(digests, published)
        return published

    def join(self, task: JoinSources) -> Joined:
        """Joins what holders offer of one version. A holder is left out and named if its record does not hash to the
        version's root, or its table does not fit the record."""
        refused: dict[str, weights_pb2.Problem] = {}
        records = [] if task.record is None else [task.record]
        for offer in task.offers:
            try:
                if offer.record is not None:
                    self._recorded(offer.record, task.identity.root)
                    records.append(offer.record)
            except CkptEngineError as error:
                refused[offer.source] = _of_holder(offer, error)
        if not records:
            return Joined(None, None, refused)
        recorded = self._recorded(records[0], task.identity.root)
        manifest = recorded.record.manifest
        good = [offer for offer in task.offers if offer.source not in refused]
        key = (recorded.cutting, *(name for offer in good for name in (offer.source, offer.table.digest)))
        known = self._publications.get(key)
        if known is not None:
            self._blobs.put(_publication(known).manifest_bytes)
            return Joined(known, records[0], refused)
        tables, refs = [], []
        for offer in good:
            try:
                table = self._parsed(offer.table, weights_pb2.SourceTable(), "its table")
                rank = table.rank if table.HasField("rank") else None
                if rank != offer.rank or table.id != offer.source:
                    which = "without a rank" if offer.rank is None else f"of rank {offer.rank}"
                    raise invalid(f"its table is that of {label(table)}; its id must be {offer.source!r}, {which}")
                join_sources(manifest, [table], [offer.table.digest])
            except CkptEngineError as error:
                refused[offer.source] = _of_holder(offer, error)
            else:
                tables.append(table)
                refs.append(offer.table)
        if not tables:
            return Joined(None, None, refused)
        publication = join_sources(manifest, tables, [ref.digest for ref in refs])
        published = self._published(publication, refs)
        if len(tables) == len(good):
            self._publications.put(key, published)
        return Joined(published, records[0], refused)

    def stored(self, record: manager_pb2.BlobRef | None) -> bytes | None:
        """A record's bytes, for the ledger. Any thread may call it. Raises NOT_FOUND if its blob is not stored here."""
        return None if record is None else self._blobs.get(record)

    def take_seals(self, entries: Mapping[Version, SealEntry]) -> dict[Version, StoredSeal]:
        """Stores the records that the ledger has as blobs, of versions to whose root they hash. Others are logged, and
        these versions are without a record."""
        return {identity: self._take_seal(identity, entry) for identity, entry in entries.items()}

    def _take_seal(self, identity: Version, entry: SealEntry) -> StoredSeal:
        if entry.record is None:
            return StoredSeal(entry.fill, None)
        try:
            ref = self._blobs.put(entry.record)
            self._recorded(ref, identity.root)
        except CkptEngineError as error:
            log.warning("the ledger's sealed record of %s is not used: %s", identity, error.problem.message)
            return StoredSeal(0, None)
        return StoredSeal(entry.fill, ref)

    def _published(self, publication: Publication, refs: Sequence[manager_pb2.BlobRef]) -> Published:
        return Published(
            manifest=self._blobs.put(publication.manifest_bytes),
            sources=tuple(
                SourceOffer(
                    table.id,
                    table.rank if table.HasField("rank") else None,
                    ref,
                    table.stays_sealed,
                    table.source_copies,
                    _outlives(table),
                    tuple(table.copied),
                    table.host,
                    tuple(dict.fromkeys(frozenset(by_transport(region)) for region in table.regions)),
                    tuple(table.warnings),
                )
                for table, ref in zip(publication.tables, refs, strict=True)
            ),
            tensors=len(publication.manifest.tensors),
            bytes=publication.bytes,
            handle=publication,
            parts=_parts(publication),
        )

    def compile(self, task: CompilePlans) -> Compiled:
        """Compiles plans for these workers, or returns the cached ones if nothing changed and their blobs still exist.

        A replica that cannot be planned for is named as unfit, and has no plans.
        """
        publication = _publication(task.published)
        recorded = None if task.record is None else self._recorded(task.record, task.root)
        cutting = b"" if recorded is None else recorded.cutting
        workers = tuple(map(_identity, task.workers))
        key = (publication.table_digests, cutting, workers, task.collective, task.keeps_draft)
        compiled = self._plans.get(key)
        if compiled is not None and compiled.unfit and cast(_PlanHandle, compiled.handle).relays != task.relays:
            compiled = None  # the advice for replicas that are out of reach depends on where relays run
        if compiled is not None and all(map(self._blobs.has, _blobs_of(compiled))):
            if task.edges:
                return replace(compiled, edges=self._edges(task, compiled))
            if recorded is None:
                return compiled
            return replace(compiled, handle=replace(cast(_PlanHandle, compiled.handle), recorded=recorded))
        requests, unfit = self._requests(task)
        choose = partial(choose_transport, relays=task.relays)
        along = () if recorded is None else recorded.boxes
        plans = _plans_for_all_that_fit(publication, requests, unfit, along, choose, task.keeps_draft)
        taking = [each for each in requests if each.collective and _replica(each) not in unfit]
        collective, refused = plan_together(self._blobs, plans, taking) if taking else (None, {})
        unfit |= refused
        stored: dict[int, manager_pb2.BlobRef] = {}
        refs: dict[WorkerKey, manager_pb2.BlobRef] = {}
        planned_workers = [worker for worker in task.workers if worker.key[0] not in unfit]
        for worker in planned_workers:  # workers that need the same share one plan, so it is encoded once
            plan = plans.workers[worker.key]
            if id(plan) not in stored:
                stored[id(plan)] = self._blobs.put(canonical(plan))
            refs[worker.key] = stored[id(plan)]
        compiled = Compiled(
            plans=refs,
            atoms={
                publication.tables[source].id: self._blobs.put(canonical(atoms))
                for source, atoms in (plans.atoms if recorded is None else finer_atoms(plans, recorded)).items()
            },
            bytes={worker.key: plans.workers[worker.key].bytes for worker in planned_workers},
            handle=_PlanHandle(plans, recorded, task.relays),
            unfit=unfit,
            distances={worker.key: plans.distances[worker.key] for worker in planned_workers},
            collective=collective,
        )
        self._plans.put(key, compiled)
        return replace(compiled, edges=self._edges(task, compiled)) if task.edges else compiled

    def _edges(self, task: CompilePlans, compiled: Compiled) -> dict[WorkerKey, list[manager_pb2.EdgeReport]]:
        """The edges of each worker's plan, with their bytes. For workers that share a plan only the rank differs."""
        plans = cast(_PlanHandle, compiled.handle).plans
        widths = [itemsize(spec.dtype) for spec in plans.publication.manifest.tensors]
        sizes: dict[int, list[int]] = {}
        edges: dict[WorkerKey, list[manager_pb2.EdgeReport]] = {}
        for worker in (each for each in task.workers if each.key in compiled.plans):
            plan = plans.workers[worker.key]
            if id(plan) not in sizes:
                needs = self._parsed(worker.needs, weights_pb2.WorkerNeeds(), "what a worker needs").needs
                read = [0] * len(plan.sources)
                for piece in plan.pieces:
                    box = Box(tuple(piece.start), tuple(piece.stop))
                    read[piece.source] += box.volume * widths[needs[piece.need].tensor]
                sizes[id(plan)] = read
            edges[worker.key] = [
                manager_pb2.EdgeReport(
                    source=source.source,
                    source_rank=source.rank if source.HasField("rank") else None,
                    worker_rank=worker.key[1],
                    transport=source.transport,
                    reason=source.reason,
                    bytes=size,
                )
                for source, size in zip(plan.sources, sizes[id(plan)], strict=True)
            ]
        return edges

    def _requests(self, task: CompilePlans) -> tuple[list[PlanRequest], dict[str, weights_pb2.Problem]]:
        """Reads what the workers need. Replicas with a worker whose needs are malformed are returned by name."""
        needs: dict[bytes, weights_pb2.WorkerNeeds] = {}
        unfit: dict[str, weights_pb2.Problem] = {}
        requests = []
        for worker in task.workers:
            name = f"the needs of replica {worker.key[0]!r}, worker {worker.key[1]}"
            try:
                if worker.needs.digest not in needs:
                    needs[worker.needs.digest] = self._parsed(worker.needs, weights_pb2.WorkerNeeds(), name)
            except CkptEngineError as error:
                if error.problem.code != weights_pb2.Problem.CODE_INVALID_ARGUMENT:
                    raise  # they are not stored here: replicas can store them again
                unfit.setdefault(worker.key[0], error.problem)
                continue
            within = worker.key[0] in task.collective
            worker_needs = needs[worker.needs.digest]
            requests.append(PlanRequest(worker.key, worker_needs, worker.host, worker.transports, within, worker.shut))
        return [request for request in requests if _replica(request) not in unfit], unfit

    def combine(self, task: CombineSeals) -> Combined:
        """Adds up the sealed digests: the root, and what each worker must find."""
        planned = task.compiled.handle
        if not isinstance(planned, _PlanHandle):
            raise internal("these plans were not compiled by this manager")
        plans, recorded = planned.plans, planned.recorded
        tables = plans.publication.tables
        digests = {
            source: self._parsed(task.digests[table.id], weights_pb2.Digests(), f"the digests of {label(table)}")
            for source, table in enumerate(tables)
            if table.id in task.digests
        }
        sealed = check_replicas(plans, digests) if recorded is None else seal_from_record(plans, recorded, digests)
        stored: dict[int, manager_pb2.BlobRef] = {}
        expected: dict[WorkerKey, manager_pb2.BlobRef] = {}
        for key in task.compiled.plans:
            needs = plans.maps[key]
            if id(needs) not in stored:
                stored[id(needs)] = self._blobs.put(expected_blob(plans, key, sealed))
            expected[key] = stored[id(needs)]
        if recorded is not None:
            return Combined(recorded.root, expected)
        record = self._blobs.put(*planned.writer.write(sealed), fleeting=True)
        return Combined(sealed.root(), expected, record)

    def _recorded(self, ref: manager_pb2.BlobRef, root: bytes) -> ProvenRecord:
        """Reads a record, wherever it comes from. Raises DATA_LOSS unless it hashes to the root."""
        recorded = self._records.get((ref.digest, root))
        if recorded is None:
            record = self._parsed(ref, weights_pb2.SealedRecord(), "the sealed record")
            recorded = read_record(record, root, self._records.values())
            self._records.put((ref.digest, root), recorded)
        return recorded

    def _parsed(self, ref: manager_pb2.BlobRef, empty: Parsed, name: str) -> Parsed:
        """Parses a blob as a message. Raises INVALID_ARGUMENT, naming the blob, if it is not one. empty: is filled."""
        try:
            empty.ParseFromString(self._blobs.get(ref))
        except DecodeError as error:
            raise invalid(f"{name} (blob {describe(ref.digest)}) is not a {empty.DESCRIPTOR.name}") from error
        return empty


def _plans_for_all_that_fit(
    publication: Publication,
    requests: Sequence[PlanRequest],
    unfit: dict[str, weights_pb2.Problem],
    along: Sequence[Sequence[Box]],
    choose: Choose,
    keeps_draft: bool,
) -> Plans:
    """Compiles plans for all replicas that fit. The others are added to `unfit`: a worker of theirs cannot be planned
    for, their workers together leave something out, or their draft has no weights in this version and may not keep its
    own. along: as for `compile_plans`."""
    workers: dict[str, list[PlanRequest]] = {}
    for request in requests:
        workers.setdefault(_replica(request), []).append(request)
    for name, replica_requests in workers.items():
        try:
            all_needs = [each.needs for each in replica_requests]
            check_complete(publication.manifest, all_needs, name)
            if not keeps_draft:
                check_unfilled(all_needs, name)
        except CkptEngineError as error:
            unfit[name] = error.problem
    refused: dict[Hashable, CkptEngineError] = {}
    fitting = [request for request in requests if _replica(request) not in unfit]
    plans = compile_plans(publication, publication.table_digests, fitting, choose, along, refused)
    for request in fitting:
        if request.key in refused:
            unfit.setdefault(_replica(request), refused[request.key].problem)
    return plans


def _parts(publication: Publication) -> frozenset[frozenset[str]]:
    """Sets of sources, such that one source of each set together have the whole offer."""
    found = {frozenset(holder.source for holder in part.holders) for parts in publication.parts for part in parts}
    return frozenset(frozenset(publication.tables[source].id for source in part) for part in found)


def _of_holder(offer: HeldOffer, error: CkptEngineError) -> weights_pb2.Problem:
    """A problem of a holder's offer, as its owner is told."""
    problem = weights_pb2.Problem()
    problem.CopyFrom(error.problem)
    problem.message = f"what {offer.source} holds is left out: {problem.message}"
    return problem


def _replica(request: PlanRequest) -> str:
    name, _ = cast(WorkerKey, request.key)
    return name


def _outlives(table: weights_pb2.SourceTable) -> bool:
    """Whether every region can still be read when the process that offers it has ended."""
    lasting = {name for name, kind in transport_kinds().items() if kind.outlives}
    return table.stays_sealed and all(lasting & by_transport(region).keys() for region in table.regions)


def _publication(published: Published) -> Publication:
    if not isinstance(published.handle, Publication):
        raise internal("this publication was not merged by this manager")
    return published.handle


def _blobs_of(compiled: Compiled) -> list[manager_pb2.BlobRef]:
    """The blobs that members fetch."""
    collective_plan = [] if compiled.collective is None else [compiled.collective.plan]
    return [*compiled.plans.values(), *compiled.atoms.values(), *collective_plan]


def _identity(worker: PlanWorker) -> tuple[object, ...]:
    return worker.key, worker.needs.digest, canonical(worker.host), worker.transports, worker.shut
