"""Where a version can be read by somebody who is no member: who holds it, and the record that proves it.

Decides which versions can be read: those that connected holders hold under a root that the ledger or a worker knows,
and the latest one of a lineage as long as all of its sources stay sealed. Changes nothing and reserves nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ckpt_engine.core.problems import invalid, not_found
from ckpt_engine.core.version import Version
from ckpt_engine.machines.manager.state import State
from ckpt_engine.machines.manager.versions import Latest
from ckpt_engine.v1 import manager_pb2

MOST_NAMED = 8
"""Versions that a refusal names."""


@dataclass
class _Readable:
    identity: Version
    record: manager_pb2.BlobRef
    tables: list[manager_pb2.BlobRef] = field(default_factory=list)


def located(state: State, request: manager_pb2.LocateVersionRequest) -> manager_pb2.LocateVersionResponse:
    """Where a version can be read. Raises NOT_FOUND, naming what can be read, and INVALID_ARGUMENT if several lineages
    are meant."""
    readable = _readable(state)
    lineages = sorted({lineage for lineage, _ in readable})
    if not request.lineage and len(lineages) > 1:
        raise invalid(f"versions of the lineages {', '.join(map(repr, lineages))} can be read: name one of them")
    lineage = request.lineage or next(iter(lineages), "")
    latest = state.versions.latest.get(lineage)
    number = request.version if request.HasField("version") else None
    if number is None and latest is not None:
        number = latest.identity.number
    found = None if number is None else readable.get((lineage, number))
    if found is None:
        what = "any version" if number is None else f"version {number}"
        of = f" of lineage {lineage!r}" if lineage else ""
        named = [str(each.identity) for _, each in sorted(readable.items())[-MOST_NAMED:]]
        raise not_found(
            f"nobody who can be read holds {what}{of}; can be read: {', '.join(named) or 'none'}. Relays keep the last "
            "two versions; a trainer keeps one readable that it published with snapshot=True, or from a directory"
        )
    return manager_pb2.LocateVersionResponse(
        identity=found.identity.message(), record=found.record, tables=found.tables
    )


def _readable(state: State) -> dict[tuple[str, int], _Readable]:
    """The readable versions, by lineage and number. Holders come first: they are nearer, or as near."""
    found: dict[tuple[str, int], _Readable] = {}
    for holder in state.members.connected_holders():
        for held in holder.held:
            identity = held.identity
            if held.record is not None and held.record.digest and state.versions.knows(identity):
                each = found.setdefault((identity.lineage, identity.number), _Readable(identity, held.record))
                each.tables.append(held.table)
    for latest in state.versions.latest.values():
        identity, tables = latest.identity, _sealed_tables(state, latest)
        if latest.record is not None:
            key = identity.lineage, identity.number
            if tables and key not in found:
                found[key] = _Readable(identity, latest.record)
            if key in found:
                found[key].record = latest.record  # its own
                found[key].tables += tables
    return found


def _sealed_tables(state: State, latest: Latest) -> list[manager_pb2.BlobRef]:
    """Tables of the ranks, or files, that still have the very weights that were sealed."""
    if latest.published is None or latest.sealed_since:
        return []
    return [
        source.table
        for source in latest.published.sources
        if source.stays_sealed
        and (source.outlives or state.members.source(latest.identity.lineage, source) is not None)
    ]
