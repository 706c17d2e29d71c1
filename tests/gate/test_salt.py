"""The salt of requests: a pure function of the page and of what the caller gave."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ckpt_engine.gate.page import EnginePage
from ckpt_engine.gate.salt import CacheSalt

CALLERS = [None, "mine", "another's", "\ud800"]


@pytest.fixture
def page(tmp_path: Path) -> EnginePage:
    page = EnginePage(tmp_path / "page")
    for rank in range(2):
        page.claim(rank, 2)
    return page


def test_before_any_update_over_kept_caches_the_callers_salt_is_the_salt(page: EnginePage) -> None:
    assert [CacheSalt(page).of(own) for own in CALLERS] == CALLERS


def test_each_such_update_begins_salts_that_never_were(page: EnginePage) -> None:
    """Also what the caller left out or gave itself is another one each time, and separates still."""
    salt, seen = CacheSalt(page), set(CALLERS)
    for _ in range(300):
        page.keep_caches()
        found = [salt.of(own) for own in CALLERS]
        assert found == [salt.of(own) for own in CALLERS], "requests of one time share what they share"
        assert not seen & {*found}
        seen |= {*found}
    assert len(seen) == 301 * len(CALLERS)


def test_vllm_takes_it_as_a_salt(page: EnginePage) -> None:
    """At most 128 characters, none of which may mean anything to a store of files or keys."""
    page.keep_caches()
    for own in (*CALLERS, "x" * 128):
        found = CacheSalt(page).of(own)
        assert found is not None
        assert len(found) == 64
        assert found.isalnum()


def test_no_salt_and_an_empty_one_are_the_same(page: EnginePage) -> None:
    page.keep_caches()
    assert CacheSalt(page).of("") == CacheSalt(page).of(None)


def test_all_api_servers_of_an_engine_agree(page: EnginePage) -> None:
    early = CacheSalt(page)
    early.of("mine")
    page.keep_caches()
    late = CacheSalt(EnginePage(page.path))
    assert early.of("mine") == late.of("mine")
    assert json.dumps(late.of("mine")), "it can be sent"


def test_another_start_of_the_engine_has_salts_of_its_own(page: EnginePage) -> None:
    """Blocks can outlive it in a store; here it even starts again over the same page."""
    page.keep_caches()
    before = CacheSalt(page).of("mine")
    page.claim(1, 2)
    assert page.caches_kept() == 1
    assert CacheSalt(page).of("mine") != before
