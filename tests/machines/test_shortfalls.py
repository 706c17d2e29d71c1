"""What is said of a replica whose relay has not brought all of a version: which relay, from whom, at which address."""

from __future__ import annotations

from ckpt_engine.core.placements import Placement
from ckpt_engine.machines.manager.members import Holder
from ckpt_engine.machines.manager.placing import PlacedFilling, shortfalls
from ckpt_engine.v1.manager_pb2 import RelayFilled
from ckpt_engine.v1.weights_pb2 import Host, Problem

HOLDERS = {"relay up": Holder("relay", "up", "s", Host(address="10.0.0.7"), None, 0.0)}
SEE = "it asks relay up at 10.0.0.7: see whether that runs and the network carries"


def filling(left_out: Problem | None = None, answer: RelayFilled | None = None) -> PlacedFilling:
    return PlacedFilling(
        "relay down",
        ("one",),
        Placement(origins=("relay up",)),
        answer=answer,
        exclusion=left_out,
    )


def said(found: PlacedFilling) -> str:
    return shortfalls([found], HOLDERS)["one"].message


def test_a_relay_that_is_left_out_is_named_with_those_that_it_reads() -> None:
    late = Problem(code=Problem.CODE_DEADLINE_EXCEEDED, message="it has not answered 25.0 s after the update began")
    assert said(filling(late)) == f"relay down: {late.message}; {SEE}"
    full = Problem(code=Problem.CODE_FAILED_PRECONDITION, message="relay down has 7 bytes")
    assert said(filling(full)) == full.message, "the network has nothing to do with it"


def test_what_a_relay_could_not_read_is_said_and_nothing_of_one_that_has_all() -> None:
    gone = Problem(code=Problem.CODE_UNAVAILABLE, message="relay up: the relay at 10.0.0.7:7010 is gone")
    lacks = RelayFilled(missing=[gone], missing_cells=3)
    assert said(filling(answer=lacks)) == f"relay down lacks 3 pieces of the version: {gone.message}; {SEE}"
    assert shortfalls([filling(answer=RelayFilled(table=b"whole"))], HOLDERS) == {}
    assert shortfalls([filling()], HOLDERS) == {}
