"""Tests write below a short path: sockets stand there, and a socket's path has at most 107 bytes. That of pytest itself
gets longer by every tenth, hundredth and thousandth run, and by the name of the user.

A plugin of pytest; `--basetemp` overrules it. What the tests of a run have written is removed if all of them passed,
else it stays, and the run's last lines say where. The next runs remove it: of all runs that have ended, three stay.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
from pathlib import Path

import pytest

LONGEST_FOLDER = 16
"""Bytes of the folder of temporary files (TMPDIR), above which /tmp is taken instead: it may have any length."""

KEPT = 3
"""As many as pytest keeps."""

_NAME = re.compile("ck-[a-z0-9_]{8}")  # as tempfile names them


class Base:
    """The directory of one run, which is locked for as long as the run lasts."""

    def __init__(self, folder: Path) -> None:
        _remove_old(folder)
        self.path = Path(tempfile.mkdtemp(prefix="ck-", dir=folder))
        self.failed = False
        self._lock = _locked(self.path)

    @property
    def tests(self) -> Path:
        """For pytest, which removes what it is given and makes it anew: a directory in the one that is locked."""
        return self.path / "t"

    def close(self) -> None:
        if not self.failed:
            shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)


def folder() -> Path:
    """Where directories of runs lie."""
    usual = Path(tempfile.gettempdir())
    return usual if len(os.fsencode(usual)) <= LONGEST_FOLDER or not os.access("/tmp", os.W_OK) else Path("/tmp")


def _remove_old(folder: Path) -> None:
    """All but the newest directories that were left here by this user's runs."""
    left = []
    for path in folder.iterdir():
        if _NAME.fullmatch(path.name) and not path.is_symlink() and path.is_dir():
            found = path.stat()
            if found.st_uid == os.getuid():
                left.append((found.st_mtime, path))
    for _, path in sorted(left, reverse=True)[KEPT:]:
        if (lock := _locked(path)) is not None:  # else that run goes on
            shutil.rmtree(path, ignore_errors=True)
            os.close(lock)


def _locked(path: Path) -> int | None:
    """A descriptor that holds the lock on this directory; None if another process holds it, or it is gone. The lock
    ends with the process, however that ends."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


_BASE = pytest.StashKey[Base]()
"""Of a run's first process: processes that xdist starts write below its directory."""


def pytest_configure(config: pytest.Config) -> None:
    if config.option.basetemp is None and not hasattr(config, "workerinput"):
        config.stash[_BASE] = base = Base(folder())
        config.option.basetemp = str(base.tests)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if (base := session.config.stash.get(_BASE, None)) is not None:
        base.failed = exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    base = config.stash.get(_BASE, None)
    if base is not None and base.failed:
        terminalreporter.write_line(f"what the tests have written: {base.tests}")


def pytest_unconfigure(config: pytest.Config) -> None:
    """After every process that xdist started has ended."""
    if (base := config.stash.get(_BASE, None)) is not None:
        base.close()
