"""Which relays are told to pass on to each other, and which are filled as ever."""

from __future__ import annotations

from dataclasses import replace

from ckpt_engine.core.relay_routes import Route
from ckpt_engine.machines.events import Peer
from ckpt_engine.machines.manager.fan_out import Together, filled_together
from ckpt_engine.machines.manager.filling import Filling
from ckpt_engine.machines.manager.members import Holder
from ckpt_engine.v1 import manager_pb2, weights_pb2

FENCE = weights_pb2.Fence(cluster="cluster", epoch=7)
ROUTE = Route(1, (), upstream=("relay t",), over=("tcp",))
NEEDS = (b"rank 0", b"rank 1")


def relay(name: str, session: str = "1", address: str = "10.0.0.1", passes_on: bool = True) -> Holder:
    told = manager_pb2.Filling(lends=["tcp"])
    if passes_on:
        told.passes_on.CopyFrom(weights_pb2.Region(transport="tcp", locator=name.encode()))
    host = weights_pb2.Host(boot_id=name, address=address)
    return Holder("relay", name, session, host, Peer(name), 0.0, (), told)


def together(
    *relays: Holder, needs: dict[str, tuple[bytes, ...]] | None = None, routes: dict[str, Route] | None = None
) -> Together:
    def command(filling: Filling) -> manager_pb2.FillRelay:
        wanted = (needs or {}).get(filling.relay, NEEDS)
        return manager_pb2.FillRelay(needs=[manager_pb2.BlobRef(digest=each) for each in wanted])

    fillings = [Filling(each.source, ("replica",), (routes or {}).get(each.source, ROUTE)) for each in relays]
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
    ucx = replace(ROUTE, over=("ucx",))
    found = together(A, B, routes={"relay a": ucx, "relay b": ucx})
    assert not found.orders
    assert found.why["relay b"] == "who reads over ucx passes nothing on meanwhile"


def test_a_relay_that_started_again_is_another_one() -> None:
    before, after = together(A, B), together(relay("a", session="2"), B)
    assert before.orders["relay b"].plan != after.orders["relay b"].plan
    assert together(A, B).orders == before.orders
