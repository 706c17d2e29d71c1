"""The smallest engine that an agent can drive: one process, one worker, no model, up in a tenth of a second.

Everything about it is real (process, HTTP, state word, worker channel) except that it computes nothing: its "weights"
are the manifest's root. Tests of the agent's own duties use it; what needs weights uses the reference engine.
Run as a script it is the engine; imported it is its adapter.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx

from ckpt_engine.agent.http import EngineClient
from ckpt_engine.core.check_verdict import Score
from ckpt_engine.core.labels import version_label
from ckpt_engine.core.manifest import DIGEST_FORMAT
from ckpt_engine.engine.adapter import (
    AdapterAvailability,
    AdapterSettings,
    Capabilities,
    EngineAdapter,
    EngineCallError,
    EngineInfo,
    LaunchPlan,
)
from ckpt_engine.engine.kinds import EngineKind
from ckpt_engine.gate.directory import EngineDirectory
from ckpt_engine.gate.page import EnginePage
from ckpt_engine.install.channel import WorkerChannel
from ckpt_engine.v1 import manager_pb2, weights_pb2
from ckpt_engine.v1.worker_pb2 import (
    CheckOrder,
    WantOrder,
    WorkerChecked,
    WorkerInstalled,
    WorkerPrepared,
    WorkerReady,
    WorkerRequest,
)

ROOT = Path(__file__).parents[2]

ENGINE = EngineKind(name="small", title="the small engine", driver="tests.agent.small_engine")


CAPABILITIES = Capabilities(
    frozenset({manager_pb2.PAUSE_MODE_KEEP, manager_pb2.PAUSE_MODE_ABORT}), manager_pb2.PAUSE_MODE_KEEP
)


class SmallAdapter:
    """Drives it. Every call is a POST to the route of that name."""

    kind = "small"
    capabilities = CAPABILITIES

    def __init__(self, settings: AdapterSettings) -> None:
        self._client = EngineClient(settings.url.rstrip("/"))

    async def probe(self, seconds: float) -> EngineInfo:
        info = await self._call("probe", seconds)
        supported, reason, untested = bool(info["supported"]), str(info["reason"]), str(info["untested"])
        return EngineInfo("1", 1, supported, reason, bool(info["paused"]), False, untested)

    guesses = None

    async def count_guesses(self, seconds: float) -> None:
        """It has no draft."""

    async def healthy(self, seconds: float) -> bool:
        try:
            await self._client.call("GET", "/health", seconds)
        except EngineCallError:
            return False
        return True

    async def prepare(self, seconds: float) -> None:
        await self._call("prepare", seconds)

    async def score(self, tokens: Sequence[int], more: int, seconds: float, cached: bool = False) -> Score:
        told = await self._call("score", seconds)
        seen = told["seen"]
        assert isinstance(seen, float)
        return Score((seen,) * (len(tokens) - 1), (1,) * more, (seen,) * more)

    async def pause(self, mode: manager_pb2.PauseMode, seconds: float) -> None:
        await self._call("pause", seconds)

    def keeps_caches(self, mode: manager_pb2.PauseMode) -> bool:
        return False

    async def install(self, epoch: int, seconds: float) -> None:
        await self._call("install", seconds)

    async def resume(self, seconds: float) -> None:
        await self._call("resume", seconds)

    async def discard(self, seconds: float) -> None:
        await self._call("discard", seconds)

    async def sleep(self, level: int, seconds: float) -> None:
        await self._call("sleep", seconds)

    async def wake(self, tags: Sequence[str], seconds: float) -> None:
        await self._call("wake", seconds)

    async def stamp(self, identity: weights_pb2.Identity, seconds: float) -> None:
        await self._call("stamp", seconds, {"label": version_label(identity)})

    async def calls(self) -> list[str]:
        """What the engine was asked to do so far, oldest first."""
        calls = (await self._call("probe", 5))["calls"]
        assert isinstance(calls, list)
        return calls

    async def close(self) -> None:
        self._client.close()

    async def _call(self, route: str, seconds: float, body: Mapping[str, str] | None = None) -> dict[str, object]:
        answer: dict[str, object] = (await self._client.call("POST", f"/{route}", seconds, body)).json()
        return answer


def create_adapter(settings: AdapterSettings) -> EngineAdapter:
    return SmallAdapter(settings)


def launch_plan(arguments: Sequence[str], port: int, model: str) -> LaunchPlan:
    if "--port" in arguments:
        raise ValueError("the port is the agent's to choose")
    url = f"http://127.0.0.1:{port}/"
    environment = {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    return LaunchPlan((sys.executable, __file__, "--port", str(port), *arguments), url, 1, environment)


def refused_command(command: Sequence[str]) -> str:
    return "Small 0 is too old: it must be 1 or newer" if "--too-old" in command else ""


def availability() -> AdapterAvailability:
    return AdapterAvailability(True, "1", "")


def environment() -> dict[str, str]:
    """For an engine that a test starts by hand."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path}


def by_hand(port: int, root: Path, *arguments: str) -> list[str]:
    """The command of such an engine; its directory is made below `root`."""
    return [sys.executable, __file__, "--port", str(port), "--root", str(root), *arguments]


async def answers(port: int) -> None:
    """Until the engine at that port is healthy."""
    async with asyncio.timeout(60), httpx.AsyncClient() as client:
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if (await client.get(f"http://127.0.0.1:{port}/health")).status_code == 200:
                    return
            await asyncio.sleep(0.05)


class Server(ThreadingHTTPServer):
    """The engine: `paused` is all the state it has beside its state word. calls: what it was asked to do."""

    daemon_threads = True

    def __init__(self, port: int, directory: EngineDirectory, options: argparse.Namespace) -> None:
        super().__init__((options.host, port), Handler)
        self.directory = directory
        self.options = options
        self.slot = EnginePage(directory.page).claim(0, 1)
        self.channel = WorkerChannel(directory.endpoint, 0, self.slot.boot_id)
        self.paused = options.paused
        self.deaf = False
        self.calls: list[str] = []
        self.seen = 0.0  # what its weights make of any token
        self.started = time.monotonic()

    def prepare(self) -> None:
        """What a worker does when its engine is told to prepare: it needs nothing of any manifest."""
        reply = self.channel.ask(WorkerRequest(want_prepare=WantOrder()), 5)
        if reply.HasField("ready"):
            plans = [hashlib.sha256(reply.ready.plan).digest()]
            self.channel.ask(WorkerRequest(ready=WorkerReady(fence=reply.ready.fence, plans=plans)), 5)
        if reply.HasField("check"):
            self.load(reply.check)
        if reply.HasField("prepare"):
            digest = hashlib.sha256(reply.prepare.manifest).digest()
            needs = weights_pb2.WorkerNeeds(manifest_digest=digest).SerializeToString(deterministic=True)
            prepared = WorkerPrepared(
                digest_format=DIGEST_FORMAT, fence=reply.prepare.fence, needs=needs, model="SmallModel"
            )
            self.channel.ask(WorkerRequest(prepared=prepared), 5)

    def load(self, order: CheckOrder) -> None:
        """One number is all of its weights. `--broken` says what an install of ours does wrong."""
        broken = "" if order.by_engine else self.options.broken
        checked = WorkerChecked(fence=order.fence)
        if broken == "refuses":
            checked.problem.CopyFrom(
                weights_pb2.Problem(code=weights_pb2.Problem.CODE_INTERNAL, message="no such layer")
            )
        elif broken != "keeps":
            self.seen = -float(order.seed) - (0.1 if broken == "differs" else 0.0)
        self.calls.append(f"load {order.seed} {'own' if order.by_engine else 'ours'}")
        self.channel.ask(WorkerRequest(checked=checked), 5)

    def install(self) -> None:
        """Dirty, some time, clean: with the identity that was ordered."""
        reply = self.channel.ask(WorkerRequest(want_install=WantOrder()), 5)
        if reply.HasField("install"):
            order = reply.install
            self.slot.dirty(order.fence.epoch)
            if self.options.install_hangs:
                threading.Event().wait()
            time.sleep(self.options.install_seconds)
            self.slot.clean(order.fence.epoch, order.identity)
            report = manager_pb2.WorkerReport(bytes=len(order.plan), copies=1)
            self.channel.ask(WorkerRequest(installed=WorkerInstalled(fence=order.fence, report=report)), 5)


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, format: str, *arguments: object) -> None:
        return

    def do_GET(self) -> None:
        while self.server.deaf:
            time.sleep(0.1)
        if self.path == "/health":
            self._answer(200 if time.monotonic() - self.server.started > self.server.options.healthy_after else 503)
        elif self.path == "/ckpt_engine/info":
            self._answer(200, directory=str(self.server.directory.path))
        else:
            self._answer(404)

    def do_POST(self) -> None:
        route = self.path.strip("/")
        if route == "probe":
            reason = self.server.options.unsupported
            calls = self.server.calls
            untested = self.server.options.untested
            self._answer(
                200, supported=not reason, reason=reason, paused=self.server.paused, calls=calls, untested=untested
            )
            return
        if route == "score":
            self._answer(500 if self.server.paused else 200, seen=self.server.seen)
            return
        content = json.loads(self.rfile.read(int(self.headers.get("content-length", 0))) or b"{}").get("label", "")
        self.server.calls.append(" ".join(filter(None, (route, content))))
        stamps = sum(call.startswith("stamp") for call in self.server.calls)
        if route == "stamp" and stamps <= self.server.options.refused_stamps:
            self._answer(500, detail="no label today")
            return
        if route == "deaf":
            self.server.deaf = True
        if route == "end":
            os._exit(self.server.options.exit_status)
        if route == "prepare":
            self.server.prepare()
        if route == "install":
            self.server.install()
        if route in ("pause", "resume"):
            self.server.paused = route == "pause"
        self._answer(200)

    def _answer(self, status: int, **body: object) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--healthy-after", type=float, default=0.0)
    parser.add_argument("--exit-status", type=int, default=3)
    parser.add_argument("--unsupported", default="")
    parser.add_argument("--untested", default="")
    parser.add_argument("--broken", default="", choices=["", "differs", "keeps", "refuses"])
    parser.add_argument("--too-old", action="store_true")
    parser.add_argument("--install-seconds", type=float, default=0.0)
    parser.add_argument("--install-hangs", action="store_true")
    parser.add_argument("--paused", action="store_true")
    parser.add_argument("--refused-stamps", type=int, default=0)
    parser.add_argument("--root", type=Path)
    options = parser.parse_args()
    directory = EngineDirectory.from_environment() or EngineDirectory.create(options.root)

    server = Server(options.port, directory, options)
    print(f"small engine with boot id {server.slot.boot_id.hex()}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
