"""What a gateway costs: 64 streams of paced engines, asked directly, through the gateway, and through both routers.

`engines/run routers -- .venv/bin/python -m benchmarks.gateway_overhead [RESULT.json]`; without the routers'
environment they are left out. All ways are measured in turn, several rounds, so that what else the machine does meets
them alike. Prints time to first token and tokens a second.
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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from tests.cluster import eventually
from tests.engines.routers import FLAGS, MODULES, PYTHON, running_router
from tests.gateway.gateways import running_gateway
from tests.ports import free_port

STREAMS, TOKENS, ROUNDS, ENGINES = 64, 64, 5, 2


async def one_round(urls: list[str]) -> dict[str, Any]:
    """All streams at once, spread over these URLs: seconds to each first token, and tokens a second of all."""
    first: list[float] = []
    limits = httpx.Limits(max_connections=STREAMS)

    async def one(client: httpx.AsyncClient, number: int) -> None:
        body = {"input_ids": [number, 2, 3], "sampling_params": {"max_new_tokens": TOKENS}, "stream": True}
        begun, heard = time.perf_counter(), False
        async with client.stream("POST", f"{urls[number % len(urls)]}/generate", json=body) as answer:
            assert answer.status_code == 200, (await answer.aread()).decode()
            async for data in answer.aiter_raw():
                if not heard and b"data:" in data:
                    first.append(time.perf_counter() - begun)
                    heard = True

    async with httpx.AsyncClient(timeout=60, limits=limits) as client:
        begun = time.perf_counter()
        await asyncio.gather(*(one(client, number) for number in range(STREAMS)))
        seconds = time.perf_counter() - begun
    return {"first": first, "tokens_a_second": STREAMS * TOKENS / seconds}


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
                found = asyncio.run(one_round(at))
                if number:  # the first one warms everything up
                    rounds[name].append(found)
    return {name: _summary(found) for name, found in rounds.items()}


def _summary(rounds: list[dict[str, Any]]) -> dict[str, float]:
    first = sorted(seconds for each in rounds for seconds in each["first"])
    return {
        "first_token_p50_ms": statistics.median(first) * 1e3,
        "first_token_p99_ms": first[int(len(first) * 0.99)] * 1e3,
        "tokens_a_second": statistics.median(each["tokens_a_second"] for each in rounds),
    }


def main() -> None:
    """Measures, prints, and writes the result where it is told to."""
    found = measure()
    load = os.getloadavg()[0]
    for name, numbers in found.items():
        print(f"{name:22}", *(f"{key} {value:8.1f}" for key, value in numbers.items()))
    print(f"load of the machine: {load:.1f} on {len(os.sched_getaffinity(0))} processors")
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(json.dumps({**found, "load": load}, indent=1) + "\n")


if __name__ == "__main__":
    main()
