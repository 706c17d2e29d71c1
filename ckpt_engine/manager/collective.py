"""Makes the plan of a collective from its workers' plans: its members, what each wants, and where they meet."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import cast

from ckpt_engine.core.collective_buckets import BoxWant, wants_of
from ckpt_engine.core.collective_members import CollectiveReader, Rank, choose_members
from ckpt_engine.core.collective_plan import KEY_BYTES, collective_plan, meeting_of, read_locator
from ckpt_engine.core.offers import by_transport, label, ranks_of
from ckpt_engine.core.plan import PlanRequest, Plans
from ckpt_engine.core.problems import CkptEngineError, invalid
from ckpt_engine.core.transports import collective_transport
from ckpt_engine.machines.events import CollectivePlan, WorkerKey
from ckpt_engine.machines.manager.collective import name_of
from ckpt_engine.manager.blobs import BlobStore
from ckpt_engine.v1.weights_pb2 import Problem, SourceTable


def plan_together(
    blobs: BlobStore, plans: Plans, requests: Sequence[PlanRequest]
) -> tuple[CollectivePlan | None, Mapping[str, Problem]]:
    """Plans the collective of these workers and stores it; None: no worker can be a member. Also returns the replicas
    that cannot take part, and why. Makes the key of its meeting."""
    workers = {name_of(cast(WorkerKey, each.key)): each for each in requests}
    tables = {table.id: table for table in plans.publication.tables}
    readers = [
        CollectiveReader(
            cast(WorkerKey, each.key)[0],
            name,
            each.host,
            frozenset(source.source for source in plans.workers[each.key].sources),
        )
        for name, each in workers.items()
    ]
    used = {name for reader in readers for name in reader.reads}
    found = choose_members([_rank(table) for name, table in tables.items() if name in used], readers)
    if not found.members or not found.members[0].is_source:
        return None, found.refused
    sources = {member.name: number for number, member in enumerate(found.members) if member.is_source}
    wants: list[BoxWant] = []
    transport = collective_transport()
    for number, member in enumerate(found.members):
        if not member.is_source:
            each = workers[member.name]
            wants += wants_of(plans.workers[each.key], each.needs, number, sources, transport)
    dtypes = [spec.dtype for spec in plans.publication.manifest.tensors]
    plan = blobs.put(collective_plan(found.members, wants, dtypes))
    lead = _locators(tables[found.members[0].name])[0]
    members = tuple(
        member.name if member.is_source else cast(WorkerKey, workers[member.name].key) for member in found.members
    )
    return CollectivePlan(members, plan, meeting_of(lead, secrets.token_bytes(KEY_BYTES))), found.refused


def _rank(table: SourceTable) -> Rank:
    gpus = set()
    for locator in _locators(table):
        try:
            gpus.add(read_locator(locator).gpu)
        except CkptEngineError as error:
            raise invalid(f"{label(table)}: {error.problem.message}", ranks=ranks_of([table])) from error
    return Rank(table.id, table.host, frozenset(gpus))


def _locators(table: SourceTable) -> list[bytes]:
    """Locators of the regions that it offers for collectives."""
    transport = collective_transport()
    ways = [by_transport(region).get(transport) for region in table.regions]
    return [way.locator for way in ways if way is not None]
