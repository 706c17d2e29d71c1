"""The places of an adapter's shelf, as the processes of an engine see them."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.gate.page import WorkerSlot
from ckpt_engine.gate.shelf import Shelf, ShelfPlace, choose_place, clear_shelves, shelf_directory
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


class Worker:
    """One of several workers, with three places."""

    def __init__(self, engine: Path, rank: int, workers: int) -> None:
        self.directory = shelf_directory(engine, "policy").path
        places = [ShelfPlace(self.directory, number) for number in range(3)]
        self.places: list[tuple[ShelfPlace, WorkerSlot]] = [
            (place, place.page.claim(rank, workers)) for place in places
        ]

    def choose(self, version: int, epoch: int) -> int | None:
        return choose_place(self.directory, self.places, identity(version), epoch)

    def put(self, version: int, epoch: int) -> int | None:
        """Chooses, and puts the version there."""
        number = self.choose(version, epoch)
        if number is not None:
            self.places[number][1].clean(epoch, identity(version))
        return number


def test_all_workers_choose_what_the_first_has_chosen(engine: Path) -> None:
    """Although requests end, and begin, between them. Also that there is no place."""
    workers = [Worker(engine, rank, 2) for rank in range(2)]
    for epoch in (1, 2, 3):
        assert [worker.put(epoch, epoch) for worker in workers] == [epoch - 1] * 2
    api = Shelf(engine, "policy", 3)
    newest, middle, oldest = (place for place, _ in api.held())
    assert oldest.use(identity(1))
    assert workers[0].choose(4, 4) == 1
    assert not middle.use(identity(2)), "it is to go"
    oldest.leave()
    assert workers[1].choose(4, 4) == 1
    for worker in workers:
        worker.places[1][1].clean(4, identity(4))
    assert newest.use(identity(3))
    assert oldest.use(identity(1))
    assert workers[0].choose(5, 5) is None, "the last that was put there stays, although no request uses it"
    oldest.leave()
    assert workers[1].choose(5, 5) is None
    assert oldest.use(identity(1)), "nothing is marked"
    oldest.leave()
    assert [worker.put(5, 6) for worker in workers] == [0, 0]
    with pytest.raises(CkptEngineError, match="the install of epoch 6 has begun"):
        workers[1].choose(5, 5)


def test_a_place_that_only_some_workers_filled_is_the_next_one_to_be_filled(engine: Path) -> None:
    """No request can use it. A version that is there already stays where it is."""
    workers = [Worker(engine, rank, 2) for rank in range(2)]
    for epoch in (1, 2, 3):
        assert [worker.put(epoch, epoch) for worker in workers] == [epoch - 1] * 2
    assert workers[1].put(4, 4) == 0
    assert [each.version for _, each in Shelf(engine, "policy", 3).held()] == [3, 2], "the other worker failed"
    assert [worker.put(4, 5) for worker in workers] == [0, 0]
    assert [worker.put(2, 6) for worker in workers] == [1, 1]
    assert workers[0].put(5, 7) == 2
    assert [worker.put(6, 8) for worker in workers] == [2, 2]
    clear_shelves(engine)
    assert not (workers[0].directory / "choice").exists(), "epochs of another start mean nothing"


@pytest.mark.parametrize("seed", range(20))
def test_no_version_goes_that_a_request_uses(engine: Path, seed: int) -> None:
    """Three workers in any order, some of which fail, and requests that begin and end between any two of them."""
    chance = random.Random(seed)
    workers = [Worker(engine, rank, 3) for rank in range(3)]
    api = Shelf(engine, "policy", 3)
    uses: list[tuple[ShelfPlace, weights_pb2.Identity]] = []
    for epoch in range(1, 40):
        chosen = set()
        for worker in chance.sample(workers, 3):
            for place, held in list(api.held()):
                if chance.random() < 0.2 and place.use(held):
                    uses.append((place, held))
            if uses and chance.random() < 0.6:
                uses.pop(chance.randrange(len(uses)))[0].leave()
            if chance.random() < 0.9:
                chosen.add(worker.put(epoch, epoch))
            assert all(place.holds_now() == held for place, held in uses)
        assert len(chosen) <= 1
    for place, _ in uses:
        place.leave()
    assert None not in {worker.put(99, 99) for worker in workers}
