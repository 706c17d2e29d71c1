"""Sources and the ways into their memory: how each is named, and a region as one transport opens it. Pure.

A source is identified by its id; the rank of a trainer rank is for people. Which offer is taken is not decided here,
but by the planner.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from ckpt_engine.core.manifest import blob_digest
from ckpt_engine.core.problems import invalid
from ckpt_engine.v1.weights_pb2 import (
    Offer,
    OfferedRegion,
    PlanSource,
    Region,
    SourceTable,
    Unopened,
    WorkerPlan,
)


class Shut(NamedTuple):
    """A region that a worker could not open over a transport."""

    transport: str
    locator: bytes  # SHA-256 of the region's locator
    reason: str  # for people


def unopened(rank: int, region: Region, plan: WorkerPlan, reason: str) -> Unopened:
    """A worker's message about a region of its plan that it could not open."""
    edges = (edge for edge in plan.sources if any(each.locator == region.locator for each in edge.regions))
    return Unopened(
        worker_rank=rank,
        transport=region.transport,
        source=next((edge.source for edge in edges), ""),
        locator=blob_digest(region.locator),
        reason=reason,
    )


def ways_shut(shut: Iterable[Shut], regions: Iterable[Mapping[str, Region]]) -> Mapping[str, str]:
    """The transports over which a worker cannot open a source, each with the reason. regions: of the source, for each
    the ways into it by transport."""
    reasons = {(each.transport, each.locator): each.reason for each in shut}
    found: dict[str, str] = {}
    for ways in regions if reasons else ():
        for name, way in ways.items():
            if why := reasons.get((name, blob_digest(way.locator))):
                found.setdefault(name, why)
    return found


def another_way(plan: WorkerPlan, shut_region: Region, why: str) -> WorkerPlan | None:
    """The plan with the next way for each edge that has the region. why: what is wrong with the first way, for the
    report. None if such an edge has no other way, or no edge has the region."""
    found = WorkerPlan()
    found.CopyFrom(plan)
    changed = False
    for edge in found.sources:
        regions = [] if edge.transport != shut_region.transport else [region.locator for region in edge.regions]
        if shut_region.locator not in regions:
            continue
        if not edge.others:
            return None
        way, *others = edge.others
        changed_edge = PlanSource()
        changed_edge.CopyFrom(edge)
        changed_edge.transport = way.transport
        changed_edge.reason = f"{way.reason}; it could not open {edge.transport}: {why}"
        del changed_edge.regions[:], changed_edge.others[:]
        changed_edge.regions.extend(way.regions)
        changed_edge.others.extend(others)
        edge.CopyFrom(changed_edge)
        changed = True
    return found if changed else None


def rank_id(rank: int) -> str:
    """The id of a trainer rank's source."""
    return f"rank {rank}"


def holder_id(kind: str, name: str) -> str:
    """The id of a holder's source; no rank has the same."""
    return f"{kind} {name}"


def label(table: SourceTable) -> str:
    """The source as messages name it: its rank if it has one, else its id."""
    return f"rank {table.rank}" if table.HasField("rank") else f"source {table.id}"


def labels(tables: Sequence[SourceTable]) -> str:
    """Several sources as messages name them, in the order of their ranks: "ranks [0, 1]", "source relay a"."""
    ranks = ranks_of(tables)
    others = sorted({label(table) for table in tables if not table.HasField("rank")})
    rank_names = [f"ranks {ranks}"] if len(ranks) > 1 else [f"rank {rank}" for rank in ranks]
    return ", ".join([*rank_names, *others])


def ranks_of(tables: Iterable[SourceTable]) -> list[int]:
    """The ranks of the sources that have one, sorted, each once; for `Problem.ranks`."""
    return sorted({table.rank for table in tables if table.HasField("rank")})


def region_offered(ways: Sequence[Region]) -> OfferedRegion:
    """One region of a table, made of each transport's offer. Raises ValueError unless all have one id and size."""
    first = ways[0]
    if any((way.id, way.size) != (first.id, first.size) for way in ways):
        raise ValueError(f"region {first.id} of {first.size} bytes is offered with another id or size")
    offers = [Offer(transport=way.transport, locator=way.locator) for way in ways]
    return OfferedRegion(id=first.id, size=first.size, offers=offers)


def by_transport(region: OfferedRegion, source: str = "") -> Mapping[str, Region]:
    """The ways into a region by transport, as each transport opens it. source: the region's, as messages name it."""
    return {
        offer.transport: Region(
            id=region.id, transport=offer.transport, size=region.size, locator=offer.locator, source=source
        )
        for offer in region.offers
    }


def check_regions(table: SourceTable) -> Mapping[int, int]:
    """The size of each region of a table, by its id.

    Raises INVALID_ARGUMENT if two have one id, or one is offered over no transport, or twice over the same.
    """
    ranks = ranks_of([table])
    sizes: dict[int, int] = {}
    for region in table.regions:
        if region.id in sizes:
            raise invalid(f"{label(table)} gives two regions one id ({region.id})", ranks=ranks)
        names = [offer.transport for offer in region.offers]
        if not names or len(set(names)) != len(names):
            fault = f"over {', '.join(names)}: one offer a transport" if names else "over no transport"
            raise invalid(f"{label(table)} offers region {region.id} {fault}", ranks=ranks)
        sizes[region.id] = region.size
    return sizes
