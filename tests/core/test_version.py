"""Versions and fences as values: equal as the wire's messages are, never changed, and back again without a loss."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest

from ckpt_engine.core.version import Fence, Version
from ckpt_engine.v1 import manager_pb2, weights_pb2

LONGEST = weights_pb2.Identity(lineage="run: ü\n", version=(1 << 63) - 1, root=b"\xff" * 32)
FIRST = weights_pb2.Identity(lineage="run", version=0, root=bytes(32))


@pytest.mark.parametrize("message", [LONGEST, FIRST, weights_pb2.Identity()])
def test_a_version_comes_back_as_the_message_that_it_was(message: weights_pb2.Identity) -> None:
    assert Version.of(message).message() == message


@pytest.mark.parametrize("message", [weights_pb2.Fence(cluster="c", epoch=(1 << 64) - 1), weights_pb2.Fence()])
def test_a_fence_comes_back_as_the_message_that_it_was(message: weights_pb2.Fence) -> None:
    assert Fence.of(message).message() == message


def test_a_message_that_is_not_set_names_no_version_and_carries_no_fence() -> None:
    status = manager_pb2.WorkerStatus()
    assert Version.of(status.identity) == Version("", 0, b"")
    assert Version.or_none(status.identity) is None
    assert Fence.of(manager_pb2.Prepared().fence) == Fence()
    assert not status.HasField("identity"), "reading sets nothing"


def test_number_0_of_a_run_is_a_version() -> None:
    assert Version.or_none(FIRST) == Version("run", 0, bytes(32))


def test_versions_differ_if_one_field_does() -> None:
    one = Version("run", 1, b"r")
    others = {Version("other", 1, b"r"), Version("run", 2, b"r"), Version("run", 1, b"s")}
    assert one not in others
    assert len(others) == 3
    assert {one: "held"}[Version("run", 1, b"r")] == "held"


def test_fences_of_two_clusters_differ_also_in_words() -> None:
    assert Fence("a", 1) != Fence("b", 1)
    assert str(Fence("a", 1)) == "a/1" != str(Fence("b", 1))


def test_what_is_kept_does_not_change_with_the_message_or_by_itself() -> None:
    message = weights_pb2.Identity(lineage="run", version=1, root=b"r")
    kept = Version.of(message)
    message.version = 2
    assert kept.number == 1
    with pytest.raises(FrozenInstanceError):
        kept.number = 2  # type: ignore[misc]


def test_people_are_told_the_number_the_run_and_how_the_root_begins() -> None:
    assert str(Version("run", 7, bytes(range(32)))) == "version 7 of lineage 'run' (root 000102030405)"
