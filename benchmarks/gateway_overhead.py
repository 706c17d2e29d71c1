"""What a gateway costs: 64 streams of paced engines, asked directly, through the gateway, and through both routers.

`engines/run routers -- .venv/bin/python -m benchmarks.gateway_overhead [RESULT.json]`; without the routers'
environment they are left out. All ways are measured in turn, several rounds, so that what else the machine does meets
them alike; what a way costs is its distance from the direct one of the same round, and the median round counts. Each
stream asks one request after the other, and streams begin apart, so that requests come as they do in a long run. What a
way takes of the processors says the same on a busy machine as on a quiet one. `chrt -f 20` before the command (root)
puts all that is measured before other work of the machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.paced_engine import TOKEN_SECONDS
from ckpt_engine.addresses import split_address
from tests.cluster import eventually
from tests.engines.routers import FLAGS, MODULES, PYTHON, running_router
from tests.gateway.chaos import streamed
from tests.gateway.gateways import running_gateway
from tests.ports import free_port

STREAMS, REQUESTS, TOKENS, ENGINES = 64, 2, 64, 2
ROUNDS = int(os.environ.get("ROUNDS", "5"))


async def one_round(urls: list[str]) -> dict[str, Any]:
    """All streams, spread over these URLs: seconds to each first token, tokens a second of all, requests by replica."""
    first: list[float] = []
    replicas: Counter[str] = Counter()

    async def one(number: int) -> None:
        await asyncio.sleep(number / STREAMS * TOKENS * TOKEN_SECONDS)
        host, port = split_address(urls[number % len(urls)].removeprefix("http://"))
        for request in range(REQUESTS):
            prompt = [number, request, 3]
            body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": TOKENS}, "stream": True}
            begun, last = time.perf_counter(), None
            async for event in streamed(host, port, body, "/generate"):
                if last is None:
                    first.append(time.perf_counter() - begun)
                last = event if event != "[DONE]" else last
            assert last is not None
            assert last["meta_info"]["completion_tokens"] == TOKENS, last
            replicas.update(leg["replica"] for leg in last["meta_info"].get("ckpt_engine", {}).get("legs", ()))

    begun = time.perf_counter()
    await asyncio.gather(*(one(number) for number in range(STREAMS)))
    seconds = time.perf_counter() - begun
    first.sort()
    return {
        "first_token_p50_ms": statistics.median(first) * 1e3,
        "first_token_p99_ms": first[int(len(first) * 0.99)] * 1e3,
        "tokens_a_second": STREAMS * REQUESTS * TOKENS / seconds,
        **({"skew": max(replicas.values()) * ENGINES / sum(replicas.values())} if replicas else {}),
    }


@contextlib.contextmanager
def engines() -> Iterator[list[str]]:
    """Paced ones, each a process."""
    ports = [free_port() for _ in range(ENGINES)]
    command = [sys.executable, "-m", "benchmarks.paced_engine", "--port"]
    running = [subprocess.Popen([*command, str(port)]) for port in ports]
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    try:
        for url in urls:
            eventually("an engine answers", 60, lambda url=url: answers(f"{url}/health"))  # type: ignore[misc]
        yield urls
    finally:
        for each in running:
            each.kill()
            each.wait(10)


def answers(url: str) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(url, timeout=5).status_code == 200
    return False


def processes(url: str) -> list[psutil.Process]:
    """Of whoever takes connections there, with those that share the work."""
    _, port = split_address(url.removeprefix("http://"))
    found = psutil.net_connections("tcp")
    pids = {each.pid for each in found if each.status == psutil.CONN_LISTEN and each.laddr.port == port}
    one = psutil.Process(next(pid for pid in pids if pid is not None))
    parent = one.parent()
    first = parent if parent is not None and parent.pid != os.getpid() else one  # a worker's siblings listen as well
    return [first, *first.children(recursive=True)]


def processor_seconds(processes: list[psutil.Process]) -> float:
    """That they have taken so far."""
    return sum(used.user + used.system for used in (each.cpu_times() for each in processes))


def measure() -> dict[str, Any]:
    """All ways in turn."""
    with contextlib.ExitStack() as stack:
        path = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        urls = stack.enter_context(engines())
        ways = {"direct": urls}
        given = [part for url in urls for part in ("--replica", url)]
        for workers in (1, 2):
            gateway = stack.enter_context(running_gateway(path / f"{workers}.log", *given, "--workers", str(workers)))
            ways[f"gateway, {workers} workers"] = [gateway.ready().url]
        for kind in MODULES if PYTHON else ():
            router = stack.enter_context(running_router(kind, urls, path / f"{kind}.log", *FLAGS))
            eventually(f"{kind}-router has found them", 60, lambda router=router: len(router.healthy()) == ENGINES)  # type: ignore[misc]
            ways[f"{kind}-router"] = [router.url]
        rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in ways}
        for number in range(ROUNDS + 1):
            for name, at in ways.items():
                between = processes(at[0]) if at is not urls else []
                begun = processor_seconds(between)
                found = asyncio.run(one_round(at))
                used = processor_seconds(between) - begun
                found["processor_us_a_token"] = used * 1e6 / (STREAMS * REQUESTS * TOKENS)
                if number:  # the first one warms everything up
                    rounds[name].append(found)
    return {name: _summary(found, rounds["direct"]) for name, found in rounds.items()}


def _summary(rounds: list[dict[str, Any]], direct: list[dict[str, Any]]) -> dict[str, float]:
    """Medians of the rounds; and of the distances from the direct way, round by round."""
    found = {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}
    pairs = list(zip(rounds, direct, strict=True))
    for name in ("first_token_p50_ms", "first_token_p99_ms"):
        found[f"{name}_more"] = statistics.median(mine[name] - its[name] for mine, its in pairs)
    found["tokens_percent"] = statistics.median(
        100 * mine["tokens_a_second"] / its["tokens_a_second"] for mine, its in pairs
    )
    return found


def main() -> None:
    """Measures, prints, and writes the result where it is told to."""
    load = os.getloadavg()[0]
    found = measure()
    for name, numbers in found.items():
        print(f"{name:22}", *(f"{key} {value:.2f}" for key, value in numbers.items()))
    print(f"load of the machine before: {load:.1f} on {len(os.sched_getaffinity(0))} processors")
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(json.dumps({**found, "load_before": load}, indent=1) + "\n")


if __name__ == "__main__":
    main()
