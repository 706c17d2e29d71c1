"""Which relays bring a version: small clusters with a known answer, and many drawn ones in which promises must hold."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from ckpt_engine.core.placements import Origin, Placements, Station, as_reader, placements
from ckpt_engine.core.problems import precondition
from ckpt_engine.core.reach import Distance
from ckpt_engine.core.topology import Choice
from ckpt_engine.v1.weights_pb2 import Gpu, Host


def choose(source: Host, transport: str, worker: Host, available: Sequence[str]) -> Choice:
    """Memory of one host, and a network between those that have an address."""
    if transport not in available:
        raise precondition(f"{worker.name} cannot use {transport}")
    if transport == "file":
        shared = source.boot_id != worker.boot_id
        return Choice(transport, "", Distance.SHARED_FILE if shared else Distance.FILE)
    if transport == "memory" and source.boot_id != worker.boot_id:
        raise precondition(f"{source.name} and {worker.name} are two hosts")
    if transport != "memory" and not source.address:
        raise precondition(f"{source.name} has no address")
    return Choice(transport, "", Distance.HOST_MEMORY if transport == "memory" else Distance.NETWORK)


def host(name: str, address: str = "somewhere") -> Host:
    return Host(boot_id=name, name=name, address=address)


def rank(number: int, on: str) -> Origin:
    return Origin(f"rank {number}", host(on), (frozenset({"memory"}),))


def relay(name: str, on: str, reads: str = "memory", lends: bool = True, address: str = "x") -> Station:
    return Station(name, host(on, address), tuple(reads.split()), lends)


def placed(
    origins: Sequence[Origin], relays: Sequence[Station], wanted: str, holding: str = "", same: bool = False
) -> Placements:
    """same: every source has all of the version."""
    names = [origin.name for origin in origins]
    parts = [frozenset(names)] if same else [frozenset({name}) for name in names]
    held = {name: frozenset(names) for name in holding.split()}
    return placements(origins, parts, relays, wanted.split(), held, choose)


def test_relays_of_the_trainers_host_read_the_trainer() -> None:
    found = placed([rank(0, "A"), rank(1, "A")], [relay("a", "A"), relay("a2", "A")], "a a2")
    for name in ("a", "a2"):
        place = found.by_relay[name]
        assert (place.sources, place.origins, place.children) == (("rank 0", "rank 1"), (), ())
    assert not found.unreached


def test_a_relay_of_the_trainers_host_is_an_origin_for_others() -> None:
    found = placed([rank(0, "A")], [relay("a", "A"), relay("b", "B"), relay("c", "C"), relay("d", "D")], "b c")
    assert set(found.by_relay) == {"a", "b", "c"}, "no replica waits for d"
    a, b = found.by_relay["a"], found.by_relay["b"]
    assert (a.sources, a.children, a.within) == (("rank 0",), ("b", "c"), ())
    assert (b.sources, b.origins, b.lacks) == ((), ("a",), ())


def test_no_relay_is_filled_for_others_alone_where_one_with_replicas_can_be_asked() -> None:
    found = placed([rank(0, "A")], [relay("a0", "A"), relay("a1", "A"), relay("b", "B")], "a1 b")
    assert set(found.by_relay) == {"a1", "b"}
    assert found.by_relay["b"].origins == ("a1",)
    assert found.by_relay["a1"].children == ("b",)


def test_children_are_spread_over_origins() -> None:
    far = [relay(f"far{number}", f"H{number}") for number in range(6)]
    found = placed([rank(0, "A")], [relay("a", "A"), relay("b", "A"), *far], "a b " + " ".join(r.name for r in far))
    assert [len(found.by_relay[name].children) for name in "ab"] == [3, 3]


def test_a_trainer_on_two_hosts_has_two_origins() -> None:
    found = placed([rank(0, "A"), rank(1, "B")], [relay("a", "A"), relay("b", "B"), relay("c", "C")], "c")
    assert [found.by_relay[name].within for name in "abc"] == [("rank 0",), ("rank 1",), ()]
    assert set(found.by_relay["c"].origins) == {"a", "b"}
    assert not any(found.by_relay[name].lacks for name in "abc")


def test_relays_with_replicas_on_both_hosts_of_a_trainer_give_each_other_what_they_have() -> None:
    found = placed([rank(0, "A"), rank(1, "B")], [relay("a", "A"), relay("b", "B"), relay("c", "C")], "a b c")
    a, b, c = (found.by_relay[name] for name in "abc")
    assert (a.sources, a.origins, a.within) == (("rank 0",), ("b",), ("rank 0",))
    assert (b.sources, b.origins, b.within) == (("rank 1",), ("a",), ("rank 1",))
    assert set(c.origins) == {"a", "b"}
    assert [each.lacks for each in (a, b, c)] == [(), (), ()]


def test_equal_sources_need_one_relay_only() -> None:
    found = placed([rank(0, "A"), rank(1, "B")], [relay("a", "A"), relay("c", "C")], "c", same=True)
    assert (found.by_relay["c"].origins, found.by_relay["c"].lacks) == (("a",), ())


def test_what_no_relay_brings_is_named() -> None:
    found = placed([rank(0, "A"), rank(1, "B")], [relay("a", "A"), relay("c", "C")], "c")
    assert found.by_relay["c"].lacks == ("rank 1",)


def test_files_that_another_host_may_have_are_the_last_resort() -> None:
    files = Origin("rank 0", host("A"), (frozenset({"file"}),))
    found = placed([files], [relay("a", "A", "memory file"), relay("b", "B", "memory file")], "b")
    assert (found.by_relay["b"].origins, found.by_relay["b"].sources) == (("a",), ("rank 0",))
    found = placed([files], [relay("b", "B", "memory file")], "b")
    assert (found.by_relay["b"].origins, found.by_relay["b"].sources) == ((), ("rank 0",))
    assert not found.by_relay["b"].lacks


def test_what_is_held_is_asked_for_and_not_filled() -> None:
    found = placed([rank(0, "A")], [relay("a", "A"), relay("b", "B"), relay("c", "C")], "b c", holding="b")
    assert set(found.by_relay) == {"c"}
    assert (found.by_relay["c"].origins, dict(found.held)) == (("b",), {"b": ()})


def test_a_relay_does_not_fill_itself() -> None:
    held = Origin("c", host("C"), (frozenset({"memory"}),))
    found = placed([held], [relay("c", "C")], "c")
    assert not found.by_relay
    assert "c" in found.unreached


@pytest.mark.parametrize(
    ("relays", "words"),
    [
        ([relay("b", "B")], ("start a relay on host A", "ckpt-engine relay", "are two hosts")),
        (
            [relay("a", "A", reads="wire"), relay("b", "B")],
            ("a runs on the host of the weights and cannot read them", "a cannot read over memory"),
        ),
        ([relay("a", "A", lends=False), relay("b", "B")], ("can ask no relay", "a lends nothing", "--listen")),
        ([relay("a", "A", address=""), relay("b", "B")], ("a: ", "no address")),
    ],
)
def test_what_no_relay_reaches_is_told_what_to_start(relays: list[Station], words: tuple[str, ...]) -> None:
    found = placed([rank(0, "A")], relays, "b")
    assert not found.by_relay
    for word in words:
        assert word in found.unreached["b"]


def test_a_relay_reads_any_gpu_of_its_host_that_has_weights() -> None:
    source = Host(boot_id="A", gpus=[Gpu(uuid=b"1" * 16)])
    assert as_reader(host("A"), source).gpus == source.gpus
    assert not as_reader(host("B"), source).gpus


@pytest.mark.parametrize("seed", range(60))
def test_of_any_cluster(seed: int) -> None:
    """A relay with a way gets what its way has; none is filled for nothing, and an origin has what it is asked for."""
    dice = random.Random(seed)
    hosts = [chr(65 + number) for number in range(dice.randint(1, 6))]
    origins = [rank(number, dice.choice(hosts)) for number in range(dice.randint(1, 4))]
    relays = [
        relay(f"r{number}", dice.choice(hosts), lends=dice.random() < 0.7, address=dice.choice(("", "x", "x", "x")))
        for number in range(dice.randint(1, 8))
    ]
    names = [each.name for each in relays]
    wanted = [name for name in names if dice.random() < 0.5]
    holding = {name: frozenset(origin.name for origin in origins) for name in names if dice.random() < 0.15}
    made = [frozenset(each.name for each in dice.sample(origins, dice.randint(1, len(origins)))) for _ in range(3)]
    found = placements(origins, made, relays, wanted, holding, choose)
    by_name = {each.name: each for each in relays}
    everything = set(range(len(made)))

    def direct(name: str) -> set[int]:
        near = {each.name for each in origins if each.host.boot_id == by_name[name].host.boot_id}
        return {number for number, part in enumerate(made) if not part.isdisjoint(near)}

    def has(name: str) -> set[int]:
        return everything if name in holding else direct(name)

    for name in wanted:
        assert (name in found.by_relay) + (name in found.unreached) + (name in holding) == 1
    for name, place in found.by_relay.items():
        assert name in wanted or place.children, "filled for nothing"
        askable = [other for other in names if other != name and by_name[other].lends and by_name[other].host.address]
        for other in place.origins:
            assert other in askable
            assert has(other) - direct(name), "it has nothing that is missing"
            assert other in holding or name in found.by_relay[other].children
        got = direct(name).union(*(has(other) for other in place.origins))
        if name in wanted:
            assert got == direct(name).union(*(has(other) for other in askable)), "another relay has more"
            assert set(place.lacks) == {min(made[number]) for number in everything - got}
        covered = {number for number, part in enumerate(made) if not part.isdisjoint(place.within)}
        assert not place.within or covered >= direct(name), "it holds what it gets"


def test_whether_relays_can_be_asked_is_looked_up_only_for_those_that_have_something() -> None:
    looked_up: list[str] = []

    def count(source: Host, transport: str, worker: Host, available: Sequence[str]) -> Choice:
        if transport == "tcp":
            looked_up.append(source.name)
        return choose(source, transport, worker, available)

    relays = [relay(f"r{number:03}", f"H{number}") for number in range(100)]
    found = placements([rank(0, "H0")], [frozenset({"rank 0"})], relays, [each.name for each in relays], {}, count)
    assert not found.unreached
    assert looked_up == ["H0"] * 99
