"""A runtime directory without room is refused in words; nobody dies of touching a page that is not there."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

UNSHARE = [shutil.which("unshare") or "unshare", "--map-root-user", "--mount"]

PROGRAM = """
import os, sys
from pathlib import Path
from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.gate.directory import EngineDirectory
from ckpt_engine.gate.page import EnginePage

root = Path(sys.argv[1])

def fill(left):
    found = os.statvfs(root)
    size = found.f_bavail * found.f_frsize - left
    with open(root / f"ballast-{os.urandom(4).hex()}", "wb") as file:
        os.posix_fallocate(file.fileno(), 0, size)
"""


def run(path: Path, kibibytes: int, code: str) -> str:
    """What `code` prints, run after PROGRAM with `root` a file system of `kibibytes` that it alone sees."""
    mount = f'mount -t tmpfs -o size={kibibytes}k none "$1" && shift && exec "$@"'
    script = [*UNSHARE, "sh", "-c", mount, "sh", str(path)]
    if subprocess.run([*script, "true"], capture_output=True, timeout=30, check=False).returncode:
        pytest.skip("no file system can be mounted here: no user namespaces")
    command = [*script, sys.executable, "-c", PROGRAM + code, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, f"status {done.returncode}: {done.stderr}"
    return done.stdout


def test_a_page_without_room_is_refused_and_one_that_is_there_stays_usable(tmp_path: Path) -> None:
    later = "page = EnginePage(root / 'page')\nfill(0)\npage.claim(1000, 1024).dirty(1)\nprint(len(page.read()))"
    assert run(tmp_path, 1024, later) == "1024\n", "its last slots are reserved as well as its first ones"
    code = """
try:
    EnginePage(root / "page").claim(1, 2).dirty(1)
except CkptEngineError as error:
    print(error)
"""
    said = run(tmp_path, 128, code)
    assert said.startswith(f"FAILED_PRECONDITION: {tmp_path} has no room for an engine's files of 262400 bytes")
    assert "131072 bytes and" in said
    assert "set XDG_RUNTIME_DIR" in said


def test_a_directory_is_made_whole_or_not_at_all(tmp_path: Path) -> None:
    code = """
for left in range(0, 300 << 10, 4096):
    fill(left)
    try:
        try:
            directory = EngineDirectory.create(root)
        except CkptEngineError:
            assert not any(path.is_dir() for path in root.iterdir()), "half a directory is left"
            raise
        directory.lock()
        directory.next_agent_epoch()
    except CkptEngineError as error:
        if "has no room for an engine's files of" not in str(error):
            raise
        print("refused")
    else:
        print("made")
    for path in root.iterdir():
        path.unlink() if path.is_file() else EngineDirectory(path).remove()
"""
    said = run(tmp_path, 1024, code).split()
    assert said[0] == "refused"
    assert said[-1] == "made"
    assert said == sorted(said, reverse=True), "more room is never worse"
