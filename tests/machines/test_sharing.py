"""Who has which holder when updates of several pools want the same ones."""

from __future__ import annotations

from ckpt_engine.machines.manager.sharing import Sharing


def begun(*numbers: int) -> Sharing:
    """Updates that have nothing yet."""
    sharing = Sharing()
    for number in numbers:
        sharing.begin(number, frozenset(), None)
    return sharing


def test_who_asked_first_is_served_first_and_waits_with_nothing_in_its_hands() -> None:
    sharing = begun(1, 2, 3, 4)
    assert sharing.ask(1, frozenset("a"))
    assert not sharing.ask(2, frozenset("ab"))
    assert not sharing.ask(3, frozenset("b"))  # nobody has it, and 2 has asked for it before
    assert sharing.ask(4, frozenset("c"))
    assert [sharing.in_the_way(number) for number in (2, 3)] == [[1], [2]]
    sharing.over(1)
    assert not sharing.ask(3, frozenset("b"))
    assert sharing.ask(2, frozenset("ab"))
    sharing.over(2)
    assert sharing.ask(3, frozenset("b"))


def test_an_update_shares_with_the_one_whose_installs_it_goes_on_beside() -> None:
    sharing = begun(1)
    assert sharing.ask(1, frozenset("a"))
    sharing.begin(2, frozenset(), 1)
    assert sharing.ask(2, frozenset("a"))
    assert sharing.taken(2) == set()


def test_what_is_read_from_the_beginning_is_nobody_elses() -> None:
    sharing = begun(1)
    assert sharing.ask(1, frozenset("a"))
    assert not sharing.lets(frozenset("ab"))
    sharing.begin(2, frozenset("b"), None)
    assert not sharing.ask(1, frozenset("b"))
    assert sharing.obeyed(frozenset("ab")) == 2
    for number in (1, 2):
        sharing.over(number)
    assert sharing.obeyed(frozenset("ab")) == 0


def test_whoever_has_something_passes_those_that_wait_for_it() -> None:
    sharing = Sharing()
    sharing.begin(1, frozenset("a"), None)
    sharing.begin(2, frozenset(), None)
    assert not sharing.ask(2, frozenset("ab"))
    assert sharing.ask(1, frozenset("b"))
    assert sharing.circle() == set()


def test_those_that_wait_for_what_they_have_are_a_circle() -> None:
    """Also by way of a third one; whoever only waits for one of them is not in it."""
    sharing = Sharing()
    for number, name in enumerate("abc"):
        sharing.begin(number, frozenset(name), None)
    sharing.begin(3, frozenset(), None)
    assert not any(sharing.ask(number, frozenset(name)) for number, name in ((0, "b"), (1, "c"), (3, "a")))
    assert sharing.circle() == set()
    assert not sharing.ask(2, frozenset("a"))
    assert sharing.circle() == {0, 1, 2}
    sharing.over(2)
    assert sharing.circle() == set()
    assert sharing.ask(1, frozenset("c"))


def test_whoever_is_to_begin_keeps_what_it_reads_from_those_that_ask_later() -> None:
    sharing = begun(1, 2)
    assert sharing.ask(1, frozenset("a"))
    sharing.reserve({-1: frozenset("a")})
    sharing.over(1)
    assert not sharing.ask(2, frozenset("a"))
    assert sharing.in_the_way(2) == [-1]
    assert not sharing.lets(frozenset("a"))
    assert sharing.lets(frozenset("a"), -1)
    sharing.reserve({})
    assert sharing.ask(2, frozenset("a"))


def test_what_replicas_only_read_may_be_read_by_others_and_filled_by_nobody() -> None:
    sharing = begun(1, 2)
    assert sharing.ask(1, frozenset("a"))
    assert not sharing.lets(frozenset("a"))
    sharing.reading.add(1)
    assert sharing.lets(frozenset("a"))
    sharing.begin(3, frozenset("a"), None)
    assert not sharing.lets(frozenset("a"))
    sharing.over(1)
    assert not sharing.ask(2, frozenset("a"))
    assert sharing.in_the_way(2) == [3]
