"""Damaged input from every wire: a reason comes back, or nothing; never a crash."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz.targets import TARGETS, Target, inputs, refused

EACH = 400


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_what_honest_processes_send_is_taken(target: Target) -> None:
    """Else what is made of it would be refused at the door, and reach nothing behind it."""
    for seed in target.seeds:
        with target.open() as take:
            assert not refused(take, seed), seed


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_damaged_messages(target: Target) -> None:
    stream = inputs(target, random.Random(target.name))
    count = 0
    while count < EACH:
        with target.open() as take:
            for _ in range(target.lives):
                data = next(stream)
                try:
                    refused(take, data)
                except Exception as error:
                    raise AssertionError(f"{target.name}, input {data!r}") from error
                count += 1


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_any_bytes(target: Target) -> None:
    with target.open() as take:

        @settings(max_examples=100, deadline=None, database=None)
        @given(st.binary(max_size=200))
        def holds(data: bytes) -> None:
            refused(take, data)

        holds()
