"""Processes of a benchmark that are spoken with by lines; each answers every line with one line, and waits end."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
MARK = "ANSWER "


class LineProcess:
    """One `python -m MODULE ARGUMENTS`. What it prints besides answers goes to `log`."""

    def __init__(self, log: Path, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        self._log = log
        self._answers: queue.Queue[str | None] = queue.Queue()
        self._process = subprocess.Popen(
            [sys.executable, "-m", *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log.open("ab"),
            text=True,
            cwd=ROOT,
            env={**os.environ, **(environment or {})},
            start_new_session=True,  # so that what it starts can be ended with it
        )
        threading.Thread(target=self._read, daemon=True).start()

    def say(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def hear(self, seconds: float = 120.0) -> dict[str, Any]:
        """The next answer; AssertionError with the end of its log when none comes."""
        try:
            line = self._answers.get(timeout=seconds)
        except queue.Empty:
            line = None
        assert line is not None, f"no answer in {seconds} s:\n{self._log.read_text(errors='replace')[-4000:]}"
        found: dict[str, Any] = json.loads(line)
        return found

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(30)

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._log.open("a") as log:
            for line in self._process.stdout:
                if line.startswith(MARK):
                    self._answers.put(line[len(MARK) :])
                else:
                    log.write(line)
        self._answers.put(None)


def answer(**values: Any) -> None:
    """In such a process: one answer."""
    print(MARK + json.dumps(values), flush=True)
