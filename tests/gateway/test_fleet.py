"""Who is asked: hashing with bounded load, what is told against what is seen, versions that are asked for."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_engine.core.version_bounds import VersionBounds
from ckpt_engine.gateway import dialect
from ckpt_engine.gateway.app import all_models
from ckpt_engine.gateway.choice import BOUND, choose, key_of, ranked
from ckpt_engine.gateway.fleet import Fleet, FleetState, ReplicaNews, VersionWant, Visit
from ckpt_engine.gateway.refusals import RefusedError
from ckpt_engine.gateway.versions import GatewayVersion
from ckpt_engine.gateway.watcher import News, StaleError
from ckpt_engine.v1 import manager_pb2, weights_pb2

NAMES = [f"r{number}" for number in range(8)]


def fleet_of(*told: ReplicaNews, latest: int = 3) -> Fleet:
    fleet = Fleet()
    fleet.tell(told)
    fleet.tell_latest([GatewayVersion(latest, "run")])
    return fleet


def told(
    name: str, state: FleetState = FleetState.SERVING, version: int | None = 3, lineage: str = "run"
) -> ReplicaNews:
    held = None if version is None else GatewayVersion(version, lineage, "ab")
    return ReplicaNews(name, f"http://{name}", "vllm", state, identity=held)


def names(fleet: Fleet, want: VersionWant, now: float = 0.0) -> list[str]:
    return sorted(member.name for member in fleet.candidates(want, now))


def test_a_replica_that_leaves_moves_only_its_own_sessions() -> None:
    keys = [key_of(f"session-{number}", ()) for number in range(400)]
    before = {key: ranked(key, NAMES)[0] for key in keys}
    after = {key: ranked(key, NAMES[1:])[0] for key in keys}
    assert all(after[key] == before[key] for key in keys if before[key] != NAMES[0])
    assert min(Counter(before.values()).values()) > 20


def test_sessions_count_before_prompts_and_equal_beginnings_meet() -> None:
    assert key_of("s", [1, 2]) == key_of("s", [3])
    assert key_of("", [*range(64), 7]) == key_of("", [*range(64), 8])
    assert key_of("", [1, 2]) != key_of("", [12])


@given(st.lists(st.sampled_from(["one session", "another", "a third"]), min_size=1, max_size=200))
def test_two_gateways_that_share_nothing_keep_loads_bounded(sessions: list[str]) -> None:
    """Each knows what the replicas report, which is everybody's requests."""
    loads = dict.fromkeys(NAMES, 0)
    for session in sessions:
        loads[choose(key_of(session, ()), loads)] += 1
    assert max(loads.values()) <= BOUND * (sum(loads.values()) + 1) / len(loads) + 2


def test_what_refuses_is_left_alone_for_a_moment_that_grows() -> None:
    fleet = fleet_of(told("a"), told("b"))
    member = fleet.members["a"]
    fleet.failed(member, 10.0, "it does not answer")
    assert names(fleet, VersionWant(), 10.1) == ["b"]
    assert names(fleet, VersionWant(), 10.3) == ["a", "b"]
    fleet.failed(member, 10.3, "again")
    assert names(fleet, VersionWant(), 10.7) == ["b"]
    fleet.answered(member, None)
    assert names(fleet, VersionWant(), 10.7) == ["a", "b"]


def test_who_is_away_is_asked_only_where_nobody_else_is() -> None:
    fleet = fleet_of(
        told("a", FleetState.AWAY), told("b"), told("c", FleetState.ASLEEP), told("d", FleetState.DRAINING)
    )
    assert names(fleet, VersionWant()) == ["b", "d"]
    fleet.tell([told("b", FleetState.CLOSED), told("d", FleetState.CLOSED)])
    assert names(fleet, VersionWant()) == ["a"]
    assert fleet.could_serve(0.0)


def test_versions_and_lineages_are_kept_apart() -> None:
    fleet = fleet_of(told("a", version=2), told("b"), told("c", version=9, lineage="other"))
    assert names(fleet, VersionWant(lineage="run")) == ["a", "b"]
    assert names(fleet, VersionWant(lineage="run", min_version=3)) == ["b"]
    assert names(fleet, VersionWant(lineage="run", max_lag=1)) == ["a", "b"]
    assert names(fleet, VersionWant(lineage="run", max_lag=0)) == ["b"]
    assert names(fleet, VersionWant(lineage="run", version=2)) == ["a"]
    assert names(fleet, VersionWant(lineage="run", version=4)) == []
    with pytest.raises(RefusedError, match="holds version 1 any more"):
        fleet.candidates(VersionWant(lineage="run", version=1), 0.0)
    fleet.tell([told("a", FleetState.DRAINING, 2)])
    assert names(fleet, VersionWant(lineage="run", version=2)) == []  # it is about to hold another one


def test_a_rollback_makes_a_version_that_was_there_an_error_and_not_a_wait() -> None:
    fleet = fleet_of(told("a"))
    assert names(fleet, VersionWant(min_version=4)) == []
    fleet.tell_latest([GatewayVersion(2, "run")])
    with pytest.raises(RefusedError, match="taken back") as caught:
        fleet.candidates(VersionWant(min_version=3), 0.0)
    assert (caught.value.status, caught.value.reason) == (409, "rolled_back")


def test_a_dialect_that_nobody_speaks_is_refused_by_name() -> None:
    with pytest.raises(RefusedError, match="engines of vllm") as caught:
        fleet_of(told("a")).candidates(VersionWant(engines=frozenset({"sglang"})), 0.0)
    assert caught.value.status == 501


def message(**fields: object) -> manager_pb2.WatchReplicasResponse:
    fence = weights_pb2.Fence(cluster="c", epoch=5)
    return manager_pb2.WatchReplicasResponse(**{"fence": fence, "run": "one", **fields})  # type: ignore[arg-type]


def replica(name: str) -> manager_pb2.WatchedReplica:
    return manager_pb2.WatchedReplica(
        name=name, url=f"http://{name}/", engine="vllm", state=manager_pb2.REPLICA_STATE_SERVING
    )


def test_a_manager_that_restarted_takes_nobody_out_before_it_has_settled() -> None:
    fleet = Fleet()
    news = News(fleet)
    news.take(message(snapshot=True, replicas=[replica("a"), replica("b")]))
    news.take(message(sequence=1, gone=["b"]))
    assert sorted(fleet.members) == ["a"]
    news.take(message(run="two", snapshot=True, settling=True))
    assert sorted(fleet.members) == ["a"]
    news.take(message(run="two", sequence=1, settling=True, replicas=[replica("c")]))
    assert sorted(fleet.members) == ["a", "c"]
    news.take(message(run="two", sequence=2))
    assert sorted(fleet.members) == ["c"]


def test_a_gateway_takes_in_the_replicas_of_its_pool_and_lets_go_of_one_that_changes_it() -> None:
    actor, judge = replica("a"), replica("b")
    actor.pool, judge.pool = "actor", "judge"
    fleet, nobody = Fleet(), Fleet()
    news = News(fleet, "actor")
    for each in (news, News(nobody)):
        each.take(message(snapshot=True, replicas=[actor, judge]))
    assert (sorted(fleet.members), sorted(nobody.members)) == (["a"], [])
    actor.pool = "judge"
    news.take(message(sequence=1, replicas=[actor]))
    assert not fleet.members


def shelf(engine: str, adapter: str, version: int, serving: bool = True) -> manager_pb2.WatchedReplica:
    """An adapter in a replica, as the manager reports it."""
    return manager_pb2.WatchedReplica(
        name=f"{engine}.{adapter}",
        pool=adapter,
        url=f"http://{engine}",
        engine="vllm",
        state=manager_pb2.REPLICA_STATE_SERVING if serving else manager_pb2.REPLICA_STATE_CLOSED,
        identity=weights_pb2.Identity(lineage=adapter, version=version, root=bytes(32)),
    )


def test_a_request_for_an_adapter_goes_to_a_replica_that_has_it() -> None:
    """Best to one that had the version that it names: what is told is the newest one only."""
    fleet = Fleet()
    news = News(fleet)
    far = replica("d.blue")
    far.pool = "blue"
    news.take(message(snapshot=True, replicas=[*map(replica, "abc"), shelf("a", "policy", 7), shelf("b", "policy", 7)]))
    news.take(message(sequence=1, replicas=[shelf("b", "policy", 8), far]))
    assert sorted(fleet.members) == ["a", "b", "c"], "shelves get no requests of their own"
    assert names(fleet, VersionWant(model="policy")) == ["a", "b"]
    assert names(fleet, VersionWant(model="policy@8")) == ["b"]
    assert names(fleet, VersionWant(model="policy@7")) == ["a", "b"]
    assert names(fleet, VersionWant(model="policy@6")) == ["a", "b"], "from before this gateway's start"
    assert names(fleet, VersionWant(model="base")) == ["a", "b", "c"]
    assert names(fleet, VersionWant(model="blue")) == ["a", "b", "c"], "the name of a pool like others"
    news.take(message(sequence=2, replicas=[shelf("b", "policy", 8, serving=False)]))
    assert names(fleet, VersionWant(model="policy@8")) == ["a"]
    news.take(message(sequence=3, replicas=[shelf("a", "policy", 7, serving=False)]))
    assert names(fleet, VersionWant(model="policy")) == ["a", "b"], "they say best why they do not"
    news.take(message(sequence=4, replicas=[shelf("b", "policy", 8)], gone=["b"]))
    assert names(fleet, VersionWant(model="policy")) == ["a"]
    news.take(message(sequence=5, gone=["a"]))
    assert names(fleet, VersionWant(model="policy")) == ["c"], "which says that it has none"
    news.take(message(run="two", snapshot=True, replicas=[replica("a"), replica("b"), shelf("b", "critic", 1)]))
    assert names(fleet, VersionWant(model="critic")) == ["b"]
    assert names(fleet, VersionWant(model="policy")) == ["a", "b"]


def test_an_adapter_that_only_a_replica_which_is_away_has_is_asked_for_there() -> None:
    """And a route is missing everywhere, if it is at each replica that has the adapter."""
    fleet = Fleet()
    away = replica("b")
    away.state = manager_pb2.REPLICA_STATE_AWAY
    held = [shelf("b", "policy", 7), shelf("c", "critic", 1), shelf("d", "critic", 2)]
    News(fleet).take(message(snapshot=True, replicas=[replica("a"), away, *map(replica, "cd"), *held]))
    assert names(fleet, VersionWant(model="policy")) == ["b"]
    assert names(fleet, VersionWant(model="base")) == ["a", "c", "d"]
    assert fleet.all_in({"b"}, VersionWant(model="policy"))
    assert not fleet.all_in({"d"}, VersionWant(model="critic@2")), "c has another version"
    assert fleet.all_in({"c", "d"}, VersionWant(model="critic@2"))
    assert not fleet.all_in({"b", "c", "d"}, VersionWant(model="base"))


def test_why_a_request_for_an_adapter_has_no_replica() -> None:
    fleet = Fleet()
    News(fleet).take(message(snapshot=True, replicas=[replica("a"), replica("b"), shelf("b", "policy", 7)], sequence=1))
    fleet.failed(fleet.members["b"], 0.0, "it is busy")
    assert names(fleet, VersionWant(model="policy")) == []
    assert fleet.why_unplaced(VersionWant(model="policy"), 0.1) == "a has no adapter policy; b: it is busy"


def test_the_models_of_all_replicas_are_listed_once() -> None:
    bodies = [
        json.dumps({"object": "list", "data": [{"id": name} for name in each]}).encode()
        for each in (("tiny", "policy@7"), ("tiny", "policy@8"))
    ]
    both = all_models([(body, "application/json") for body in bodies])
    assert both is not None
    assert [model["id"] for model in json.loads(both[0])["data"]] == ["tiny", "policy@7", "policy@8"]
    assert all_models([(bodies[0], "a"), (bodies[0], "a")]) == (bodies[0], "a")
    assert all_models([(bodies[0], "a"), (b"<html>", "b")]) == (bodies[0], "a")
    assert all_models([]) is None


def test_what_was_missed_or_is_older_makes_it_dial_again() -> None:
    news = News(Fleet())
    news.take(message(snapshot=True, sequence=3))
    news.take(message(sequence=3))  # the manager lives
    with pytest.raises(StaleError, match="change 4 was missed"):
        news.take(message(sequence=5))
    with pytest.raises(StaleError, match="epoch 4"):
        news.take(message(run="old", snapshot=True, fence=weights_pb2.Fence(cluster="c", epoch=4)))
    news.take(message(run="new", snapshot=True, fence=weights_pb2.Fence(cluster="another", epoch=1)))


def test_what_a_replica_can_have_held_is_a_range() -> None:
    fleet = fleet_of(told("a", version=2))
    member = fleet.members["a"]
    visit = Visit(member)
    visit.let_in(fleet.answered(member, GatewayVersion(2, "", "ab")), VersionBounds())
    assert visit.bounds() == (GatewayVersion(2, "run", "ab"), GatewayVersion(2, "run", "ab"))
    draining = ReplicaNews(
        "a",
        "http://a",
        "vllm",
        FleetState.DRAINING,
        "",
        GatewayVersion(2, "run", "ab"),
        GatewayVersion(3, "run"),
        "in_place",
    )
    fleet.tell([draining])
    assert visit.bounds() == (GatewayVersion(2, "run", "ab"), GatewayVersion(3, "run"))
    assert (visit.caches(3), visit.caches(2)) == ("kept", "unknown")


def test_what_became_of_caches_is_told_by_visit_since_a_replica_may_take_one_version_twice() -> None:
    fleet = fleet_of(told("a", version=2))
    member = fleet.members["a"]

    def draining(now: int, to: int, mode: str) -> ReplicaNews:
        return replace(told("a", version=now), state=FleetState.DRAINING, next=GatewayVersion(to, "run"), mode=mode)

    first = Visit(member)
    fleet.tell([draining(2, 3, "in_place")])
    fleet.tell([told("a", version=3)])
    assert first.caches(3) == "kept"
    assert first.entry(3) == "recomputed", "the gate has not said under which version it was let in"
    first.let_in(GatewayVersion(2, "run"), VersionBounds())
    assert first.entry(3) == "kept", "it was let in before, and waited over the install"
    fleet.tell([draining(3, 4, "keep")])
    fleet.tell([told("a", version=4)])
    second = Visit(member)
    fleet.tell([draining(4, 3, "keep")])
    assert second.caches(3) == "recomputed", "it saw the rollback only"
    second.let_in(GatewayVersion(4, "run"), VersionBounds())
    first.let_in(GatewayVersion(2, "run"), VersionBounds())
    assert (second.entry(4), second.entry(3), first.entry(2)) == ("recomputed", "recomputed", "recomputed")
    assert first.caches(3) == "unknown", "it may have crossed over to version 3 at either time"
    fleet.tell([told("a", version=3)])
    assert Visit(member).caches(3) == "unknown"


@pytest.mark.parametrize(("mode", "highest"), [("abort", 2), ("wait", 2), ("keep", 3), ("", 3)])
def test_a_request_with_a_token_meets_no_other_version_in_modes_that_end_it(mode: str, highest: int) -> None:
    fleet = fleet_of(told("a", version=2))
    begun, waits = Visit(fleet.members["a"]), Visit(fleet.members["a"])
    begun.begin()
    fleet.tell([replace(told("a", FleetState.DRAINING, 2), next=GatewayVersion(3, "run"), mode=mode)])
    assert [each.version for each in begun.bounds() if each] == [2, highest]
    assert [each.version for each in waits.bounds() if each] == [2, 3]


def test_a_gate_names_a_version_by_its_root() -> None:
    """Two runs may have the same number; a root that was not told is none of the run that was told."""
    fleet = fleet_of(told("a"))
    member = fleet.members["a"]
    assert fleet.answered(member, GatewayVersion(3, "", "ab")) == GatewayVersion(3, "run", "ab")
    assert fleet.answered(member, GatewayVersion(3)) == GatewayVersion(3, "run", "ab")
    assert fleet.answered(member, GatewayVersion(3, "", "cd")) == GatewayVersion(3, "", "cd")
    assert member.identify(GatewayVersion(3)) == GatewayVersion(3, "", "cd")


def test_what_a_gate_let_in_is_compared_with_what_was_asked_for() -> None:
    fleet = fleet_of(told("a"))

    def suits(admitted: int | None, **want: Any) -> bool:
        return fleet.suits(VersionWant(**want), None if admitted is None else GatewayVersion(admitted, "run", "ab"))

    assert [suits(version, min_version=3) for version in (None, 2, 3, 4)] == [False, False, True, True]
    assert [suits(version, version=3) for version in (None, 2, 3, 4)] == [False, False, True, False]
    assert [suits(version, max_lag=1) for version in (None, 1, 2)] == [False, False, True]
    assert [suits(version) for version in (None, 1)] == [True, True]
    assert not suits(3, lineage="another")


def test_a_gate_that_disagrees_with_what_is_told_is_asked_again_after_news() -> None:
    fleet = fleet_of(told("a"), told("b"))
    unsuited = {"a": fleet.members["a"].news}
    want = VersionWant(min_version=3)
    assert [each.name for each in fleet.candidates(want, 0.0, unsuited)] == ["b"]
    fleet.tell([told("a")])
    assert sorted(each.name for each in fleet.candidates(want, 0.0, unsuited)) == ["a", "b"]


def test_a_replica_that_goes_back_is_not_asked_for_a_later_version() -> None:
    fleet = fleet_of(told("a"))
    fleet.tell([replace(told("a", FleetState.DRAINING), next=GatewayVersion(2, "run"))])
    assert names(fleet, VersionWant(min_version=3)) == []
    assert names(fleet, VersionWant(min_version=2)) == ["a"]
    assert names(fleet, VersionWant()) == ["a"]
    fleet.tell([replace(told("a", FleetState.DRAINING), next=GatewayVersion(4, "run"))])
    assert names(fleet, VersionWant(min_version=3)) == ["a"]


@pytest.mark.parametrize(
    ("label", "made_by"),
    [
        ("7:1f9c02ab:run-5", GatewayVersion(7, "run-5", "1f9c02ab")),
        ("7:1f9c02ab:run:with:colons", GatewayVersion(7, "run:with:colons", "1f9c02ab")),
        ("7", GatewayVersion(7)),
        (7, GatewayVersion(7)),
        ("default", None),
        ("7:half", None),
        (None, None),
    ],
)
def test_an_engines_label_is_taken_apart(label: object, made_by: GatewayVersion | None) -> None:
    assert dialect.made_by(label) == made_by


def test_what_a_replica_can_have_held_has_no_floor_while_it_goes_back() -> None:
    fleet = fleet_of(told("a", version=3))
    member, admitted = fleet.members["a"], GatewayVersion(3, "run", "ab")
    visit = Visit(member)
    visit.let_in(admitted, VersionBounds())
    fleet.tell([replace(told("a", FleetState.DRAINING, version=3), next=GatewayVersion(1, "run"))])
    assert visit.bounds() == (GatewayVersion(1, "run"), admitted)
    fleet.tell([told("a", version=1)])
    fleet.tell([told("a", version=5)])
    fleet.tell([told("a", version=4)])
    assert [each.version for each in visit.bounds() if each] == [1, 5]
    later = Visit(member)
    later.let_in(GatewayVersion(4, "run", "ab"), VersionBounds())
    assert later.bounds() == (GatewayVersion(4, "run", "ab"), GatewayVersion(4, "run", "ab"))
    visit.end()
    fleet.tell([told("a", version=9)])
    assert [each.version for each in visit.bounds() if each] == [1, 5]


def test_what_a_gate_was_asked_for_bounds_what_it_let_tokens_of() -> None:
    fleet, admitted = fleet_of(told("a", version=3)), GatewayVersion(3, "run", "ab")
    asked = (VersionBounds(version=3), VersionBounds(min_version=2), VersionBounds(lineage="run"), VersionBounds())
    visits = [Visit(fleet.members["a"]) for _ in asked]
    for visit, accepted in zip(visits, asked, strict=True):
        visit.let_in(admitted, accepted)
    fleet.tell([replace(told("a", FleetState.DRAINING, version=3), next=GatewayVersion(1, "run"))])
    fleet.tell([told("a", version=5)])
    fleet.tell([told("a", version=2, lineage="another")])
    found = [[each.version for each in visit.bounds() if each] for visit in visits]
    assert found == [[3, 3], [3, 5], [1, 5], [1, 5]]
    lineages = [{each.lineage for each in visit.bounds() if each} for visit in visits]
    assert lineages == [{"run"}, {"run"}, {"run"}, {"run"}]
    fleet.tell([told("a", version=0, lineage="another")])
    assert [each.version for each in visits[2].bounds() if each] == [1, 5]
    assert [each.version for each in visits[3].bounds() if each] == [0, 5]


def test_a_late_word_is_no_news_and_another_run_is() -> None:
    fleet = fleet_of(told("a", version=2))
    visit = Visit(fleet.members["a"])
    visit.let_in(GatewayVersion(3, "run", "cd"), VersionBounds())
    assert visit.bounds() == (GatewayVersion(3, "run", "cd"), GatewayVersion(3, "run", "cd"))
    fleet.tell([told("a", version=1, lineage="another")])
    assert visit.bounds() == (GatewayVersion(1, "another", "ab"), GatewayVersion(3, "run", "cd"))


@pytest.mark.parametrize("heard", ["before", "after"])
def test_a_late_word_of_the_run_before_is_no_news_whatever_its_number(heard: str) -> None:
    """The gate holds the first version of a new run before the manager's word of that comes here."""
    fleet = fleet_of(told("a", version=4, lineage="run before"))
    first = GatewayVersion(0, "run", "ab")
    installs = replace(told("a", FleetState.DRAINING, version=4, lineage="run before"), next=first, mode="keep")
    if heard == "before":
        fleet.tell([installs])
    visit = Visit(fleet.members["a"])
    visit.let_in(first, VersionBounds())
    fleet.tell([installs])
    assert visit.bounds() == (first, first)
    fleet.tell([told("a", version=0)])
    assert visit.bounds() == (first, first)
    fleet.tell([told("a", version=9, lineage="another")])
    assert visit.bounds() == (first, GatewayVersion(9, "another", "ab"))


def test_a_label_says_more_than_a_number_and_less_than_the_manager() -> None:
    fleet = fleet_of(told("a"))
    member = fleet.members["a"]
    assert member.identify(GatewayVersion(3)) == GatewayVersion(3, "run", "ab")
    assert member.identify(GatewayVersion(3, "run", "a")) == GatewayVersion(3, "run", "ab")
    assert member.identify(GatewayVersion(3, "other", "a")) == GatewayVersion(3, "other", "a")
    assert member.identify(GatewayVersion(3, "run", "cd")) == GatewayVersion(3, "run", "cd")
    assert member.identify(GatewayVersion(9)) == GatewayVersion(9)
