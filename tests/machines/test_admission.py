"""Which job has which holder when several want the same ones."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ckpt_engine.core.version import Version
from ckpt_engine.machines.manager.admission import Admission, Claim

OLD, NEW = Version("run", 1, b"old"), Version("run", 2, b"new")


def fills(names: str, keeps: Version | None = None, brings: Version = NEW) -> Claim:
    relays = frozenset(names)
    return Claim(relays, relays, keeps, brings, relays)


def reads(names: str, identity: Version = OLD, doubles: str = "") -> Claim:
    return Claim(reads=identity, sources=frozenset(names), doubles=frozenset(doubles))


def begun(*numbers: int) -> Admission:
    """Jobs that have nothing yet."""
    admission = Admission()
    for number in numbers:
        admission.begin(number, Claim())
    return admission


def test_what_was_asked_for_first_is_granted_first() -> None:
    admission = begun(1, 2, 3, 4)
    assert admission.ask(1, fills("a"))
    assert not admission.ask(2, fills("ab"))
    assert not admission.ask(3, fills("b"))  # no job has it, and 2 has asked for it before
    assert admission.ask(4, fills("c"))
    assert [admission.in_the_way(number) for number in (2, 3)] == [[1], [2]]
    admission.end(1)
    assert not admission.ask(3, fills("b"))
    assert admission.ask(2, fills("ab"))
    admission.end(2)
    assert admission.ask(3, fills("b"))


def test_a_job_that_waits_has_nothing() -> None:
    """Two jobs that each read what the other one is to fill: the one that began first goes first."""
    admission = Admission()
    admission.begin(1, Claim(frozenset("a"), reads=OLD, sources=frozenset("a")))
    admission.begin(2, Claim(frozenset("b"), reads=OLD, sources=frozenset("b")))
    assert not admission.ask(1, fills("ab", brings=OLD))
    assert not admission.ask(2, fills("ab", brings=OLD))
    assert admission.granted[1] == admission.granted[2] == Claim()
    assert admission.ask(1, fills("ab", brings=OLD))
    assert admission.in_the_way(2) == [1]


def test_filling_overwrites_what_it_is_not_told_to_keep() -> None:
    admission = begun(1, 2)
    admission.begin(3, reads("a"))
    assert not admission.ask(1, fills("a"))
    assert not admission.ask(1, fills("a", keeps=NEW))
    assert admission.ask(1, fills("a", keeps=OLD))
    admission.begin(4, Claim())
    assert not admission.ask(4, reads("a", NEW)), "it is being filled with that"
    assert admission.ask(4, reads("a", OLD))


def test_filling_what_holds_a_version_twice_overwrites_one_of_the_two() -> None:
    admission = begun(1)
    admission.begin(2, reads("ab", doubles="b"))
    assert not admission.ask(1, fills("ab", keeps=OLD))
    assert admission.ask(1, fills("a", keeps=OLD))
    assert admission.blocked(1, OLD) == {"b"}
    assert admission.blocked(1, NEW) == {"a", "b"}


def test_what_is_told_to_holders_is_of_one_job_at_a_time() -> None:
    admission = begun(1)
    assert admission.ask(1, fills("a"))
    digests = Claim(frozenset("ab"), reads=OLD, sources=frozenset("ab"))
    assert not admission.lets(digests)
    admission.only_reads(1)
    assert admission.lets(digests)
    admission.begin(2, digests)
    assert admission.obeyed("ab") == 2
    assert not admission.lets(digests)
    for number in (1, 2):
        admission.end(number)
    assert admission.obeyed("ab") == 0


def test_a_call_keeps_its_ticket_when_it_begins() -> None:
    admission = begun(1, 2, 3)
    assert admission.ask(1, fills("a"))
    admission.reserve({-1: reads("a")})
    admission.end(1)
    assert not admission.ask(2, fills("a"))
    assert admission.in_the_way(2) == [-1]
    assert not admission.lets(fills("a"))
    assert admission.lets(reads("a"), -1)
    admission.begin(4, reads("a"), -1)
    assert not admission.ask(2, fills("a"))
    assert admission.ask(4, fills("a")), "its ticket is older than that of 2"
    admission.end(4)
    admission.reserve({-2: reads("a")})
    admission.reserve({})
    assert admission.ask(2, fills("a"))


CLAIMS = st.builds(
    Claim,
    orders=st.frozensets(st.sampled_from("abc")),
    keeps=st.sampled_from([None, OLD, NEW]),
    reads=st.sampled_from([OLD, NEW]),
    sources=st.frozensets(st.sampled_from("abc")),
    doubles=st.frozensets(st.sampled_from("abc")),
).map(lambda claim: Claim(claim.orders, claim.orders, claim.keeps, claim.reads, claim.sources, claim.doubles))


@given(st.lists(st.tuples(st.integers(0, 4), st.one_of(st.none(), CLAIMS)), max_size=30))
def test_nothing_granted_meets_and_some_job_can_always_go_on(steps: list[tuple[int, Claim | None]]) -> None:
    """So no jobs wait for each other in a circle. None: a job ends, and another one begins in its place."""
    admission = begun(*range(5))
    for number, claim in steps:
        if claim is None:
            admission.end(number)
            admission.begin(number, Claim())
        else:
            admission.ask(number, claim)
        granted = list(admission.granted.items())
        for place, (_, one) in enumerate(granted):
            assert not any(one.meets(other) for _, other in granted[place + 1 :])
        for waiting in admission.waiting:
            assert admission.granted[waiting] == Claim()
        if admission.waiting and not any(held != Claim() for held in admission.granted.values()):
            assert any(not admission.in_the_way(waiting) for waiting in admission.waiting)
