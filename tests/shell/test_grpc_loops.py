"""Loops of one process that all use grpc.aio: none logs what is no error, and each logs what is one."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ckpt_engine.client import manager_stub, open_channel
from ckpt_engine.grpc_loops import quiet_loop
from ckpt_engine.manager.service import ManagerConfig, running_manager
from ckpt_engine.v1 import manager_pb2

CALLS = 200
"""Of each client. A few dozen already show the error, in each of the three loops."""


async def _ask(address: str) -> int:
    async with open_channel(address) as channel:
        ask = manager_stub(channel).GetStatus
        for _ in range(CALLS // 10):
            await asyncio.gather(*(ask(manager_pb2.GetStatusRequest(), timeout=60) for _ in range(10)))
    return CALLS


def test_a_manager_and_clients_on_loops_of_one_process_log_no_wake_ups(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = ManagerConfig(listen="127.0.0.1:0", http="", ledger=tmp_path / "ledger.sqlite3")
    with running_manager(config) as address, ThreadPoolExecutor(2) as threads:
        assert list(threads.map(lambda _: asyncio.run(_ask(address)), range(2))) == [CALLS, CALLS]
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == []


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
