"""Runs of the demo, of which nothing is left when the test ends."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from collections.abc import Iterator

import pytest

from tests.demo.demo_run import Run


@pytest.fixture
def runs() -> Iterator[list[Run]]:
    started: list[Run] = []
    yield started
    for run in started:
        run.process.kill()
        run.process.wait(60)
        for pid in run.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(run.directory, ignore_errors=True)
