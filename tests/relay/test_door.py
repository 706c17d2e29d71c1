"""A relay's memory is lent by a connection: it ends with its reader, and no reader holds the relay up."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.host.relay_directory import DIRECTORY, directory_identity, socket_address
from ckpt_engine.relay import door as relay_door
from ckpt_engine.relay.arena import Arena
from ckpt_engine.relay.door import ArenaDoor
from ckpt_engine.transport.relay_memory.reader import QUESTION, RelayMemoryTransport
from ckpt_engine.v1.weights_pb2 import SourceTable
from tests.install.install_models import TensorParallel
from tests.install.install_world import Checkpoint
from tests.relay.relay_process import RelayProcess
from tests.relay.relay_reader import ReaderProcess, regions_of
from tests.relay.relay_world import seal, tables, wish

WAIT_SECONDS = 60.0
ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make namespaces and be another user")


class Trainer:
    """Some weights, and a relay that is given them."""

    def __init__(self) -> None:
        self.checkpoint = Checkpoint(TensorParallel(0, 1).checkpoint(), None)
        self.recorded = seal(self.checkpoint, [])

    def fill(self, relay: RelayProcess, slot: int = 0, version: int = 1) -> dict[str, object]:
        return relay.fill(slot, wish(self.recorded, version, tables(self.checkpoint), everything=True))

    def table(self, relay: RelayProcess) -> SourceTable:
        table = self.fill(relay)["table"]
        assert isinstance(table, SourceTable)
        return table


@pytest.fixture(scope="module")
def trainer() -> Trainer:
    return Trainer()


def until(condition: Callable[[], object]) -> None:
    stop_at = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < stop_at
        time.sleep(0.01)


def test_a_reader_sees_what_the_relay_wrote_and_cannot_change_it(trainer: Trainer) -> None:
    with RelayProcess() as relay, ReaderProcess() as reader:
        assert reader.open(trainer.table(relay)) is None
        before = reader.ask(sum=0)
        assert before > 0
        assert reader.ask(seize=0) == []
        assert reader.ask(sum=0) == before


def test_a_reader_that_dies_holds_nothing(trainer: Trainer) -> None:
    """Its slot would be kept for an hour otherwise."""
    with RelayProcess(grace=3600.0) as relay, ReaderProcess() as reader:
        assert reader.open(trainer.table(relay)) is None
        assert relay.ask(readers=True) == 1
        reader.kill()
        until(lambda: relay.ask(readers=True) == 0)
        assert trainer.fill(relay)["overruled"] == 0


def test_a_reader_whose_forked_child_lives_on_is_gone_when_it_dies(trainer: Trainer) -> None:
    with RelayProcess(grace=3600.0) as relay, ReaderProcess() as reader:
        assert reader.open(trainer.table(relay)) is None
        child = reader.ask(fork=True)
        try:
            reader.kill()
            until(lambda: relay.ask(readers=True) == 0)
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_reader_that_rests_holds_nothing_and_may_ask_again(trainer: Trainer) -> None:
    with RelayProcess(grace=3600.0) as relay, ReaderProcess() as reader:
        assert reader.open(trainer.table(relay)) is None
        assert reader.ask(rest=True) is None
        assert trainer.fill(relay)["overruled"] == 0
        assert reader.ask(check=True) is None
        assert relay.ask(retire=1) == 0, "the other slot"
        assert reader.ask(rest=True) is None
        assert relay.ask(retire=0) == 0
        assert "another version is brought into it" in reader.ask(check=True)


def test_a_slot_is_not_filled_before_its_readers_have_read_it(trainer: Trainer) -> None:
    with RelayProcess(grace=3600.0) as relay, ReaderProcess() as reader:
        table = trainer.table(relay)
        assert reader.open(table) is None
        relay.send(retire=0)
        other = RelayMemoryTransport()

        def retired() -> bool:
            try:
                other.open(regions_of(table)).close()
            except CkptEngineError:
                return True
            return False

        until(retired)
        assert reader.ask(rest=True) is None
        assert relay.answer() == 0


def test_a_stopped_reader_keeps_its_slot_for_the_grace_and_no_longer(trainer: Trainer) -> None:
    with RelayProcess(grace=0.3) as relay, ReaderProcess() as reader:
        assert reader.open(trainer.table(relay)) is None
        os.kill(reader.pid, signal.SIGSTOP)
        assert trainer.fill(relay)["overruled"] == 1
        assert trainer.fill(relay)["overruled"] == 0, "who was overruled does not count again"
        os.kill(reader.pid, signal.SIGCONT)
        assert reader.ask(check=True) is None


def test_a_relay_that_dies_leaves_what_was_mapped_and_its_successor_is_another_one(
    trainer: Trainer, relay_directory: Path
) -> None:
    with ReaderProcess() as reader:
        with RelayProcess() as relay:
            table = trainer.table(relay)
            assert reader.open(table) is None
            before = reader.ask(sum=0)
        until(lambda: reader.ask(check=True) is not None)
        assert reader.ask(sum=0) == before
        with RelayProcess("b") as relay:
            assert len(list(relay_directory.iterdir())) == 1, "the socket of the one that died is gone"
            assert "no relay lends its memory at" in reader.open(table)
            assert reader.open(trainer.table(relay)) is None


@ROOT
@pytest.mark.skipif(shutil.which("unshare") is None, reason="no unshare")
def test_a_reader_needs_neither_the_pids_nor_the_network_of_its_relay(trainer: Trainer) -> None:
    with RelayProcess() as relay, ReaderProcess(before=["unshare", "--pid", "--fork", "--net", "--ipc"]) as reader:
        assert reader.pid == 1
        assert reader.open(trainer.table(relay)) is None
        assert reader.ask(sum=0) > 0
        reader.kill()
        until(lambda: relay.ask(readers=True) == 0)


@ROOT
@pytest.mark.parametrize(("users", "answered"), [("", False), ("65534", True)], ids=["a stranger", "a named user"])
def test_another_user_reads_only_if_he_is_named(
    trainer: Trainer, users: str, answered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(f"/tmp/ckpt-engine-test-{os.getpid()}")  # tmp_path is closed to other users
    monkeypatch.setenv(DIRECTORY, str(folder))
    try:
        with RelayProcess(users=users) as relay:
            regions = regions_of(trainer.table(relay))
            child = os.fork()  # this interpreter's files may be closed to the other user
            if child == 0:
                status = 2
                try:
                    os.setuid(65534)
                    RelayMemoryTransport().open(regions)
                    status = 0
                except CkptEngineError as error:
                    status = 1 if "Permission denied" in str(error) or "lends to users [0]" in str(error) else 3
                finally:
                    os._exit(status)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == (0 if answered else 1)
            until(lambda: relay.ask(readers=True) == 0)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def test_a_directory_that_is_not_the_relays_is_named(
    trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RelayProcess() as relay:
        table = trainer.table(relay)
        (tmp_path / "other").mkdir()
        monkeypatch.setenv(DIRECTORY, str(tmp_path / "other"))
        with pytest.raises(CkptEngineError, match=f"not the directory of that relay.*{DIRECTORY}"):
            RelayMemoryTransport().open(regions_of(table))


def test_a_directory_may_have_two_names_and_a_long_path(
    trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 120)
    long.mkdir(mode=0o700)
    monkeypatch.setenv(DIRECTORY, str(long))
    with RelayProcess() as relay:
        table = trainer.table(relay)
        (tmp_path / "name").symlink_to(long)
        monkeypatch.setenv(DIRECTORY, str(tmp_path / "name"))
        RelayMemoryTransport().open(regions_of(table)).close()


# ------------------------------------------------------------------------------------------------ in this process


@pytest.fixture
def small() -> Arena:
    return Arena(8 << 20)


def connected(door: ArenaDoor) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(WAIT_SECONDS)
    with socket_address(door.socket) as address:  # the path itself may be longer than the kernel allows
        connection.connect(address)
    return connection


def test_whoever_asks_nonsense_or_nothing_is_sent_away(
    small: Arena, relay_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay_door, "_FIRST_SECONDS", 0.05)
    door = ArenaDoor(small, 1.0)
    try:
        for question in (b"", b"\1", b"x" * 4096, None):
            with connected(door) as connection:
                if question is not None:
                    connection.send(question)
                assert connection.recv(1) == b""
        for question in (
            QUESTION.pack(9, False, 0, small.id),
            QUESTION.pack(2, False, 77, small.id),
            QUESTION.pack(1, False, 0, bytes(16)),
        ):
            with connected(door) as connection:
                connection.send(question)
                assert connection.recv(1024)[:1] == b"\0"
        assert door.readers == 0
    finally:
        door.close()


def test_a_reader_that_never_listens_is_dropped_and_the_others_are_served(small: Arena, relay_directory: Path) -> None:
    door = ArenaDoor(small, 1.0)
    try:
        with connected(door) as deaf, connected(door) as other:
            deaf.settimeout(0.2)
            with contextlib.suppress(OSError):  # the relay has hung up
                for _ in range(100_000):
                    deaf.send(QUESTION.pack(2, False, 0, small.id))
                raise AssertionError("it answers and answers")
            other.send(QUESTION.pack(1, False, 0, small.id))
            assert other.recv(16) == b"\1"
    finally:
        door.close()


def test_more_readers_than_there_is_room_for_are_sent_away(
    small: Arena, relay_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay_door, "MOST_READERS", 1)
    door = ArenaDoor(small, 1.0)
    try:
        with connected(door) as first:
            first.send(QUESTION.pack(1, False, 0, small.id))
            assert first.recv(16) == b"\1"
            with connected(door) as second:
                assert second.recv(64) == b"\x001 readers have it already"
                assert second.recv(16) == b""
    finally:
        door.close()


def test_a_directory_that_others_can_write_to_is_refused(small: Arena, relay_directory: Path) -> None:
    relay_directory.mkdir()
    relay_directory.chmod(0o777)
    with pytest.raises(CkptEngineError, match="with mode 777: others could put their sockets in a relay's place"):
        ArenaDoor(small, 1.0)
    relay_directory.chmod(0o700)
    door = ArenaDoor(small, 1.0)
    assert door.directory == directory_identity() != ""
    door.close()
    door.close()
    assert list(relay_directory.iterdir()) == []
