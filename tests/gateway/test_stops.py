"""Stop strings are found at the same place however a text is split."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ckpt_engine.gateway.stops import StopSearch

TEXTS = st.text("ab", max_size=24)
STOPS = st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=3)


def by_hand(text: str, stops: list[str]) -> tuple[str, str] | None:
    """The stop string that is complete first, and the answer before it; the slow way."""
    for end in range(1, len(text) + 1):
        for stop in stops:
            if text[:end].endswith(stop):
                return stop, text[: end - len(stop)]
    return None


@given(st.lists(TEXTS, max_size=8), STOPS, st.booleans())
def test_any_split_gives_the_same_cut_and_what_is_safe_was_never_more(
    parts: list[str], stops: list[str], keep: bool
) -> None:
    whole, search, read, safe = by_hand("".join(parts), stops), StopSearch(stops, keep), "", 0
    for part in parts:
        found = search.feed(part)
        read += part
        if found is not None:
            assert whole is not None
            answer = read[: len(read) - len(found.rest)]
            assert (found.stop, answer) == (whole[0], whole[1] + (whole[0] if keep else ""))
            assert safe <= len(answer), "something of the stop string was told"
            return
        assert search.safe >= safe
        safe = search.safe
    assert whole is None


@given(TEXTS, STOPS)
def test_all_is_safe_but_what_may_be_the_beginning_of_a_stop_string(text: str, stops: list[str]) -> None:
    search = StopSearch(stops)
    if search.feed(text) is None:
        held = text[search.safe :]
        assert held == "" or any(stop.startswith(held) for stop in stops)
        longer = [text[at:] for at in range(search.safe)]
        assert not any(stop.startswith(each) for stop in stops for each in longer)


def test_before_the_minimum_none_is_complete_but_one_may_begin() -> None:
    search = StopSearch(["ab"])
    assert search.feed("xabxa", may_end=False) is None
    assert search.safe == 4
    found = search.feed("bab")
    assert found is not None
    assert found.rest == "abab"


def test_a_copy_goes_on_by_itself() -> None:
    search = StopSearch(["abc"])
    search.feed("xab")
    other = search.copy()
    assert search.feed("d") is None
    found = other.feed("cd")
    assert found is not None
    assert (found.rest, other.length, search.length) == ("abcd", 5, 4)
