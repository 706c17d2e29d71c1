"""Starts, commands and watches the worker processes, from the API process.

Every command goes to all ranks, in the same order; its answer is the list of all ranks' replies. If a worker dies or
cannot continue, the engine ends, since the other workers would wait for it in the next sum. Runs on the API process's
event loop.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio

from ckpt_engine.gate.directory import EngineDirectory


class WorkerFailedError(Exception):
    """A worker answered a command with an error, or is dead; the message names its rank."""


class WorkerPool:
    """The workers of one engine. `on_death(message)` is called once, when one of them exits by itself."""

    def __init__(
        self, directory: EngineDirectory, arguments: Sequence[str], world_size: int, meeting: NodeMeeting | None = None
    ) -> None:
        """arguments: of the worker module, without those that differ from rank to rank. meeting: if some of the
        workers run on other nodes, which start them; this pool is on node 0."""
        self.world_size = world_size
        self._meeting = meeting
        self.on_death: Callable[[str], None] | None = None
        self._directory = directory
        self._arguments = list(arguments)
        self._processes: list[asyncio.subprocess.Process] = []
        self._watchers: list[asyncio.Task[None]] = []
        self._waiting: dict[int, tuple[asyncio.Future[None], dict[int, dict[str, Any]]]] = {}
        self._unanswered: dict[int, int] = {}
        self._next_id = 1
        self._dead = ""
        self._context: zmq.asyncio.Context = zmq.asyncio.Context()
        self._socket: zmq.asyncio.Socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)

    @property
    def pids(self) -> list[int]:
        """Process ids by rank."""
        return [process.pid for process in self._processes]

    @property
    def busy(self) -> bool:
        """Whether a worker may still be executing a command, perhaps after its caller's deadline."""
        return bool(self._unanswered)

    async def start(self, seconds: float) -> list[dict[str, Any]]:
        """Starts the workers and waits until each has its model. Returns each worker's facts about it.

        Raises:
            WorkerFailedError: one of them exited; its own last lines on stderr say why.
            TimeoutError: `seconds` have passed.
        """
        socket_path, group_path = self._directory.path / "pool.sock", self._directory.path / "process_group"
        for path in (socket_path, group_path):
            path.unlink(missing_ok=True)  # of an earlier engine
        endpoint = f"ipc://{socket_path}"
        self._socket.bind(endpoint)
        local, meet = range(self.world_size), []
        if self._meeting is not None:
            # Workers on other nodes learn this address from rank 0. JSON on a network that must be trusted.
            self._socket.bind(f"tcp://{self._meeting.address}:*")
            far_endpoint = self._socket.get_string(zmq.LAST_ENDPOINT)
            local, meet = self._meeting.ranks(self.world_size), [*self._meeting.options, "--far-endpoint", far_endpoint]
        ready = self._expect(0)
        self._watchers.append(asyncio.create_task(self._receive()))
        for rank in local:
            options = (*self._arguments, "--endpoint", endpoint, *meet)
            process = await start_worker(self._directory.path, rank, self.world_size, len(local), options)
            self._processes.append(process)
            self._watchers.append(asyncio.create_task(self._watch(rank, process)))
        return await self._collect(0, ready, seconds)

    async def call(self, op: str, seconds: float, **fields: Any) -> list[dict[str, Any]]:
        """Sends one command to all workers and returns their replies by rank.

        Raises:
            WorkerFailedError: a worker refused it or died.
            TimeoutError: not all had answered after `seconds`; they may still run it, and later commands wait.
        """
        if self._dead:
            raise WorkerFailedError(self._dead)
        identifier, self._next_id = self._next_id, self._next_id + 1
        message = json.dumps({"id": identifier, "op": op, **fields}).encode()
        future = self._expect(identifier)
        for rank in range(self.world_size):
            await self._socket.send_multipart([str(rank).encode(), message])
        return await self._collect(identifier, future, seconds)

    async def close(self) -> None:
        """Kills the workers, which have no state to save, and returns when they have ended."""
        self.on_death = None
        self.kill()
        await asyncio.gather(*(process.wait() for process in self._processes))
        for watcher in self._watchers:
            watcher.cancel()
        self._socket.close()
        self._context.term()

    def kill(self) -> None:
        """Kills the workers that still run, without waiting."""
        for process in self._processes:
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    process.kill()

    def _expect(self, identifier: int) -> asyncio.Future[None]:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[identifier] = (future, {})
        self._unanswered[identifier] = self.world_size
        return future

    async def _collect(self, identifier: int, future: asyncio.Future[None], seconds: float) -> list[dict[str, Any]]:
        try:
            async with asyncio.timeout(seconds):
                await future
            replies = self._waiting[identifier][1]
        finally:
            del self._waiting[identifier]
        for rank, reply in sorted(replies.items()):
            if "error" in reply:
                raise WorkerFailedError(f"worker {rank}: {reply['error']}")
        return [reply for _, reply in sorted(replies.items())]

    async def _receive(self) -> None:
        while True:
            rank, message = await self._socket.recv_multipart()
            reply = json.loads(message)
            self._unanswered[reply["id"]] -= 1
            if not self._unanswered[reply["id"]]:
                del self._unanswered[reply["id"]]
            if reply["id"] not in self._waiting:
                continue  # the caller's deadline has passed
            future, replies = self._waiting[reply["id"]]
            replies[int(rank)] = reply
            # After an error the others' replies are not awaited: they may wait in a sum that this rank will not join.
            if (len(replies) == self.world_size or "error" in reply) and not future.done():
                future.set_result(None)

    async def _watch(self, rank: int, process: asyncio.subprocess.Process) -> None:
        code = await process.wait()
        cause = f"was killed by signal {-code}" if code < 0 else f"exited with status {code}"
        self._dead = f"worker {rank} (pid {process.pid}) {cause}"
        for future, _ in self._waiting.values():
            if not future.done():
                future.set_exception(WorkerFailedError(self._dead))
        if self.on_death is not None:
            on_death, self.on_death = self.on_death, None
            on_death(self._dead)


@dataclass(frozen=True)
class NodeMeeting:
    """How the workers of one node find those of the other nodes."""

    nodes: int  # how many there are
    node_rank: int  # of this node
    address: str  # of the process group's store, on node 0
    port: int  # of that store

    def ranks(self, world_size: int) -> range:
        """Ranks of this node's workers."""
        share = world_size // self.nodes
        return range(self.node_rank * share, (self.node_rank + 1) * share)

    @property
    def options(self) -> list[str]:
        """Options of the worker module."""
        return ["--master-addr", self.address, "--master-port", str(self.port)]


async def start_worker(
    directory: Path, rank: int, world_size: int, local: int, options: Sequence[str]
) -> asyncio.subprocess.Process:
    """Starts one worker process, which dies with this one. local: number of workers that share this host's CPUs."""
    return await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "ckpt_engine_adapters.reference.worker_process", "--rank", str(rank), "--world-size", str(world_size)),
        *("--parent", str(os.getpid()), *options),
        env=_worker_environment(directory, local),
        stdin=asyncio.subprocess.DEVNULL,
    )


def _worker_environment(directory: Path, world_size: int) -> dict[str, str]:
    """The server's environment, with torch threads divided among the workers, and without a model hub."""
    threads = int(os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0)))
    return {
        **os.environ,
        "CKPT_ENGINE_DIRECTORY": str(directory),
        "OMP_NUM_THREADS": str(max(1, threads // world_size)),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
    }
