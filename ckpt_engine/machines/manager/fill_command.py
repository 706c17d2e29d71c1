"""What one relay is told to bring: the tables that it reads, and the needs of its host and of those that it feeds."""

from __future__ import annotations

from collections.abc import Sequence

from ckpt_engine.core.relay_routes import Route
from ckpt_engine.core.version import Version
from ckpt_engine.machines.manager.course import Course
from ckpt_engine.machines.manager.relay_facts import KnownNeeds
from ckpt_engine.v1 import manager_pb2


def fill_command(
    course: Course,
    known: KnownNeeds,
    identity: Version,
    name: str,
    route: Route,
    upstream: Sequence[manager_pb2.BlobRef],
) -> manager_pb2.FillRelay:
    """The command for the relay of this name, without a record. upstream: tables of the relays that it reads. It keeps
    the lineage's last version."""
    holders, published = course.state.members.holders, course.goal.published
    tables = {source.source: source.table for source in published.sources}
    # Others that hold it, and of which nobody knows how they are read: whoever reads finds out.
    others = [
        held.table
        for other in course.state.members.connected_holders()
        for held in other.held
        if held.identity == identity and other.filling is None and other.source not in tables
    ]
    relays = [holders[each] for each in (name, *route.feeds) if each in holders]
    # What nobody brings to it would take memory for nothing. It may lie with sources that it does not read itself.
    within = [tables[source] for source in route.within if source in tables]
    latest = course.state.versions.latest.get(course.goal.lineage)
    return manager_pb2.FillRelay(
        fence=course.filling.message(),
        identity=identity.message(),
        tables=[*(tables[source] for source in route.sources), *upstream, *others],
        needs=known.near(relays),
        everything=any(relay.filling is not None and relay.filling.everything for relay in relays),
        keep=None if latest is None else latest.identity.message(),
        within=within,
    )
