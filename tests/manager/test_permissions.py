"""What others on this machine can read of ours: nothing. Tried as another user, not read off the modes."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ckpt_engine.agent.channel import AgentChannel
from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.gate.directory import EngineDirectory
from ckpt_engine.gate.page import EnginePage
from ckpt_engine.host.owned import unwritable
from ckpt_engine.host.relay_directory import DIRECTORY
from ckpt_engine.manager.ledger import Ledger
from ckpt_engine.relay.arena import Arena
from ckpt_engine.relay.door import ArenaDoor
from ckpt_engine.transport.shared_memory.memory import SharedArena
from ckpt_engine.v1 import weights_pb2, worker_pb2

STRANGER = 65534

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can try as another user")


@pytest.fixture
def folder() -> Iterator[Path]:
    """A directory that everybody may enter; pytest's own would keep strangers out by itself."""
    path = Path(tempfile.mkdtemp())
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


def as_a_stranger(attempt: Callable[[], object]) -> str:
    """What became of the attempt in a child process of another user: the error's name, or "done"."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(STRANGER)
            os.setuid(STRANGER)
            attempt()
            said = "done"
        except BaseException as error:
            said = type(error).__name__
        os.write(writer, said.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        said = pipe.read().decode()
    os.waitpid(child, 0)
    return said


def test_the_attempt_itself_works(folder: Path) -> None:
    (folder / "open").write_text("for all")
    assert as_a_stranger((folder / "open").read_text) == "done"


async def test_the_ledger_is_its_owners(folder: Path) -> None:
    umask = os.umask(0)
    try:
        ledger = await Ledger.open(folder / "ledger.sqlite")
    finally:
        os.umask(umask)
    try:
        await ledger.spend_epoch(1)
        written = sorted(os.listdir(folder))
        assert "ledger.sqlite" in written
        for name in written:
            assert as_a_stranger((folder / name).read_bytes) == "PermissionError", name
    finally:
        await ledger.close()


def test_who_lacks_a_directory_is_told_whose_it_is(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A volume or a directory of the host that belongs to root, in a container that does not run as root."""
    said = f"{folder} belongs to user 0 with mode 755, and this process is user {STRANGER}: give it the directory"
    monkeypatch.setenv(DIRECTORY, str(folder))

    def ledger() -> None:
        with pytest.raises(CkptEngineError, match=re.escape(said)):
            asyncio.run(Ledger.open(folder / "ledger.sqlite"))

    arena = Arena(8 << 20)

    def door() -> None:
        with pytest.raises(CkptEngineError, match=re.escape(said)):
            ArenaDoor(arena, 1.0)

    assert as_a_stranger(ledger) == "done"
    assert as_a_stranger(door) == "done"
    error = OSError(errno.EROFS, os.strerror(errno.EROFS))
    assert unwritable(folder, error) == f"{folder} is read-only here: mount a volume that can be written to there"
    assert unwritable(folder, OSError(errno.ENOSPC, "full")) == ""


async def test_an_engines_directory_is_its_owners(folder: Path) -> None:
    async def nobody(request: worker_pb2.WorkerRequest) -> None:
        return None

    umask = os.umask(0)
    try:
        directory = EngineDirectory.create(folder)
        EnginePage(directory.page).claim(0, 1)
        channel = AgentChannel(directory, nobody)
        await channel.start()
    finally:
        os.umask(umask)
    try:
        await asyncio.sleep(0)
        names = sorted(path.name for path in directory.path.iterdir())
        assert {"page", "token", "agent.sock"} <= set(names)
        assert as_a_stranger(lambda: list(directory.path.iterdir())) == "PermissionError"
        for name in names:
            assert as_a_stranger((directory.path / name).read_bytes) == "PermissionError", name
    finally:
        await channel.close()


def test_weights_in_shared_memory_are_their_owners() -> None:
    arena = SharedArena(4096)
    locator = weights_pb2.SharedMemoryLocator.FromString(arena.region(0).locator)
    path = f"/proc/{locator.pid}/fd/{locator.descriptor}"
    assert as_a_stranger(lambda: Path(path).read_bytes()) == "PermissionError"
    assert len(Path(path).read_bytes()) == 4096
    arena.close()
