"""An archive on a real disk: what is written is whole or absent, the oldest leave, and what rots is not offered."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.core.sealed_record import ProvenRecord
from ckpt_engine.host.facts import this_host
from ckpt_engine.relay import archive as archives
from ckpt_engine.relay.archive import Archive
from ckpt_engine.relay.slots import Slots, SlotVersion
from ckpt_engine.transport.archive.files import ArchiveTransport
from ckpt_engine.transport.registry import all_transports
from ckpt_engine.v1.weights_pb2 import SourceTable
from tests.install.install_models import TensorParallel
from tests.install.install_world import Checkpoint
from tests.install.published import tables
from tests.relay.relay_world import Replica, seal, wish
from tests.waiting import eventually


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with contextlib.closing(World(tmp_path)) as made:
        yield made


class World:
    """A trainer's checkpoint and a relay's slots."""

    def __init__(self, path: Path) -> None:
        self.path = path / "archive"
        self.checkpoint = Checkpoint(TensorParallel(0, 2).checkpoint(0), seed=2)
        self.replica = Replica(self.checkpoint, path / "replica")
        self.slots = Slots("a", this_host(), 32 << 20, {**all_transports(), "archive": ArchiveTransport()})
        self.records: dict[int, ProvenRecord] = {}
        self.opened: list[Archive] = []

    def archive(self, keep: int = 10) -> Archive:
        self.opened.append(Archive(self.path, keep, "a", self.slots.host))
        return self.opened[-1]

    def version(self, number: int) -> SlotVersion:
        """Brings a version of its own weights into a slot."""
        self.checkpoint.weights.update(TensorParallel(0, 2).checkpoint(number))
        self.records[number] = seal(self.checkpoint, [self.replica])
        return self.slots.fill(
            number % 2, wish(self.records[number], number, tables(self.checkpoint), [self.replica]), 60
        )

    def served(self, archive: Archive, number: int) -> None:
        """Fills a slot from the archive alone, and installs from it."""
        (offer,) = (each for each in archive.versions if each.identity and each.identity.version == number)
        table, recorded = SourceTable.FromString(offer.table), self.records[number]
        held = self.slots.fill(0, wish(recorded, number, [table], [self.replica]), 60)
        assert not held.filled.missing
        assert dict(held.filled.bytes_by_source).keys() == {"archive a"}
        for answer in self.replica.install(held.table, recorded, number):
            assert not answer.report.HasField("problem"), answer.report.problem.message

    def close(self) -> None:
        for archive in self.opened:
            archive.close()
        self.slots.close()
        self.checkpoint.close()


def inherited(held: SlotVersion) -> SlotVersion:
    """The same in memory that a forked process gets, which a relay's is not."""
    return replace(held, sealed=[memory.clone() for memory in held.sealed])


def numbers(archive: Archive) -> list[int]:
    return [each.identity.version for each in archive.versions if each.identity]


def test_each_version_is_served_again_by_another_process(world: World) -> None:
    first = world.archive(keep=2)
    for number in range(3):
        assert first.write(world.version(number))
        assert not first.write(world.slots.held(number % 2) or world.version(number)), "it is there"
    assert numbers(first) == [2, 1], "two are kept"
    first.close()
    again = world.archive(keep=2)
    assert numbers(again) == [2, 1]
    for number in (1, 2):
        world.served(again, number)
    again.close()
    assert numbers(world.archive(keep=1)) == [2]


def test_a_relay_that_is_killed_leaves_no_half_version(world: World) -> None:
    """A process of its own writes the second version, and is killed with SIGKILL in the middle of it."""
    archive = world.archive()
    archive.write(world.version(0))
    archive.close()
    held = inherited(world.version(1))
    pid = os.fork()
    if pid == 0:
        archives._WRITE_BYTES = 64
        write, count = os.write, 0

        def hang(descriptor: int, data: bytes) -> int:
            nonlocal count
            count += 1
            if count > 20:
                (world.path / "half").touch()
                signal.pause()
            return write(descriptor, data)

        archives.os.write = hang  # type: ignore[attr-defined]
        Archive(world.path, 10, "a", world.slots.host).write(held)
        os._exit(0)
    try:
        eventually("it is half written", 60, (world.path / "half").exists)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert list(world.path.glob("part-*"))
    again = world.archive()
    assert numbers(again) == [0]
    assert not list(world.path.glob("part-*"))
    assert again.write(held)
    world.served(again, 1)


def test_a_disk_without_room_costs_the_oldest_and_then_the_version(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = world.archive()
    for number in (0, 1):
        archive.write(world.version(number))
    held = world.version(2)
    usage = shutil.disk_usage(world.path)
    monkeypatch.setattr(
        shutil, "disk_usage", lambda _: usage._replace(free=usage.free if len(numbers(archive)) < 2 else 0)
    )
    assert archive.write(held)
    assert numbers(archive) == [2, 1]
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=0))
    with pytest.raises(CkptEngineError, match=r"is not archived: .* has 0 bytes free"):
        archive.write(world.version(3))
    assert numbers(archive) == []
    assert sorted(each.name for each in world.path.iterdir()) == ["lock"]


def test_a_disk_that_refuses_in_the_middle_leaves_nothing(world: World) -> None:
    """The kernel itself refuses: a file may not grow beyond a limit. In a process of its own, which keeps the limit."""
    held = inherited(world.version(0))
    pid = os.fork()
    if pid == 0:
        import resource

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024, 1024))
        try:
            Archive(world.path, 10, "a", world.slots.host).write(held)
        except CkptEngineError as error:
            os._exit(0 if "File too large" in error.problem.message else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert numbers(world.archive()) == []
    assert sorted(each.name for each in world.path.iterdir()) == ["lock"]


def test_what_rots_is_found_named_and_set_aside(world: World) -> None:
    archive = world.archive()
    for number in (0, 1):
        archive.write(world.version(number))
    (folder,) = world.path.glob("0-*")
    times = os.stat(folder / "weights")
    data = bytearray((folder / "weights").read_bytes())
    data[len(data) // 2] ^= 1
    (folder / "weights").write_bytes(data)
    os.utime(folder / "weights", ns=(times.st_atime_ns, times.st_mtime_ns))
    (offer,) = (each for each in archive.versions if each.identity and each.identity.version == 0)
    table = SourceTable.FromString(offer.table)
    held = world.slots.fill(0, wish(world.records[0], 0, [table], [world.replica]), 60)
    (missing,) = held.filled.missing
    assert "at archive a has other bytes than were sealed" in missing.problem.message
    assert offer.identity is not None
    assert archive.verify(offer.identity)
    assert numbers(archive) == [1]
    assert not archive.verify(offer.identity), "that is known"
    assert list(world.path.glob("damaged-0-*"))
    archive.close()
    assert numbers(world.archive()) == [1]


def test_a_file_that_was_cut_or_says_something_else_is_not_offered(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    archive = world.archive()
    for number in (0, 1, 2):
        archive.write(world.version(number))
    archive.close()
    cut, nonsense = next(world.path.glob("0-*")), next(world.path.glob("1-*"))
    os.truncate(cut / "weights", 100)
    (nonsense / "version").write_bytes(b"\xff" * 100)
    assert numbers(world.archive()) == [2]
    assert "its weights have 100 bytes" in caplog.text
    assert str(nonsense) in caplog.text


def test_a_slot_that_is_filled_again_meanwhile_is_not_taken_for_the_version(world: World) -> None:
    archive = world.archive()
    held = world.version(0)
    world.version(2)  # in the same slot
    with pytest.raises(CkptEngineError, match="other bytes than were sealed"):
        archive.write(held)
    assert numbers(archive) == []


def test_two_relays_do_not_share_one(world: World) -> None:
    world.archive()
    with pytest.raises(CkptEngineError, match="is that of another relay that runs: name another directory"):
        world.archive()


def test_a_directory_that_cannot_be_is_refused(world: World) -> None:
    world.path.write_text("a file")
    with pytest.raises(CkptEngineError, match=f"--archive {world.path} is not a directory"):
        world.archive()
