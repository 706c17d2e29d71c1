"""Who fills from whom: small clusters with a known answer, and many drawn ones in which every promise must hold."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from ckpt_engine.core.problems import precondition
from ckpt_engine.core.reach import Distance
from ckpt_engine.core.relay_reach import Origin, Station, as_reader
from ckpt_engine.core.relay_routes import RelayRoutes, relay_routes
from ckpt_engine.core.topology import Choice
from ckpt_engine.v1.weights_pb2 import Gpu, Host


def choose(source: Host, transport: str, worker: Host, available: Sequence[str]) -> Choice:
    """Memory of one host, and wires between those that have an address; "w2" is another kind of network."""
    if transport not in available:
        raise precondition(f"{worker.name} cannot use {transport}")
    if transport == "file":
        shared = source.boot_id != worker.boot_id
        return Choice(transport, "", Distance.SHARED_FILE if shared else Distance.FILE)
    if transport == "memory" and source.boot_id != worker.boot_id:
        raise precondition(f"{source.name} and {worker.name} are two hosts")
    if transport != "memory" and not (source.address and worker.address):
        raise precondition(f"{source.name} has no address")
    return Choice(transport, "", Distance.HOST_MEMORY if transport == "memory" else Distance.NETWORK)


def host(name: str, address: str = "somewhere") -> Host:
    return Host(boot_id=name, name=name, address=address)


def rank(number: int, on: str) -> Origin:
    return Origin(f"rank {number}", host(on), (frozenset({"memory"}),))


def relay(name: str, on: str, reads: str = "memory wire", lends: str = "memory wire", address: str = "x") -> Station:
    return Station(name, host(on, address), tuple(reads.split()), frozenset(lends.split()))


def routed(
    origins: Sequence[Origin], relays: Sequence[Station], wanted: str, holding: str = "", same: bool = False
) -> RelayRoutes:
    """same: every source has all of the version."""
    names = [origin.name for origin in origins]
    parts = [frozenset(names)] if same else [frozenset({name}) for name in names]
    held = {name: frozenset(names) for name in holding.split()}
    return relay_routes(origins, parts, relays, wanted.split(), held, choose)


def test_relays_of_the_trainers_host_read_the_trainer() -> None:
    routes = routed([rank(0, "A"), rank(1, "A")], [relay("a", "A"), relay("a2", "A")], "a a2")
    for name in ("a", "a2"):
        route = routes.by_relay[name]
        assert (route.stage, route.sources, route.upstream, route.children) == (0, ("rank 0", "rank 1"), (), ())
    assert not routes.unreached


def test_a_relay_of_the_trainers_host_is_a_step_in_between() -> None:
    routes = routed([rank(0, "A")], [relay("a", "A"), relay("b", "B"), relay("c", "C"), relay("d", "D")], "b c")
    assert set(routes.by_relay) == {"a", "b", "c"}, "nobody waits for d"
    a, b = routes.by_relay["a"], routes.by_relay["b"]
    assert (a.stage, a.sources, a.children, a.feeds) == (0, ("rank 0",), ("b", "c"), ("b", "c"))
    assert (b.stage, b.sources, b.upstream, b.others) == (1, (), ("a",), ())


def test_nothing_in_between_is_filled_where_a_relay_with_replicas_can_be_read() -> None:
    routes = routed([rank(0, "A")], [relay("a0", "A"), relay("a1", "A"), relay("b", "B")], "a1 b")
    assert set(routes.by_relay) == {"a1", "b"}
    assert routes.by_relay["b"].upstream == ("a1",)
    assert routes.by_relay["a1"].feeds == ("b",)


def test_children_are_spread_and_have_alternates() -> None:
    far = [relay(f"far{number}", f"H{number}") for number in range(6)]
    routes = routed([rank(0, "A")], [relay("a", "A"), relay("b", "A"), *far], "a b " + " ".join(r.name for r in far))
    assert [len(routes.by_relay[name].children) for name in "ab"] == [3, 3]
    for each in far:
        route = routes.by_relay[each.name]
        assert set(route.upstream) | set(route.others) == {"a", "b"}
        assert len(route.upstream) == 1


def test_a_trainer_on_two_hosts_has_two_steps_in_between() -> None:
    routes = routed([rank(0, "A"), rank(1, "B")], [relay("a", "A"), relay("b", "B"), relay("c", "C")], "c")
    assert routes.by_relay["a"].lacks == ("rank 1",)
    assert [routes.by_relay[name].within for name in "abc"] == [("rank 0",), ("rank 1",), ()]
    assert routes.by_relay["c"].upstream == ("a", "b")
    assert (routes.by_relay["c"].stage, routes.by_relay["c"].lacks) == (1, ())


def test_a_relay_with_replicas_waits_for_the_rest_of_the_version() -> None:
    routes = routed([rank(0, "A"), rank(1, "B")], [relay("a", "A"), relay("b", "B"), relay("c", "C")], "a c")
    assert (routes.by_relay["a"].stage, routes.by_relay["a"].sources) == (1, ("rank 0",))
    assert routes.by_relay["a"].upstream == ("b",)
    assert routes.by_relay["a"].transports == (), "it reads a part of it on its host"
    assert routes.by_relay["c"].transports == ("wire",)
    assert (routes.by_relay["c"].stage, routes.by_relay["c"].upstream) == (2, ("a",))


def test_relays_with_replicas_on_both_hosts_of_a_trainer_give_each_other_what_they_have() -> None:
    routes = routed([rank(0, "A"), rank(1, "B")], [relay("a", "A"), relay("b", "B"), relay("c", "C")], "a b c")
    a, b, c = (routes.by_relay[name] for name in "abc")
    assert (a.sources, a.upstream, a.early, a.ahead) == (("rank 0",), ("b",), ("b",), True)
    assert (b.sources, b.upstream, b.early, b.ahead) == (("rank 1",), ("a",), ("a",), True)
    assert (a.stage, b.stage) == (1, 1)
    assert not a.lacks
    assert not b.lacks
    assert set(c.early) == set(c.upstream) == {"a", "b"}
    assert a.feeds == ("b", "c")


def test_equal_sources_need_one_relay_only() -> None:
    routes = routed([rank(0, "A"), rank(1, "B")], [relay("a", "A"), relay("c", "C")], "c", same=True)
    assert (routes.by_relay["c"].upstream, routes.by_relay["c"].lacks) == (("a",), ())


def test_what_nobody_brings_is_named() -> None:
    routes = routed([rank(0, "A"), rank(1, "B")], [relay("a", "A"), relay("c", "C")], "c")
    assert routes.by_relay["c"].lacks == ("rank 1",)


def test_a_relay_between_two_kinds_of_networks() -> None:
    relays = [relay("a", "A", lends="wire"), relay("b", "B", lends="w2"), relay("c", "C", reads="w2")]
    routes = routed([rank(0, "A")], relays, "c")
    assert [routes.by_relay[name].stage for name in "abc"] == [0, 1, 2]
    assert not any(routes.by_relay[name].within for name in "abc"), "all of it comes by way of each"
    assert routes.by_relay["a"].feeds == ("b", "c")


def test_files_that_another_host_may_have_are_the_last_resort() -> None:
    files = Origin("rank 0", host("A"), (frozenset({"file"}),))
    reads = "memory wire file"
    routes = routed([files], [relay("a", "A", reads), relay("b", "B", reads)], "b")
    assert (routes.by_relay["b"].upstream, routes.by_relay["b"].sources) == (("a",), ("rank 0",))
    assert routes.by_relay["b"].transports == ("wire",), "such files are no reason to be filled apart"
    routes = routed([files], [relay("b", "B", reads)], "b")
    assert routes.by_relay["b"].transports == ()
    assert (routes.by_relay["b"].stage, routes.by_relay["b"].sources) == (0, ("rank 0",))


def test_what_is_held_is_read_and_not_filled() -> None:
    routes = routed([rank(0, "A")], [relay("a", "A"), relay("b", "B"), relay("c", "C")], "b c", holding="b")
    assert set(routes.by_relay) == {"c"}
    assert (routes.by_relay["c"].stage, routes.by_relay["c"].upstream) == (1, ("b",))


def test_a_relay_does_not_fill_itself() -> None:
    held = Origin("c", host("C"), (frozenset({"memory", "wire"}),))
    routes = routed([held], [relay("c", "C")], "c")
    assert not routes.by_relay
    assert "c" in routes.unreached


@pytest.mark.parametrize(
    ("relays", "words"),
    [
        ([relay("b", "B")], ("start a relay on host A", "ckpt-engine relay", "are two hosts")),
        (
            [relay("a", "A", reads="wire"), relay("b", "B")],
            ("a runs on the host of the weights and cannot read them", "a cannot read over memory"),
        ),
        ([relay("a", "A", lends="memory"), relay("b", "B")], ("reads no relay", "a: ", "are two hosts")),
        ([relay("a", "A", address=""), relay("b", "B")], ("a: ", "no address")),
        (
            [relay("a", "A"), relay("b", "B", reads="memory")],
            ("b cannot read over wire (it can over memory)",),
        ),
    ],
)
def test_what_nobody_reaches_is_told_what_to_start(relays: list[Station], words: tuple[str, ...]) -> None:
    routes = routed([rank(0, "A")], relays, "b")
    assert not routes.by_relay
    for word in words:
        assert word in routes.unreached["b"]


def test_a_relay_reads_whichever_gpu_of_its_host_has_weights() -> None:
    source = Host(boot_id="A", gpus=[Gpu(uuid=b"1" * 16)])
    assert as_reader(host("A"), source).gpus == source.gpus
    assert not as_reader(host("B"), source).gpus


@pytest.mark.parametrize("seed", range(60))
def test_of_any_cluster(seed: int) -> None:
    """Whoever has a way gets what its way has; nobody is filled for nothing, waits for a later stage or for itself."""
    dice = random.Random(seed)
    hosts = [chr(65 + number) for number in range(dice.randint(1, 6))]
    origins = [rank(number, dice.choice(hosts)) for number in range(dice.randint(1, 4))]
    relays = [
        relay(
            f"r{number}",
            dice.choice(hosts),
            reads=dice.choice(("memory", "memory wire", "memory wire w2")),
            lends=dice.choice(("memory", "memory wire", "memory w2")),
            address=dice.choice(("", "x", "x", "x")),
        )
        for number in range(dice.randint(1, 8))
    ]
    names = [each.name for each in relays]
    wanted = [name for name in names if dice.random() < 0.5]
    holding = {name: frozenset(origin.name for origin in origins) for name in names if dice.random() < 0.15}
    made = [frozenset(each.name for each in dice.sample(origins, dice.randint(1, len(origins)))) for _ in range(3)]
    routes = relay_routes(origins, made, relays, wanted, holding, choose)
    by_name = {each.name: each for each in relays}

    def direct(name: str) -> set[int]:
        return {number for number, part in enumerate(made) if not part.isdisjoint(routes.by_relay[name].sources)}

    def has(name: str) -> set[int]:
        if name in holding:
            return set(range(len(made)))
        route = routes.by_relay[name]
        return direct(name).union(*(direct(each) if each in route.early else has(each) for each in route.upstream))

    for name in wanted:
        assert (name in routes.by_relay) + (name in routes.unreached) + (name in holding) == 1
    for name, route in routes.by_relay.items():
        assert name in wanted or route.children, "filled for nothing"
        for other in (*route.upstream, *route.others):
            assert other in holding or other in route.early or routes.by_relay[other].stage < route.stage
            assert other not in route.early or routes.by_relay[other].ahead
            for transport in sorted(by_name[other].lends):
                try:
                    choose(by_name[other].host, transport, by_name[name].host, by_name[name].reads)
                    break
                except Exception:
                    continue
            else:
                pytest.fail(f"{name} does not reach {other}")
        for other in route.upstream:
            assert other in holding or name in routes.by_relay[other].children
            assert other in holding or {name, *route.feeds} <= set(routes.by_relay[other].feeds)
        assert set(route.lacks) == {min(made[number]) for number in set(range(len(made))) - has(name)}
        assert bool(route.within) == (name not in wanted and bool(route.lacks))
        covered = {number for number, part in enumerate(made) if not part.isdisjoint(route.within)}
        assert not route.within or covered >= has(name), "it holds what it gets"
        assert not route.within or set(route.within) <= set().union(*(made[number] for number in has(name)))
        assert bool(route.stage) == bool(route.upstream)
