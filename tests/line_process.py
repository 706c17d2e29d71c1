"""A process of a test, driven by one JSON line at a time: a question in, an answer out. It ends when its input does."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Protocol, Self, TextIO

ROOT = Path(__file__).parents[1]


def say(**told: Any) -> None:
    """A line of such a process."""
    print(json.dumps(told), flush=True)


class Started(Protocol):
    """What a test needs of a process that it has started; subprocess.Popen is one."""

    pid: int

    def kill(self) -> None: ...

    def wait(self, timeout: float | None = None) -> int: ...


class LineProcess:
    """Starts `python -m module arguments`; `ask` is answered within the test's own timeout.

    before: of the command, as `unshare`. fresh: an interpreter of its own, which `before` needs too; else it is forked
    from a process that has loaded torch (`line_template.py`). environment: added to ours.
    """

    process: Started

    def __init__(
        self, module: str, *arguments: str, before: Sequence[str] = (), fresh: bool = False, **environment: str
    ) -> None:
        self._name = " ".join((module, *arguments))
        if before or fresh:
            process = subprocess.Popen(
                [*before, sys.executable, "-m", module, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                cwd=ROOT,
                env={**os.environ, **environment},
            )
            assert process.stdin is not None
            assert process.stdout is not None
            self.process, self._in, self._out = process, process.stdin, process.stdout
        else:
            self.process, self._in, self._out = _template().fork(module, arguments, environment)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def send(self, **question: Any) -> None:
        self._in.write(json.dumps(question) + "\n")
        self._in.flush()

    def answer(self) -> Any:
        """Raises EOFError if the process has ended."""
        line = self._out.readline()
        if not line:
            raise EOFError(f"{self._name} has ended")
        return json.loads(line)

    def ask(self, **question: Any) -> Any:
        self.send(**question)
        return self.answer()

    def kill(self) -> None:
        """Safe to call twice."""
        self.process.kill()
        self.process.wait(timeout=60)
        self._in.close()
        self._out.close()


class _Forked:
    """A child of the template. status: where its exit code will stand."""

    def __init__(self, pid: int, status: int) -> None:
        self.pid = pid
        self._status = status
        self._code: int | None = None

    def kill(self) -> None:
        if self._code is None and not select.select([self._status], [], [], 0)[0]:
            with contextlib.suppress(ProcessLookupError):  # it has ended, and its exit code is on its way
                os.kill(self.pid, signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        if self._code is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            self._code = int(os.read(self._status, 64))
            os.close(self._status)
        return self._code


class _Template:
    """One a test process; it ends with it, since its socket does."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "tests.line_template", str(theirs.fileno())]
        self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, cwd=ROOT)
        theirs.close()

    def fork(
        self, module: str, arguments: Sequence[str], environment: dict[str, str]
    ) -> tuple[_Forked, TextIO, TextIO]:
        """The child, its standard input and its standard output."""
        stdin, ours_in = os.pipe()
        ours_out, stdout = os.pipe()
        ours_status, status = os.pipe()
        request = {"module": module, "arguments": arguments, "environment": {**os.environ, **environment}}
        socket.send_fds(self._socket, [json.dumps(request).encode()], [stdin, stdout, status])
        for each in (stdin, stdout, status):
            os.close(each)
        pid = int(self._socket.recv(64))
        return _Forked(pid, ours_status), os.fdopen(ours_in, "w"), os.fdopen(ours_out)


@cache
def _template() -> _Template:
    return _Template()
