"""The places of an adapter's shelf, as the processes of an engine see them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ckpt_engine.gate.shelf import Shelf, ShelfPlace, shelf_directory
from ckpt_engine.v1 import weights_pb2

USER = """
import sys
from pathlib import Path
from ckpt_engine.gate.shelf import ShelfPlace
place = ShelfPlace(Path(sys.argv[1]), 0)
identity = place.holds_now()
assert place.use(identity)
print("uses", flush=True)
sys.stdin.read()
"""


def identity(version: int) -> weights_pb2.Identity:
    return weights_pb2.Identity(lineage="policy", version=version, root=bytes([version]) * 32)


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    path = tmp_path / "e"
    path.mkdir(mode=0o700)
    return path


def test_a_place_holds_what_all_workers_hold(engine: Path) -> None:
    """And nothing while one of them writes, or has something else there."""
    directory = shelf_directory(engine, "policy").path
    workers = [ShelfPlace(directory, 0) for _ in range(2)]
    words = [place.page.claim(rank, 2) for rank, place in enumerate(workers)]
    shelf = Shelf(engine, "policy", 2)
    place = shelf.places[0]
    words[0].clean(5, identity(1))
    assert place.holds_now() is None
    words[1].clean(5, identity(1))
    assert place.holds() == place.holds_now() == identity(1)
    words[1].dirty(6)
    assert place.holds() is None
    words[1].clean(6, identity(2))
    assert place.holds_now() is None


def test_the_newest_is_what_was_put_there_last(engine: Path) -> None:
    """After a rollback that is not the highest version."""
    directory = shelf_directory(engine, "policy").path
    words = [ShelfPlace(directory, number).page.claim(0, 1) for number in range(3)]
    shelf = Shelf(engine, "policy", 3)
    for epoch, (word, version) in enumerate(zip(words, (7, 8, 9), strict=True), 1):
        word.clean(epoch, identity(version))
    assert [each.version for _, each in shelf.held()] == [9, 8, 7]
    words[1].clean(9, identity(8))
    assert [each.version for _, each in shelf.held()] == [8, 9, 7]


def test_uses_are_seen_by_workers_until_their_process_has_ended(engine: Path) -> None:
    """However many requests and processes there are, and however a process ends."""
    directory = shelf_directory(engine, "policy").path
    place = ShelfPlace(directory, 0)
    word = place.page.claim(0, 1)
    word.clean(1, identity(1))
    assert not place.used()
    api = ShelfPlace(directory, 0)
    assert api.use(identity(1))
    assert api.use(identity(1))
    assert place.used()
    api.leave()
    assert place.used()
    with subprocess.Popen(
        [sys.executable, "-c", USER, str(directory)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "uses\n"
        api.leave()
        assert place.used(), "a process of its own counts, too"
        other.kill()
        other.wait(60)
    assert not place.used()


def test_a_place_that_is_being_emptied_takes_no_request(engine: Path) -> None:
    directory = shelf_directory(engine, "policy").path
    place, api = ShelfPlace(directory, 0), ShelfPlace(directory, 0)
    word = place.page.claim(0, 1)
    word.clean(1, identity(1))
    word.dirty(1)
    assert not api.use(identity(1))
    assert not place.used(), "what was refused is not counted"
    word.clean(2, identity(2))
    assert not api.use(identity(1)), "another version is no substitute"
    assert api.use(identity(2))
    assert place.used()
    api.leave()


def test_a_base_is_known_by_its_version(engine: Path) -> None:
    directory = shelf_directory(engine, "policy").path
    place, api = ShelfPlace(directory, 0), ShelfPlace(directory, 0)
    assert api.base_of(identity(1)) == b""
    place.note_base(identity(1), b"b" * 32)
    assert api.base_of(identity(1)) == b"b" * 32
    assert api.base_of(identity(2)) == b""
