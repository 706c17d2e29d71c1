"""What the gateway and an agent's calls cost in this tree and in another one, in turns: `before` is a path to it.

`.venv/bin/python -m benchmarks.against_before BEFORE [RESULT.json]`, with BEFORE a checkout or an unpacked archive of
another commit, whose agents are started by `ckpt-engine agent`. It measures, and decides nothing. A gateway process
of each tree stands before the same paced engines. What counts is the time for which the processors ran it, as the
scheduler counts it in nanoseconds, for a token that went through: it says nearly the same on a busy machine as on a
quiet one. The calls of an agent are those of a pause, to one such engine; the pauses of updates are those of two
replicas of the reference engine, one with each tree's agent. `chrt -f 20` before the command (root) puts all that is
measured before other work of the machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import torch

from benchmarks.gateway_overhead import REQUESTS, STREAMS, TOKENS, answers, engines, one_round
from ckpt_engine import Trainer
from tests.cluster import Replica, eventually, running_cluster
from tests.ports import free_port
from tests.tiny_model import make_tiny_qwen3

TURNS = int(os.environ.get("TURNS", "12"))
PAUSES = 100
"""Of each turn: three calls each."""

CALLS = f"""
import asyncio, inspect, statistics, sys, time
from ckpt_engine.agent.http import EngineClient
async def main():
    client, took = EngineClient(sys.argv[1]), []
    for _ in range({PAUSES}):
        begun = time.perf_counter()
        for route in ("/pause", "/stamp", "/resume"):
            await client.call("POST", route, 10.0, {{"seconds": 1.0}})
        took.append(time.perf_counter() - begun)
    if inspect.isawaitable(closing := client.close()):
        await closing
    print(statistics.median(took) * 1e3)
asyncio.run(main())
"""
"""Prints the median milliseconds of a pause's calls."""

NOW, BEFORE = "now", "before"
Found: TypeAlias = dict[str, dict[str, list[float]]]
"""Of each measure and tree: what each turn found."""


class Trees:
    """This tree and the other one."""

    def __init__(self, before: Path) -> None:
        self.paths = {NOW: Path(__file__).resolve().parents[1], BEFORE: before.resolve()}

    def environment(self, tree: str) -> dict[str, str]:
        """Has a process import this tree's packages."""
        path = self.paths[tree]
        return {"PYTHONPATH": f"{path}:{path / 'adapters'}", "OMP_NUM_THREADS": "1"}

    def in_turns(self, turn: int) -> list[str]:
        """Both, the other one first each time."""
        return [NOW, BEFORE] if turn % 2 else [BEFORE, NOW]


def ran_seconds(pid: int) -> float:
    """For how long the processors have run a process."""
    tasks = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(each.read_text().split()[0]) for each in tasks) / 1e9


@contextlib.contextmanager
def gateways(trees: Trees, replicas: list[str]) -> Iterator[dict[str, tuple[str, int]]]:
    """One of one worker of each tree: its URL and process."""
    given = [part for url in replicas for part in ("--replica", url)]
    with contextlib.ExitStack() as stack:
        found = {}
        for tree in (NOW, BEFORE):
            listen = f"127.0.0.1:{free_port()}"
            command = [sys.executable, "-P", "-m", "ckpt_engine", "gateway", "--listen", listen, *given]
            process = stack.enter_context(subprocess.Popen(command, env={**os.environ, **trees.environment(tree)}))
            stack.callback(process.kill)
            found[tree] = (f"http://{listen}", process.pid)
        for url, _ in found.values():
            eventually("a gateway is ready", 120, lambda url=url: answers(f"{url}/readyz"))  # type: ignore[misc]
        yield found


def measure_gateways(trees: Trees, urls: list[str], found: Found) -> None:
    """The processor's time for a token, and the time to the first one."""
    with gateways(trees, urls) as running:
        for turn in range(TURNS + 1):
            for tree in trees.in_turns(turn):
                url, pid = running[tree]
                begun = ran_seconds(pid)
                seen = asyncio.run(one_round([url]))
                seen["processor_us_a_token"] = (ran_seconds(pid) - begun) * 1e6 / (STREAMS * REQUESTS * TOKENS)
                for name in ("processor_us_a_token", "first_token_p50_ms", "first_token_p99_ms"):
                    if turn:  # the first one warms everything up
                        found.setdefault(name, {}).setdefault(tree, []).append(seen[name])


def measure_calls(trees: Trees, url: str, found: Found) -> None:
    """The calls of a pause."""
    for turn in range(TURNS):
        for tree in trees.in_turns(turn):
            command = [sys.executable, "-P", "-c", CALLS, url]
            told = subprocess.run(
                command, env={**os.environ, **trees.environment(tree)}, stdout=subprocess.PIPE, timeout=300, check=True
            )
            found.setdefault("calls_of_a_pause_ms", {}).setdefault(tree, []).append(float(told.stdout))


def measure_pauses(trees: Trees, found: Found) -> None:
    """Updates of one replica at a time, from pause to resume."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory)
        model = make_tiny_qwen3(path / "model", 1)
        with running_cluster(path / "cluster") as cluster:
            for tree in (NOW, BEFORE):
                command = [sys.executable, "-P", "-m", "ckpt_engine", "agent", "--manager", cluster.address]
                command += ["--engine", "reference", "--model", str(path / "model"), "--name", tree]
                cluster.replicas.append(Replica(cluster, tree, command, trees.environment(tree)))
            for replica in cluster.replicas:
                replica.registered()
            with Trainer(cluster.address, lineage="run") as trainer:
                trainer.publish(model)
                for turn in range(3 * TURNS + 1):
                    for tree in trees.in_turns(turn):
                        with torch.no_grad():
                            for parameter in model.parameters():
                                parameter.add_(0.125)
                        report = trainer.update_weights(replicas=[tree])
                        assert report.ok, report
                        if turn:
                            pause = report.replicas[0].pause_seconds * 1e3
                            found.setdefault("pause_of_an_update_ms", {}).setdefault(tree, []).append(pause)


def spread(values: list[float]) -> dict[str, float]:
    """Median and quartiles."""
    low, middle, high = statistics.quantiles(values, n=4)
    return {"median": round(middle, 3), "25 %": round(low, 3), "75 %": round(high, 3)}


def main() -> None:
    """Measures, prints, and writes the result where it is told to."""
    trees, load, found = Trees(Path(sys.argv[1])), os.getloadavg()[0], Found()
    begun = time.monotonic()
    with engines() as urls:
        measure_gateways(trees, urls, found)
        measure_calls(trees, urls[0], found)
    measure_pauses(trees, found)
    told: dict[str, Any] = {}
    for name, each in found.items():
        ratios = [now / before for now, before in zip(each[NOW], each[BEFORE], strict=True)]
        told[name] = {NOW: spread(each[NOW]), BEFORE: spread(each[BEFORE]), "now to before": spread(ratios)}
        print(f"{name:22}", json.dumps(told[name]))
    print(f"{time.monotonic() - begun:.0f} s; load before: {load:.1f} on {len(os.sched_getaffinity(0))} processors")
    if len(sys.argv) > 2:
        facts = {"turns": TURNS, "python": platform.python_version(), "load_before": round(load, 1)}
        Path(sys.argv[2]).write_text(json.dumps({**told, **facts}, indent=1) + "\n")


if __name__ == "__main__":
    main()
