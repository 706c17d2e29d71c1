"""Engine directories: private, one agent each, nothing stale left."""

import os
import stat
import subprocess
import sys
import time

import pytest

from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.gate.directory import EngineDirectory, default_root
from ckpt_engine.gate.page import EnginePage


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_everything_is_readable_by_its_owner_only(tmp_path):
    directory = EngineDirectory.create(tmp_path)
    EnginePage(directory.page)
    directory.lock()
    assert mode(directory.path) == 0o700
    assert {mode(path) for path in directory.path.iterdir()} == {0o600}
    assert len(directory.token()) == 64


def test_a_root_open_to_others_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "ckpt-engine").mkdir(mode=0o755)
    with pytest.raises(CkptEngineError, match="mode 0755"):
        default_root()
    os.rmdir(tmp_path / "ckpt-engine")
    os.symlink("/tmp", tmp_path / "ckpt-engine")
    with pytest.raises(CkptEngineError, match="must be a directory"):
        default_root()


def test_a_path_too_long_for_a_socket_is_refused(tmp_path):
    long = tmp_path / ("x" * 100)
    long.mkdir()
    with pytest.raises(CkptEngineError, match="107 bytes"):
        EngineDirectory.create(long)


def test_one_agent_at_a_time_and_the_lock_dies_with_its_holder(tmp_path):
    directory = EngineDirectory.create(tmp_path)
    script = (
        "import sys, time; from pathlib import Path; from ckpt_engine.gate.directory import EngineDirectory;"
        "EngineDirectory(Path(sys.argv[1])).lock(); print('locked', flush=True); time.sleep(60)"
    )
    holder = subprocess.Popen([sys.executable, "-c", script, str(directory.path)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "locked\n"
        with pytest.raises(CkptEngineError, match=f"already has an agent \\(pid {holder.pid}\\)"):
            directory.lock()
    finally:
        holder.kill()
        holder.wait(60)
    directory.lock()
    directory.unlock()


def test_agents_are_counted(tmp_path):
    directory = EngineDirectory.create(tmp_path)
    assert [directory.next_agent_epoch() for _ in range(3)] == [1, 2, 3]
    assert EngineDirectory(directory.path).next_agent_epoch() == 4


def test_old_directories_without_agent_and_workers_are_removed(tmp_path):
    stale, locked, working, young, foreign = (EngineDirectory.create(tmp_path) for _ in range(5))
    locked.lock()
    EnginePage(working.page).claim(0, 1)
    with foreign.page.open("r+b") as page:
        page.write(b"CKPTPAGE" + (99).to_bytes(4, "little") + (1).to_bytes(4, "little"))
    for directory in (stale, locked, working, foreign):
        os.utime(directory.path, (time.time() - 7200,) * 2)
    EngineDirectory.create(tmp_path)
    assert not stale.path.exists()
    assert locked.path.exists()
    assert working.path.exists()
    assert young.path.exists()
    assert foreign.path.exists(), "nothing tells whether workers of another version of the page live"
    foreign.lock()
