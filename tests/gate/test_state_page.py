"""State words: never read torn, never believed of a dead process."""

import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest

from ckpt_engine.gate.page import CLEAN, DIRTY, NONE, EnginePage, verdict
from ckpt_engine.v1 import weights_pb2
from tests.waiting import assert_gone


def identity(version: int, byte: int | None = None) -> weights_pb2.Identity:
    value = version % 251 if byte is None else byte
    return weights_pb2.Identity(lineage=f"run-{version}", version=version, root=bytes([value]) * 32)


def claim_in_child(path: Path, rank: int, world_size: int, ready: object, action: str) -> None:
    slot = EnginePage(path).claim(rank, world_size)
    if action == "clean":
        slot.clean(3, identity(7))
    ready.set()  # type: ignore[attr-defined]
    version = 0
    while action == "write":
        version += 1
        slot.clean(version, identity(version))
    time.sleep(60)


@pytest.fixture
def spawned():
    processes = []

    def start(*arguments):
        context = multiprocessing.get_context("spawn")
        ready = context.Event()
        process = context.Process(target=claim_in_child, args=(*arguments[:3], ready, arguments[3]), daemon=True)
        process.start()
        processes.append(process)
        assert ready.wait(60)
        return process

    yield start
    for process in processes:
        process.kill()
        process.join(60)


def test_a_new_page_is_closed(tmp_path):
    page = EnginePage(tmp_path / "page")
    assert page.read() == []
    assert not verdict(page.read()).open


def test_a_worker_goes_from_none_through_dirty_to_clean(tmp_path):
    page = EnginePage(tmp_path / "page")
    slot = page.claim(0, 1)
    assert page.read()[0].state == NONE
    slot.dirty(4)
    assert (page.read()[0].state, page.read()[0].epoch) == (DIRTY, 4)
    assert not verdict(page.read()).open
    slot.clean(4, identity(9))
    word = page.read()[0]
    assert (word.state, word.identity, word.alive, word.pid) == (CLEAN, identity(9), True, os.getpid())
    assert verdict(page.read()).open
    assert verdict(page.read()).identity == identity(9)


def test_every_worker_must_have_started_and_agree(tmp_path):
    page = EnginePage(tmp_path / "page")
    first = page.claim(0, 2)
    first.clean(1, identity(1))
    assert "worker 1 has not started" in verdict(page.read()).reason
    second = page.claim(1, 2)
    second.clean(1, identity(1, byte=99))
    assert "another version" in verdict(page.read()).reason
    second.clean(1, identity(1))
    assert verdict(page.read()).open


def test_claiming_again_is_a_new_boot_that_holds_nothing(tmp_path):
    page = EnginePage(tmp_path / "page")
    slot = page.claim(0, 1)
    slot.clean(1, identity(1))
    again = page.claim(0, 1)
    assert again.boot_id != slot.boot_id
    assert page.read()[0].state == NONE


def test_worlds_of_different_size_are_refused(tmp_path):
    page = EnginePage(tmp_path / "page")
    page.claim(0, 2)
    with pytest.raises(ValueError, match="others said 2"):
        page.claim(1, 3)
    with pytest.raises(ValueError, match="does not fit"):
        page.claim(2, 2)


@pytest.mark.parametrize(
    "bad", [weights_pb2.Identity(lineage="x" * 121, root=bytes(32)), weights_pb2.Identity(lineage="x", root=b"short")]
)
def test_an_identity_that_does_not_fit_leaves_the_word_alone(tmp_path, bad):
    page = EnginePage(tmp_path / "page")
    slot = page.claim(0, 1)
    slot.dirty(1)
    with pytest.raises(ValueError, match=r"bytes"):
        slot.clean(1, bad)
    assert page.read()[0].state == DIRTY


def test_a_killed_worker_closes_the_engine(tmp_path, spawned):
    path = tmp_path / "page"
    process = spawned(path, 0, 1, "clean")
    page = EnginePage(path)
    assert verdict(page.read()).open
    os.kill(process.pid, signal.SIGKILL)
    assert_gone(process.pid)
    assert "is dead" in verdict(page.read()).reason
    assert page.read()[0].status().state == NONE


def test_an_engine_with_weights_of_its_own_is_closed_by_a_dead_worker_too(tmp_path, spawned):
    path = tmp_path / "page"
    process = spawned(path, 0, 2, "none")
    page = EnginePage(path)
    assert verdict(page.read(), own_weights=True).open, "rank 1 has not started, and need not hold anything"
    process.kill()
    process.join(60)
    found = verdict(page.read(), own_weights=True)
    assert (found.open, found.identity) == (False, None)
    assert f"worker 0 (pid {process.pid}) is dead" in found.reason


WORDS = 2000
"""Different ones that are read while they are written."""


def test_words_are_never_torn_and_a_writer_killed_in_the_middle_leaves_no_open_gate(tmp_path, spawned):
    path = tmp_path / "page"
    process = spawned(path, 0, 1, "write")
    page = EnginePage(path)
    seen = set()
    deadline = time.monotonic() + 400
    while len(seen) < WORDS:
        assert time.monotonic() < deadline, f"only {len(seen)} of {WORDS} words were read whole"
        word = page.read()[0]
        if word.state == CLEAN:
            assert word.identity == identity(word.identity.version), "lineage, version and root of different words"
            assert word.epoch == word.identity.version
            if word.epoch in seen:
                os.sched_yield()  # the writer waits for the processor
            seen.add(word.epoch)
    process.kill()
    process.join(60)
    assert not verdict(page.read()).open


def test_half_a_word_reads_as_dirty(tmp_path):
    page = EnginePage(tmp_path / "page")
    slot = page.claim(0, 1)
    slot.clean(5, identity(5))
    with open(tmp_path / "page", "r+b") as file:
        file.seek(256 + 40)
        file.write(b"\x77")
    assert page.read()[0].state == DIRTY
    assert not verdict(page.read()).open


def test_a_foreign_file_is_refused(tmp_path):
    (tmp_path / "page").write_bytes(b"something else" * 100000)
    with pytest.raises(ValueError, match="not a page of state words"):
        EnginePage(tmp_path / "page").read()
