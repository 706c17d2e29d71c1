"""A process with three event loops that all use grpc.aio: a manager's, and those of two clients on threads.

Run with the path of a ledger, it prints how many calls were answered; what loops log goes to stderr.
"""

from __future__ import annotations

import asyncio
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ckpt_engine.channel import ManagerStub, open_channel
from ckpt_engine.manager.service import ManagerConfig, running_manager
from ckpt_engine.v1 import manager_pb2

CALLS = 200
"""Of each client. A few dozen already show what grpc.aio logs, in each of the three loops."""


async def _ask(address: str) -> int:
    async with open_channel(address) as channel:
        ask = ManagerStub(channel).GetStatus
        for _ in range(CALLS // 10):
            await asyncio.gather(*(ask(manager_pb2.GetStatusRequest(), timeout=60) for _ in range(10)))
    return CALLS


def main(ledger: Path) -> None:
    """Asks a manager from two threads at once."""
    config = ManagerConfig(listen="127.0.0.1:0", http="", ledger=ledger)
    with running_manager(config) as address, ThreadPoolExecutor(2) as threads:
        answered = sum(threads.map(lambda _: asyncio.run(_ask(address)), range(2)))
    print(f"{answered} answers")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
