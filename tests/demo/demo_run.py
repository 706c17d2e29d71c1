"""One run of the demo's command, and all processes of it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

import pytest

MARK = "CKPT_ENGINE_DEMO_TEST"
PACKAGES = Path(__file__).resolve().parents[2]


class Run:
    """One run of the command, with a mark in the environment of every process that it starts."""

    def __init__(self, *arguments: str) -> None:
        self.mark = uuid.uuid4().hex
        # Not pytest's directory: the paths of sockets below it must be short.
        self.directory = Path(tempfile.mkdtemp(prefix="d-"))
        environment = {
            **os.environ,
            MARK: self.mark,
            "TMPDIR": str(self.directory),
            "PYTHONPATH": os.pathsep.join(
                [str(PACKAGES), str(PACKAGES / "adapters"), os.environ.get("PYTHONPATH", "")]
            ),
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "ckpt_engine", "demo", "--json", *arguments],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # A job that a shell runs in the background ignores it, and so would the demo.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    def processes(self) -> dict[int, str]:
        """Living processes with the mark: pid to command line."""
        found = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    if f"{MARK}={self.mark}".encode() in (entry / "environ").read_bytes():
                        found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        return found

    def wait_for(self, word: str, seconds: float) -> int:
        """The pid of a process with this word in its command line, once there is one that is not a launcher."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and self.process.poll() is None:
            for pid, command in self.processes().items():
                if word in command and "launcher.py" not in command:
                    return pid
            time.sleep(0.05)
        pytest.fail(f"no process with {word} within {seconds} s: {self.processes()}")

    def finish(self, seconds: float) -> tuple[str, str]:
        return self.process.communicate(timeout=seconds)

    def left(self) -> tuple[dict[int, str], list[str]]:
        """Processes and files."""
        end = time.monotonic() + 60
        while self.processes() and time.monotonic() < end:
            time.sleep(0.1)
        return self.processes(), [str(path) for path in self.directory.iterdir()]
