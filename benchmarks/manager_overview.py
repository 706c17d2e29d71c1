"""What the manager's page costs the manager's event loop, in a large cluster: CPU time of the loop's thread.

    python benchmarks/manager_overview.py [--replicas 500] [--workers 8] [--seconds 10]

A real manager with its HTTP side, on a thread of its own. Its members are told to it without streams: a trainer of 64
ranks, and of each replica a hello, the outcome of its last install and a heartbeat. Heartbeats go on while browsers
ask, each of them once a second, as the page does. Counted is the CPU time of the loop's thread, so a busy machine
changes little of it: of one overview that is built, of a second with so many browsers, and of the same second with
none.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from itertools import count
from pathlib import Path
from typing import Any

import httpx

from ckpt_engine.core.deadlines import Deadlines
from ckpt_engine.core.manifest import DIGEST_FORMAT
from ckpt_engine.core.version import Version
from ckpt_engine.machines import events
from ckpt_engine.manager.kept_views import Overviews
from ckpt_engine.manager.ledger import Ledger
from ckpt_engine.manager.service import ManagerConfig, ManagerServer
from ckpt_engine.security.grants import Caller
from ckpt_engine.shell.outbox import Outbox
from ckpt_engine.v1 import manager_pb2, weights_pb2

IDENTITY = weights_pb2.Identity(lineage="run", version=41, root=bytes(32))


def workers_of(replica: int, count: int) -> list[manager_pb2.WorkerStatus]:
    """State words of workers that all hold the version."""
    return [
        manager_pb2.WorkerStatus(
            rank=rank,
            boot_id=replica.to_bytes(8, "big") + rank.to_bytes(8, "big"),
            pid=1000 + rank,
            state=manager_pb2.WORKER_STATE_CLEAN,
            epoch=82,
            identity=IDENTITY,
        )
        for rank in range(count)
    ]


def outcome_of(name: str, count: int) -> manager_pb2.ReplicaOutcome:
    """How the last update ended for a replica of which each worker read four ranks."""
    outcome = manager_pb2.ReplicaOutcome(
        replica=name,
        fence=weights_pb2.Fence(epoch=82),
        outcome=manager_pb2.OUTCOME_NEW_SERVING,
        before=IDENTITY,
        after=IDENTITY,
        bytes=16 << 30,
        pause_seconds=0.04,
        sync_seconds=1.5,
    )
    for stage in manager_pb2.Stage.values()[1:]:
        outcome.stages.add(stage=stage, seconds=0.1)
        outcome.entered.add(stage=stage, after=0.1)
    for rank in range(count):
        outcome.workers.add(
            rank=rank, bytes=2 << 30, tensors=400, verified=400, copies=1, transfer_seconds=0.3, install_seconds=0.4
        )
        for source in range(4):
            outcome.edges.add(
                source_rank=source,
                worker_rank=rank,
                source=f"rank {source}",
                transport="shared_memory",
                reason="the same host: its memory is mapped and read",
                bytes=512 << 20,
            )
    return outcome


def hello_of(number: int, count: int, cluster: str) -> manager_pb2.ReplicaHello:
    """A replica on a host of its own, of eight GPUs."""
    name = f"rollout-{number}"
    host = weights_pb2.Host(name=f"node-{number:04}.cluster.example", boot_id=f"boot-{number}")
    return manager_pb2.ReplicaHello(
        digest_format=DIGEST_FORMAT,
        cluster=cluster,
        name=name,
        session_id=f"session-{number}",
        agent_epoch=1,
        engine=manager_pb2.Engine(kind="vllm", version="0.11.0", url=f"http://{host.name}:8000"),
        mode=manager_pb2.MODE_STANDALONE,
        host=host,
        workers=workers_of(number, count),
        transports=["shared_memory", "file", "cuda_ipc"],
        last_outcome=outcome_of(name, count),
    )


class Cluster:
    """A manager on a thread of its own, and members that are told to it there."""

    def __init__(self, replicas: int, workers: int, folder: Path) -> None:
        self._replicas, self._workers = replicas, workers
        self._config = ManagerConfig(
            listen="127.0.0.1:0",
            http="127.0.0.1:0",
            ledger=folder / "ledger",
            deadlines=Deadlines(lease=3600.0),
            stop_seconds=1.0,
        )
        self._started: Future[ManagerServer] = Future()
        self._loop = asyncio.new_event_loop()
        self._ended = asyncio.Event()
        self._thread = threading.Thread(target=lambda: self._loop.run_until_complete(self._run()), daemon=True)

    def __enter__(self) -> Cluster:
        self._thread.start()
        self.server = self._started.result(60)
        end = time.monotonic() + 60
        while self.on_loop(lambda: self.server.watched().settling) and time.monotonic() < end:
            time.sleep(0.5)
        return self

    def __exit__(self, *problem: object) -> None:
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join(60)

    def on_loop(self, work: Callable[[], float]) -> float:
        """What a function returns that is called on the manager's loop."""
        done: Future[float] = Future()
        self._loop.call_soon_threadsafe(lambda: done.set_result(work()))
        return done.result(60)

    async def _run(self) -> None:
        ledger = await Ledger.open(self._config.ledger or Path())
        await ledger.record_intent(82, Version.of(IDENTITY), selection=[""])
        await ledger.close()
        async with ManagerServer(self._config) as server:
            shell = server._shell
            opened = []
            for rank in range(64):
                hello = manager_pb2.TrainerHello(
                    digest_format=DIGEST_FORMAT, lineage="run", rank=rank, world_size=64, session_id=f"rank {rank}"
                )
                opened.append(shell.open_session("trainer", manager_pb2.TrainerCommand, hello))
            for number in range(self._replicas):
                told = hello_of(number, self._workers, server.ledger.cluster)
                opened.append(shell.open_session("replica", manager_pb2.ReplicaCommand, told))
            reading = [asyncio.ensure_future(_read(outbox)) for _, outbox in opened]
            self._peers = [peer for peer, _ in opened[64:]]
            self._states = [workers_of(number, self._workers) for number in range(self._replicas)]
            beating = [
                asyncio.ensure_future(self._beat(server, peer, workers))
                for peer, workers in zip(self._peers, self._states, strict=True)
            ]
            self._started.set_result(server)
            await self._ended.wait()
            for task in (*reading, *beating):
                task.cancel()

    def beat_all(self) -> float:
        """Seconds of the loop for one heartbeat of each replica, which says what the last one said."""
        beats = [manager_pb2.ReplicaHeartbeat(workers=workers, serving=True) for workers in self._states]
        begun = time.thread_time()
        for peer, beat in zip(self._peers, beats, strict=True):
            self.server._shell.handle(events.Message(peer, beat))
        return time.thread_time() - begun

    async def _beat(self, server: ManagerServer, peer: events.Peer, workers: list[manager_pb2.WorkerStatus]) -> None:
        """A replica says each second that it serves."""
        for sequence in count(1):
            await asyncio.sleep(self._config.deadlines.heartbeat)
            sent = manager_pb2.ReplicaHeartbeat(sequence=sequence, workers=workers, serving=True).SerializeToString()
            server._shell.handle(events.Message(peer, manager_pb2.ReplicaHeartbeat.FromString(sent)))


async def _read(outbox: Outbox[Any]) -> None:
    while await outbox.take() is not None:
        pass


async def browse(address: str, browsers: int, seconds: float) -> int:
    """So many browsers ask for so long, each once a second, spread over it. Returns the bytes of one overview."""
    async with httpx.AsyncClient(base_url=f"http://{address}", timeout=60, trust_env=False) as client:

        async def ask(number: int) -> int:
            await asyncio.sleep(number / max(1, browsers))
            told = 0
            end = time.monotonic() + seconds - 1
            while time.monotonic() < end:
                told = len((await client.get("/v1/overview")).raise_for_status().content)
                await asyncio.sleep(1)
            return told

        found = await asyncio.gather(*(ask(number) for number in range(browsers)), asyncio.sleep(seconds))
        return max((size for size in found if size is not None), default=0)


def main() -> None:
    """Prints what was measured."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--replicas", type=int, default=500)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=10.0)
    asked = parser.parse_args()
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder, Cluster(asked.replicas, asked.workers, Path(folder)) as cluster:

        def build() -> float:
            overviews = Overviews(cluster.server)
            begun = time.thread_time()
            overviews.text(Caller("benchmark", ()))
            return time.thread_time() - begun

        each = [cluster.on_loop(build) for _ in range(15)]
        print(f"{asked.replicas} replicas of {asked.workers} workers")
        middle, least = statistics.median(each) * 1000, min(each) * 1000
        print(f"one overview built: {middle:.1f} ms of the loop ({least:.1f} at least)")
        cluster.on_loop(cluster.beat_all)
        told = [cluster.on_loop(cluster.beat_all) for _ in range(3)]
        print(f"a heartbeat of each replica: {min(told) * 1000:.0f} ms of the loop")
        without = 0.0
        for browsers in (0, 1, 5):
            before = cluster.on_loop(time.thread_time)
            begun = time.monotonic()
            size = asyncio.run(browse(cluster.server.http_address, browsers, asked.seconds))
            used = (cluster.on_loop(time.thread_time) - before) / (time.monotonic() - begun) * 1000
            without = without or used
            more = f"{used - without:.0f} more than with none; {size:,} bytes an answer"
            print(
                f"{browsers} browsers: {used:.0f} ms of the loop a second ({more if browsers else 'heartbeats only'})"
            )


if __name__ == "__main__":
    main()
