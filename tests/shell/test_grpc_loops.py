"""Loops of one process that all use grpc.aio: none logs what is no error, and each logs what is one."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ckpt_engine.grpc_loops import quiet_loop
from tests.line_process import ROOT
from tests.shell.three_loops import CALLS


def test_a_manager_and_clients_on_loops_of_one_process_log_no_wake_ups(tmp_path: Path) -> None:
    # In a process of its own: what loops of other tests log in this one is not its matter.
    ran = subprocess.run(
        [sys.executable, "-m", "tests.shell.three_loops", str(tmp_path / "ledger.sqlite3")],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=120,
    )
    assert (ran.stdout, ran.returncode) == (f"{2 * CALLS} answers\n", 0), ran.stderr
    assert "Exception in callback" not in ran.stderr


class PollerCompletionQueue:
    """Stands in for grpc's, which says nothing of when it finds nothing."""

    def handle_events(self) -> None:
        """Never called."""


async def test_a_loop_still_tells_of_everything_else(caplog: pytest.LogCaptureFixture) -> None:
    loop = asyncio.get_running_loop()
    poller: dict[str, Any] = {"message": "poller", "handle": PollerCompletionQueue().handle_events}
    nothing: dict[str, Any] = {**poller, "exception": BlockingIOError(11, "nothing there")}
    quiet_loop()
    loop.call_exception_handler(nothing)
    loop.call_exception_handler({**poller, "exception": ValueError("broken")})
    loop.call_exception_handler({**nothing, "message": "elsewhere", "handle": loop.stop})
    assert [record.getMessage().splitlines()[0] for record in caplog.records] == ["poller", "elsewhere"]


async def test_a_users_own_handler_is_kept_and_asked_once() -> None:
    loop = asyncio.get_running_loop()
    told = []
    loop.set_exception_handler(lambda _, context: told.append(context["message"]))
    for _ in range(2):
        quiet_loop()
    loop.call_exception_handler({"message": "wrong"})
    assert told == ["wrong"]
