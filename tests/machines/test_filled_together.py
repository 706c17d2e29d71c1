"""Which relays are told to pass on to each other, and which are filled as ever."""

from __future__ import annotations

from dataclasses import replace

from ckpt_engine.core.manifest import DIGEST_FORMAT
from ckpt_engine.core.relay_routes import Route
from ckpt_engine.core.version import Fence
from ckpt_engine.machines.events import Peer
from ckpt_engine.machines.manager.members import Holder, Members
from ckpt_engine.machines.manager.relay_filling import PlannedFilling, SharedFilling, filled_together
from ckpt_engine.v1 import manager_pb2, weights_pb2

FENCE = Fence("cluster", 7)
ROUTE = Route(1, (), upstream=("relay t",), transports=("tcp",))
NEEDS = (b"rank 0", b"rank 1")


def relay(name: str, session: str = "1", address: str = "10.0.0.1", passes_on: bool = True) -> Holder:
    told = manager_pb2.Filling(lends=["tcp"])
    if passes_on:
        told.passes_on.CopyFrom(weights_pb2.Region(transport="tcp", locator=name.encode()))
    host = weights_pb2.Host(boot_id=name, address=address)
    return Holder("relay", name, session, host, Peer(name), 0.0, (), told)


def together(
    *relays: Holder, needs: dict[str, tuple[bytes, ...]] | None = None, routes: dict[str, Route] | None = None
) -> SharedFilling:
    def command(filling: PlannedFilling) -> manager_pb2.FillRelay:
        wanted = (needs or {}).get(filling.relay, NEEDS)
        return manager_pb2.FillRelay(needs=[manager_pb2.BlobRef(digest=each) for each in wanted])

    fillings = [PlannedFilling(each.source, ("replica",), (routes or {}).get(each.source, ROUTE)) for each in relays]
    return filled_together(fillings, {each.source: each for each in relays}, command, FENCE)


A, B, C = relay("a"), relay("b"), relay("c")


def test_two_are_enough_and_one_is_not() -> None:
    assert not together(A).orders
    found = together(A, B)
    assert found.orders.keys() == {"relay a", "relay b"}
    assert found.why["relay a"] == "it is filled along with 1 other, and reads relay b meanwhile"
    assert [peer.region.locator for peer in found.orders["relay a"].peers] == [b"b"]


def test_who_is_to_bring_something_else_is_filled_apart() -> None:
    found = together(A, B, C, needs={"relay c": (b"rank 0",)})
    assert found.orders.keys() == {"relay a", "relay b"}


def test_who_reads_its_own_host_or_brings_a_part_first_is_filled_as_ever() -> None:
    near = Route(0, ("rank 0",))
    first = replace(ROUTE, ahead=True)
    assert not together(A, B, C, routes={"relay b": near, "relay c": first}).orders


def test_who_cannot_pass_on_is_filled_as_ever() -> None:
    lost = relay("b")
    lost.peer = None
    for other in (relay("b", passes_on=False), relay("b", address="127.0.0.1"), relay("b", address=""), lost):
        assert not together(A, other).orders


def test_who_reads_over_another_network_says_so() -> None:
    ucx = replace(ROUTE, transports=("ucx",))
    found = together(A, B, routes={"relay a": ucx, "relay b": ucx})
    assert not found.orders
    assert found.why["relay b"] == "a relay that reads over ucx passes nothing on meanwhile"


def slowed(name: str, fillings: int = 2) -> Holder:
    """One that has sent a tenth of what the others do in its last fillings."""
    found = relay(name)
    for epoch in range(1, fillings + 1):
        found.words.note(filled(epoch, 1e8))
        # In the middle of it little was known.
        found.words.note(manager_pb2.RelayPassedOn(fence=fence(epoch), sent=rate(1e7)))
    return found


def usual(name: str) -> Holder:
    found = relay(name)
    found.words.note(filled(1, 1e8))
    return found


def filled(epoch: int, sent: float) -> manager_pb2.RelayFilled:
    return manager_pb2.RelayFilled(fence=fence(epoch), sent=rate(sent))


def fence(epoch: int) -> weights_pb2.Fence:
    return weights_pb2.Fence(cluster="cluster", epoch=epoch)


def rate(per_second: float) -> manager_pb2.Rate:
    return manager_pb2.Rate(bytes_per_second=per_second, seconds=2.0)


def asked(found: SharedFilling) -> set[str]:
    """Who passes on to anybody."""
    return {order.peers[each].relay for order in found.orders.values() for tree in order.trees for each in tree.ask}


def test_who_has_been_slow_passes_nothing_on_and_it_is_said() -> None:
    others = [usual("a"), usual("b"), usual("c")]
    assert asked(together(*others, slowed("d", 1))) == {"relay a", "relay b", "relay c", "relay d"}
    found = together(*others, slowed("d"))
    assert asked(found) == {"relay a", "relay b", "relay c"}
    assert all(tree.ask for tree in found.orders["relay d"].trees), "it reads nobody who holds the version"
    assert found.why["relay d"] == (
        "it is filled along with 3 others, and reads relay a, relay b, relay c meanwhile, but passes nothing on: it "
        "sent 10 MB/s at most in each of the last 2 fillings in which that was measured, and relays usually do 100 MB/s"
    )
    assert "passes nothing on" not in found.why["relay a"]


def test_a_rate_that_cannot_be_counts_for_nothing() -> None:
    found = relay("a")
    for epoch, wrong in enumerate((0.0, -1.0, float("inf"), float("nan"))):
        found.words.note(filled(epoch, wrong))
    assert not found.words.measured.sent


def test_another_process_under_a_name_is_not_slow() -> None:
    members = Members("cluster")

    def hello(session: str) -> Holder:
        told = manager_pb2.HolderHello(
            digest_format=DIGEST_FORMAT, kind="relay", name="d", session_id=session, filling=manager_pb2.Filling()
        )
        found, _ = members.hello(Peer(session), told, 0.0)
        members.lose(Peer(session))
        assert isinstance(found, Holder)
        return found

    hello("1").words = slowed("d").words
    assert hello("1").words.measured.sent
    assert not hello("2").words.measured.sent


def test_a_relay_that_started_again_is_another_one() -> None:
    before, after = together(A, B), together(relay("a", session="2"), B)
    assert before.orders["relay b"].plan != after.orders["relay b"].plan
    assert together(A, B).orders == before.orders
