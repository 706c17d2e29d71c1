"""Several ways into the same memory: what a plan says of them, and what is planned when one could not be opened."""

from __future__ import annotations

from dataclasses import replace

from ckpt_engine.core.boxes import whole
from ckpt_engine.core.manifest import blob_digest
from ckpt_engine.core.offers import Shut, another_way, by_transport
from ckpt_engine.core.plan import compile_plans
from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.core.publication import merge_tables
from ckpt_engine.v1.weights_pb2 import Offer, Region, SourceTable, WorkerPlan
from tests.core.core_plans import some_weights
from tests.core.core_tables import everything, request, table

WAYS = ("shared_memory", "file")


def offered(*transports: str) -> SourceTable:
    """Rank 0, which offers its one region over all of these."""
    weights = some_weights(a=(4, 3))
    found = table(0, weights, everything(weights))
    del found.regions[0].offers[:]
    found.regions[0].offers.extend(Offer(transport=each, locator=each.encode()) for each in transports)
    return found


def planned(source: SourceTable, *shut: Shut) -> WorkerPlan | CkptEngineError:
    publication = merge_tables([source])
    wanted = request("worker", publication.manifest_digest, [(0, whole((4, 3)))], source.host, *WAYS)
    refused: dict[object, CkptEngineError] = {}
    plans = compile_plans(publication, publication.table_digests, [replace(wanted, shut=shut)], refused=refused)
    return refused.get("worker") or plans.workers["worker"]


def shut(transport: str) -> Shut:
    return Shut(transport, blob_digest(transport.encode()), "not allowed")


def test_a_plan_names_the_nearest_way_and_all_others() -> None:
    plan = planned(offered(*reversed(WAYS)))
    assert isinstance(plan, WorkerPlan)
    (edge,) = plan.sources
    assert edge.transport == "shared_memory"
    (other,) = edge.others
    assert (other.transport, other.regions[0].locator, other.regions[0].id) == ("file", b"file", 7)
    assert "file" in other.reason


def test_what_could_not_be_opened_is_planned_another_way_and_said() -> None:
    plan = planned(offered(*WAYS), shut("shared_memory"))
    assert isinstance(plan, WorkerPlan)
    (edge,) = plan.sources
    assert (edge.transport, len(edge.others)) == ("file", 0)
    assert "it could not open rank 0 over shared_memory: not allowed" in edge.reason


def test_other_memory_over_the_same_transport_is_tried() -> None:
    source = offered(*WAYS)
    source.regions[0].offers[0].locator = b"published anew"
    plan = planned(source, shut("shared_memory"))
    assert isinstance(plan, WorkerPlan)
    assert plan.sources[0].transport == "shared_memory"


def test_without_any_way_the_worker_is_refused_in_words() -> None:
    problem = planned(offered("shared_memory"), shut("shared_memory"))
    assert isinstance(problem, CkptEngineError)
    for words in ("could not open rank 0 over shared_memory: not allowed", "the next update tries it again"):
        assert words in str(problem)


def test_a_plan_goes_on_from_way_to_way_until_none_is_left() -> None:
    plan = planned(offered(*WAYS))
    assert isinstance(plan, WorkerPlan)
    ways = by_transport(offered(*WAYS).regions[0])
    other = another_way(plan, ways["shared_memory"], "not allowed")
    assert other is not None
    assert other.sources[0].transport == "file"
    assert list(other.sources[0].regions) == [ways_of(plan)[0]]
    assert "could not open shared_memory: not allowed" in other.sources[0].reason
    assert another_way(other, ways["file"], "not there") is None
    assert [*plan.pieces] == [*other.pieces]


def test_a_region_that_no_edge_has_leads_to_no_other_plan() -> None:
    plan = planned(offered(*WAYS))
    assert isinstance(plan, WorkerPlan)
    elsewhere = Region(id=7, transport="shared_memory", locator=b"in no edge")
    assert another_way(plan, elsewhere, "not allowed") is None


def ways_of(plan: WorkerPlan) -> list[object]:
    return [way.regions[0] for way in plan.sources[0].others]
