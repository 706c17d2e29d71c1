"""How fast one relay asks another one for chunks over TCP, against a raw socket between the same two processes.

On loopback; chunks and raw sockets take turns, so that whatever else the machine does slows both. Nothing is digested.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from statistics import median

import numpy as np
import psutil
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks.chunk_host import FRAME, KEY, chunks_in
from ckpt_engine.transport.tcp.asker import TcpAsker
from ckpt_engine.v1.weights_pb2 import OfferedRegion

SLOT = 256 << 20
CHUNK = 8 << 20
AHEAD = 2
ROUNDS = 7


@pytest.mark.parametrize("run", [CHUNK, 16 << 10], ids=["one run", "runs of 16 KiB"])
def test_chunks_beside_a_raw_socket(benchmark: BenchmarkFixture, run: int) -> None:
    command = [sys.executable, "-m", "benchmarks.chunk_host", *map(str, (SLOT, CHUNK, run))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as host:
        assert host.stdout is not None
        offered, port = host.stdout.readline().split()
        chunks = chunks_in(SLOT, CHUNK, run)
        slot = np.zeros(SLOT, np.uint8)
        asker = TcpAsker(
            OfferedRegion.FromString(bytes.fromhex(offered)), "relay near", "relay far", time.monotonic() + 60
        )
        raw = socket.create_connection(("127.0.0.1", int(port)))

        def ask() -> None:
            asker.begin(KEY, 0, slot.data)
            for number in range(AHEAD):
                asker.ask(number)
            for number, runs in enumerate(chunks):
                assert asker.receive(number, runs, lambda: None).relay == ""
                if number + AHEAD < len(chunks):
                    asker.ask(number + AHEAD)

        def receive() -> None:
            raw.send(b"f")
            at, end = 0, len(chunks) * CHUNK
            while at < end:
                at += raw.recv_into(slot.data[at : min(end, at + FRAME)], 0, socket.MSG_WAITALL)

        times: dict[str, list[float]] = {"chunks": [], "raw": []}
        cpu: dict[str, list[float]] = {"chunks": [], "raw": []}
        for turn in range(ROUNDS + 1):
            for name, way in (("chunks", ask), ("raw", receive)):
                began, before = time.perf_counter(), _cpu(host.pid)
                way()
                if turn:
                    times[name].append(time.perf_counter() - began)
                    cpu[name].append(_cpu(host.pid) - before)
        asker.close()
        raw.close()
        host.communicate()
    speeds = {name: len(chunks) * CHUNK / median(each) / 1e9 for name, each in times.items()}
    used = {name: round(median(each) / len(chunks) / CHUNK * 1e9, 3) for name, each in cpu.items()}
    benchmark.pedantic(lambda: None, rounds=1)  # the rounds are in `extra_info`
    benchmark.extra_info.update(
        gigabytes_per_second={name: round(speed, 3) for name, speed in speeds.items()},
        cpu_seconds_a_gigabyte=used,
        ratio_to_raw=round(speeds["chunks"] / speeds["raw"], 3),
        load=os.getloadavg()[0],
    )
    print(f"\n{benchmark.name}: " + ", ".join(f"{name} {speed:.2f} GB/s" for name, speed in speeds.items()), used)


def _cpu(pid: int) -> float:
    """CPU seconds of this process and another one."""
    return sum(sum(psutil.Process(each).cpu_times()[:2]) for each in (pid, os.getpid()))
