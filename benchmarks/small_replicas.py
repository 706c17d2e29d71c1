"""Replicas of a tiny model, all in this one process: python -m benchmarks.small_replicas MANAGER COUNT.

Real: ReplicaAgent with its state machine, its gRPC channel (one each) and its blobs; the ZeroMQ channel, the state
page and the runtime directory; EngineWorker with the real Installer, which records the loader, reads over shared memory
and verifies every tensor. Not there: an engine, so pausing and resuming are function calls that do nothing, and no HTTP
and no process stands between agent and worker.

Prints "ready" when every agent has said that its engine is ready; then, for each line of its input, a JSON object of
counts (see message_counts). Ends with its input.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.message_counts import CountingStub
from ckpt_engine.agent import session
from ckpt_engine.agent.channel import AgentChannel, Answer
from ckpt_engine.channel import ManagerStub
from ckpt_engine.engine.adapter import Capabilities, EngineAdapter, EngineInfo
from ckpt_engine.engine.target import ModuleTarget
from ckpt_engine.gate.directory import EngineDirectory
from ckpt_engine.gate.page import EnginePage, WorkerWord
from ckpt_engine.install.worker import EngineWorker
from ckpt_engine.machines.events import EngineReady
from ckpt_engine.v1 import manager_pb2, weights_pb2

TENSORS = 8
SIDE = 64
WORKER_THREADS = 8
"""Replicas that install at the same time; more would only wait for this process's interpreter."""


READY_SECONDS = 1.0
"""Before an engine says that it is ready. Today an agent tells its manager of an engine only if that becomes ready
before the hello or after the welcome; one that does so in between, as one without a start would, is not told."""


class TinyModel(nn.Module):
    """Eight bfloat16 matrices of 64 x 64, 64 KiB in all; its loader copies each to its place."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ParameterDict(
            {f"layer_{index}": torch.randn(SIDE, SIDE).bfloat16() for index in range(TENSORS)}
        )

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        places = dict(self.named_parameters())
        with torch.no_grad():
            for name, tensor in weights:
                places[name].copy_(tensor)


class DirectAdapter:
    """Calls the worker on a thread. Everything that only an engine could do is a no-op."""

    kind = "small"
    capabilities = Capabilities(frozenset({manager_pb2.PAUSE_MODE_KEEP}), manager_pb2.PAUSE_MODE_KEEP)

    def __init__(self, worker: EngineWorker, threads: ThreadPoolExecutor) -> None:
        self._worker, self._threads = worker, threads

    async def probe(self, seconds: float) -> EngineInfo:
        return EngineInfo("1", 1, True, paused=False, asleep=False)

    async def healthy(self, seconds: float) -> bool:
        return True

    async def prepare(self, seconds: float) -> None:
        await asyncio.get_running_loop().run_in_executor(self._threads, self._worker.prepare)

    async def install(self, epoch: int, seconds: float) -> None:
        await asyncio.get_running_loop().run_in_executor(self._threads, self._worker.install, epoch)

    async def pause(self, mode: manager_pb2.PauseMode, seconds: float) -> None:
        return

    async def resume(self, seconds: float) -> None:
        return

    async def sleep(self, level: int, seconds: float) -> None:
        return

    async def wake(self, tags: Sequence[str], seconds: float) -> None:
        return

    async def stamp(self, identity: weights_pb2.Identity, seconds: float) -> None:
        return

    async def close(self) -> None:
        return


class DirectHost:
    """An EngineHost (see agent/engine.py) whose worker lives in this process."""

    default_name = "small"

    def __init__(self, root: Path, ready: Callable[[EngineReady], None], answer: Answer, threads: ThreadPoolExecutor):
        self._root, self._ready, self._answer, self._threads = root, ready, answer, threads
        self.agent_epoch = 0
        self.page: EnginePage | None = None
        self.adapter: EngineAdapter | None = None
        self.channel: AgentChannel | None = None

    async def open(self) -> None:
        self._directory = EngineDirectory.create(self._root)
        self._directory.lock()
        self.agent_epoch = self._directory.next_agent_epoch()
        self.page = EnginePage(self._directory.page)
        self.channel = AgentChannel(self._directory, self._answer)
        await self.channel.start()

    async def run(self) -> None:
        self._worker = EngineWorker(self._directory, 0, 1, ModuleTarget(TinyModel()))
        self.adapter = DirectAdapter(self._worker, self._threads)
        engine = manager_pb2.Engine(kind="small", version="1", url="http://127.0.0.1:1")
        await asyncio.sleep(READY_SECONDS)
        self._ready(EngineReady(engine, 1, paused=False, asleep=False))
        await asyncio.Event().wait()

    async def close(self) -> None:
        """The process ends right after, and its runtime directories are deleted as a whole."""

    def replace(self, reason: str) -> bool:
        return False

    async def look(self, seconds: float) -> None:
        """Nothing: its worker is here."""

    def status(self, word: WorkerWord) -> manager_pb2.WorkerStatus:
        return word.status()


class DirectAgent(session.ReplicaAgent):
    """The agent as it is, with an engine in this process instead of one that it launches or finds."""

    def __init__(self, address: str, name: str, root: Path, threads: ThreadPoolExecutor) -> None:
        # An attached engine is only remembered here, not looked for: that begins in `run`, with the other host.
        settings = session.AgentSettings(address, "reference", url="http://127.0.0.1:1", name=name)
        super().__init__(settings, lambda line: None)
        self.direct = DirectHost(root, self.engine_ready, self._answer_worker, threads)
        self._host = self.direct


async def serve(address: str, count: int, root: Path) -> None:
    """Runs the agents until the input ends."""
    counts: Counter[str] = Counter()
    setattr(session, "ManagerStub", lambda channel: CountingStub(ManagerStub(channel), counts))  # noqa: B010
    threads = ThreadPoolExecutor(WORKER_THREADS, thread_name_prefix="worker")
    agents = [DirectAgent(address, f"small-{number:02d}", root, threads) for number in range(count)]
    stop = asyncio.Event()
    running = [asyncio.ensure_future(agent.run(stop)) for agent in agents]
    loop = asyncio.get_running_loop()
    print("ready", flush=True)
    while await loop.run_in_executor(None, sys.stdin.readline):
        for task in running:
            if task.done():
                task.result()
        asked = sum(agent.direct.channel.counters.requests for agent in agents if agent.direct.channel is not None)
        print(json.dumps({**counts, "worker requests": asked}), flush=True)
    stop.set()
    await asyncio.gather(*running)


def main() -> None:
    torch.set_num_threads(1)
    root = Path(tempfile.mkdtemp(prefix="ckpt-bench-"))
    try:
        asyncio.run(serve(sys.argv[1], int(sys.argv[2]), root))
    finally:
        shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    main()
