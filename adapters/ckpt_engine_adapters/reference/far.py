"""A node of the reference engine with workers and without HTTP: node 0 commands them.

It starts its share of the workers and ends, with all of them, when one ends or a signal comes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress

from ckpt_engine.gate.directory import EngineDirectory
from ckpt_engine_adapters.reference.pool import NodeMeeting, WorkerFailedError, start_worker


async def serve_far(
    directory: EngineDirectory, arguments: Sequence[str], world_size: int, meeting: NodeMeeting
) -> None:
    """Runs until cancelled. Raises WorkerFailedError with the worker that ended first."""
    ranks = meeting.ranks(world_size)
    processes: dict[asyncio.Task[int], tuple[int, asyncio.subprocess.Process]] = {}
    try:
        for rank in ranks:
            options = (*arguments, *meeting.options)
            process = await start_worker(directory.path, rank, world_size, len(ranks), options)
            processes[asyncio.ensure_future(process.wait())] = rank, process
        done, _ = await asyncio.wait(processes, return_when=asyncio.FIRST_COMPLETED)
        end = done.pop()
        rank, process = processes[end]
        raise WorkerFailedError(f"worker {rank} (pid {process.pid}) ended with status {end.result()}")
    finally:
        for _, process in processes.values():
            with suppress(ProcessLookupError):
                process.kill()
        await asyncio.gather(*processes, return_exceptions=True)
