"""An update of 64 KiB with each agent a session over a TCP connection of its own:
python -m benchmarks.control_plane_connections [--count N]... [--rounds N] [-o FILE]

What the manager costs, apart from agents: those are light (light_sessions.py says what each does), in a few processes.
The manager is `ckpt-engine manager` with a ledger on disk; the one trainer rank is light, too: it seals by digesting
its 64 KiB. Timed is its call, from request to report; and then, while nothing runs and heartbeats go on, what statuses
and scrapes wait for. The processes share the machine's processors, so times are upper bounds; counts of calls, messages
and connections do not depend on that.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from statistics import quantiles
from typing import Any

import httpx
import torch

from benchmarks.message_counts import per_update
from benchmarks.test_control_plane import ROOT, manager, percentile
from ckpt_engine.v1 import manager_pb2
from tests.manager.scripted_members import ScriptedTrainer, stub_at
from tests.ports import free_address

PROCESSES = 2
TENSORS, SIDE = 8, 64
WARM_UP = 3
LOOKS = 20


class Sessions:
    """The processes of all light replicas."""

    def __init__(self, address: str, count: int) -> None:
        firsts = [count * number // PROCESSES for number in range(PROCESSES + 1)]
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-m", "benchmarks.light_sessions", address, str(first), str(last - first)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            for first, last in pairwise(firsts)
        ]
        for process in self._processes:
            assert self._line(process) == "ready", "the sessions were not welcomed; see above"

    def counts(self) -> Counter[str]:
        """What all have sent and received so far."""
        found: Counter[str] = Counter()
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
            found.update(json.loads(self._line(process)))
        return found

    def end(self) -> None:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(10)
            except (
                subprocess.TimeoutExpired
            ):  # hundreds of channels, which may take longer to close than they are worth
                process.kill()

    def _line(self, process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        return process.stdout.readline().strip()


def weights() -> dict[str, torch.Tensor]:
    """New values: equal ones would have equal digests, which are not sent or fetched again."""
    return {f"layer_{index}": torch.randn(SIDE, SIDE).bfloat16() for index in range(TENSORS)}


def connections(address: str) -> int:
    """How many TCP connections the server at this address of loopback has."""
    port = f":{int(address.rpartition(':')[2]):04X}"
    tables = [Path("/proc/net", name).read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    lines = [line.split() for table in tables for line in table]
    return sum(line[1].endswith(port) and line[3] == "01" for line in lines)


async def looks(stub: Any, http: str) -> dict[str, float]:
    """What those that watch wait for while nothing runs: the median of LOOKS answers, milliseconds."""

    async def median(ask: Callable[[], Awaitable[Any]]) -> float:
        seconds = []
        for _ in range(LOOKS):
            begun = time.perf_counter()
            await ask()
            seconds.append(time.perf_counter() - begun)
            await asyncio.sleep(0.1)
        return round(percentile(seconds, 0.5) * 1e3, 1)

    async with httpx.AsyncClient(base_url=f"http://{http}", timeout=60) as client:
        return {
            "GetStatus": await median(lambda: stub.GetStatus(manager_pb2.GetStatusRequest(), timeout=60)),
            **{route: await median(partial(client.get, route)) for route in ("/v1/replicas", "/metrics")},
        }


async def updates(address: str, http: str, count: int, rounds: int) -> dict[str, Any]:
    """Measures updates of so many replicas."""
    sessions = await asyncio.to_thread(Sessions, address, count)
    seconds: list[float] = []
    try:
        async with stub_at(address) as stub:
            trainer = ScriptedTrainer(stub, lineage="control-plane")
            await trainer.join(weights())
            async with trainer.stream.beating(manager_pb2.Heartbeat):
                before: Counter[str] = Counter()
                for number in range(WARM_UP + rounds):
                    if number == WARM_UP:
                        before = await asyncio.to_thread(sessions.counts)
                    trainer.weights = weights()
                    begun = time.perf_counter()
                    call = trainer.update(min_replicas=count)
                    await trainer.seal()
                    events = await call
                    seconds.append(time.perf_counter() - begun)
                    report = events[-1].report
                    assert report.ok, report
                    assert len(report.replicas) == count, report
                used = per_update(before, await asyncio.to_thread(sessions.counts), rounds)
                connected = connections(address)
                watched = await looks(stub, http)
    finally:
        sessions.end()
    taken = seconds[WARM_UP:]
    first, _, third = quantiles(taken, n=4)
    return {
        "replicas": count,
        "rounds": rounds,
        "connections": connected,
        "first_milliseconds": round(seconds[0] * 1e3, 1),
        "p50_milliseconds": round(percentile(taken, 0.5) * 1e3, 1),
        "p90_milliseconds": round(percentile(taken, 0.9) * 1e3, 1),
        "least_milliseconds": round(min(taken) * 1e3, 1),
        "most_milliseconds": round(max(taken) * 1e3, 1),
        "quartiles_milliseconds": [round(first * 1e3, 1), round(third * 1e3, 1)],
        "looks_milliseconds": watched,
        "members": used,  # of replicas; the trainer's are those of test_control_plane.py
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="updates with a connection for each agent")
    parser.add_argument("--count", type=int, action="append", help="replicas; 64 and 500 unless given")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, Any] = {
        "machine": f"{platform.machine()}, {len(os.sched_getaffinity(0))} processors",
        "load_before": os.getloadavg()[0],
        "versions": {"python": platform.python_version(), "torch": torch.__version__}
        | {name: version(name) for name in ("grpcio", "protobuf")},
        "commit": subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=ROOT, text=True).strip(),
        "agents": f"light sessions in {PROCESSES} processes, each over a connection of its own",
        "results": [],
    }
    for count in options.count or [64, 500]:
        http = free_address()
        with tempfile.TemporaryDirectory(prefix="ck-plane-") as folder, manager(Path(folder), http) as address:
            found["results"].append(asyncio.run(updates(address, http, count, options.rounds)))
        print(json.dumps(found["results"][-1], indent=1), flush=True)
    if options.output:
        options.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
