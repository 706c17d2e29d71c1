"""Damaged input from every wire: a reason comes back, or nothing; never a crash."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_engine.core.manifest import canonical
from ckpt_engine.v1 import manager_pb2, weights_pb2, worker_pb2
from tests.fuzz.nodes import MESSAGES
from tests.fuzz.seeds import ARENA, SAID, install_order, sealed_record, table
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


CROWD = manager_pb2.TrainerMessage(hello=SAID[manager_pb2.TrainerMessage][0].hello)
CROWD.hello.world_size = (1 << 32) - 1
ODD_ROOT = worker_pb2.NodeMessage.FromString(MESSAGES[0])
ODD_ROOT.workers[0].identity.root = b"short"
WIDE, FLAT = table(), sealed_record()
WIDE.tensors[0].shape[:] = [1 << 61] * 300_000
FLAT.manifest.tensors[0].shape[:] = [1 << 61, 1 << 61, 0]
HUGE = b'{"a":{"dtype":"F32","shape":[%b],"data_offsets":[0,16]}}' % b",".join([b"2305843009213693952"] * 300_000)
BROKE_ONCE = {
    "tables": canonical(WIDE),
    "sealed records": canonical(FLAT),
    "configs": b"[" * 100_000,
    "safetensors": len(HUGE).to_bytes(8, "little") + HUGE + bytes(16),
    "prepare orders": worker_pb2.PrepareOrder(
        manifest=canonical(FLAT.manifest), deadline_seconds=1.0
    ).SerializeToString(),
    "node messages": ODD_ROOT.SerializeToString(),
    "trainer messages": CROWD.SerializeToString(),
    "regions": weights_pb2.Region(
        id=1, transport="file", size=9, locator=weights_pb2.FileLocator(path="a\0b").SerializeToString()
    ).SerializeToString(),
    "install orders": install_order().replace(ARENA.region(7).locator, b"\xff" * len(ARENA.region(7).locator)),
}
"""What fuzzing has found: a run of four billion ranks, a path with a zero byte, a locator that is no message; and what
reading has: a far worker's identity that no state word can hold, shapes whose product takes half a minute or more than
torch's numbers, JSON as deep as it is long."""


@pytest.mark.parametrize("name", BROKE_ONCE)
def test_what_broke_a_reader_once(name: str) -> None:
    target = next(target for target in TARGETS if target.name == name)
    assert BROKE_ONCE[name] not in target.seeds
    with target.open() as take:
        refused(take, BROKE_ONCE[name])
