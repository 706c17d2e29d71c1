"""Which job has which holder when several want the same ones."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ckpt_engine.core.version import Version
from ckpt_engine.machines.manager.claims import Claim, Claims

OLD, NEW = Version("run", 1, b"old"), Version("run", 2, b"new")


def fills(names: str, keeps: Version | None = None, brings: Version = NEW) -> Claim:
    relays = frozenset(names)
    return Claim(relays, relays, keeps, brings, relays)


def reads(names: str, identity: Version = OLD, doubles: str = "") -> Claim:
    return Claim(reads=identity, sources=frozenset(names), doubles=frozenset(doubles))


def begun(*numbers: int) -> Claims:
    """Jobs that have nothing yet."""
    claims = Claims()
    for number in numbers:
        claims.begin(number, Claim())
    return claims


def test_what_was_asked_for_first_is_granted_first() -> None:
    claims = begun(1, 2, 3, 4)
    assert claims.ask(1, fills("a"))
    assert not claims.ask(2, fills("ab"))
    assert not claims.ask(3, fills("b"))  # no job has it, and 2 has asked for it before
    assert claims.ask(4, fills("c"))
    assert [claims.in_the_way(number) for number in (2, 3)] == [[1], [2]]
    claims.end(1)
    assert not claims.ask(3, fills("b"))
    assert claims.ask(2, fills("ab"))
    claims.end(2)
    assert claims.ask(3, fills("b"))


def test_a_job_that_waits_has_nothing() -> None:
    """Two jobs that each read what the other one is to fill: the one that began first goes first."""
    claims = Claims()
    claims.begin(1, Claim(frozenset("a"), reads=OLD, sources=frozenset("a")))
    claims.begin(2, Claim(frozenset("b"), reads=OLD, sources=frozenset("b")))
    assert not claims.ask(1, fills("ab", brings=OLD))
    assert not claims.ask(2, fills("ab", brings=OLD))
    assert claims.granted[1] == claims.granted[2] == Claim()
    assert claims.ask(1, fills("ab", brings=OLD))
    assert claims.in_the_way(2) == [1]


def test_filling_overwrites_what_it_is_not_told_to_keep() -> None:
    claims = begun(1, 2)
    claims.begin(3, reads("a"))
    assert not claims.ask(1, fills("a"))
    assert not claims.ask(1, fills("a", keeps=NEW))
    assert claims.ask(1, fills("a", keeps=OLD))
    claims.begin(4, Claim())
    assert not claims.ask(4, reads("a", NEW)), "it is being filled with that"
    assert claims.ask(4, reads("a", OLD))


def test_filling_what_holds_a_version_twice_overwrites_one_of_the_two() -> None:
    claims = begun(1)
    claims.begin(2, reads("ab", doubles="b"))
    assert not claims.ask(1, fills("ab", keeps=OLD))
    assert claims.ask(1, fills("a", keeps=OLD))
    assert claims.blocked(1, OLD) == {"b"}
    assert claims.blocked(1, NEW) == {"a", "b"}


def test_what_is_told_to_holders_is_of_one_job_at_a_time() -> None:
    claims = begun(1)
    assert claims.ask(1, fills("a"))
    digests = Claim(frozenset("ab"), reads=OLD, sources=frozenset("ab"))
    assert not claims.lets(digests)
    claims.only_reads(1)
    assert claims.lets(digests)
    claims.begin(2, digests)
    assert claims.obeyed("ab") == 2
    assert not claims.lets(digests)
    for number in (1, 2):
        claims.end(number)
    assert claims.obeyed("ab") == 0


def test_a_call_keeps_its_ticket_when_it_begins() -> None:
    claims = begun(1, 2, 3)
    assert claims.ask(1, fills("a"))
    claims.reserve({-1: reads("a")})
    claims.end(1)
    assert not claims.ask(2, fills("a"))
    assert claims.in_the_way(2) == [-1]
    assert not claims.lets(fills("a"))
    assert claims.lets(reads("a"), -1)
    claims.begin(4, reads("a"), -1)
    assert not claims.ask(2, fills("a"))
    assert claims.ask(4, fills("a")), "its ticket is older than that of 2"
    claims.end(4)
    claims.reserve({-2: reads("a")})
    claims.reserve({})
    assert claims.ask(2, fills("a"))


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
    claims = begun(*range(5))
    for number, claim in steps:
        if claim is None:
            claims.end(number)
            claims.begin(number, Claim())
        else:
            claims.ask(number, claim)
        granted = list(claims.granted.items())
        for place, (_, one) in enumerate(granted):
            assert not any(one.meets(other) for _, other in granted[place + 1 :])
        for waiting in claims.waiting:
            assert claims.granted[waiting] == Claim()
        if claims.waiting and not any(held != Claim() for held in claims.granted.values()):
            assert any(not claims.in_the_way(waiting) for waiting in claims.waiting)
