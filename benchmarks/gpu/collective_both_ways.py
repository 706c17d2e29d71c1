"""How fast a member is that receives and sends at the same time, as every member in the middle of a chain does.

Two GPUs are enough: each sends buckets to the other. One way (`one`), both ways in one group as our schedule does
(`grouped`), and both ways over two communicators with a stream each (`apart`), under several settings of NCCL. NCCL
serves a send and a receive of one distance by the same channels (`docs/collective.md`), so `grouped` may have half of
what the links carry; a setting under which it does not is what chains need. Each setting has processes of its own,
since NCCL reads its environment once. Without GPUs it runs over Gloo, with few bytes, to show that it works.

    python -m benchmarks.gpu.collective_both_ways [SETTING ...]
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import multiprocessing

from ckpt_engine.core.collective_plan import KEY_BYTES
from ckpt_engine.transport.collective.door import MeetingDoor
from ckpt_engine.transport.collective.gloo import GlooGroup
from ckpt_engine.transport.collective.meeting import Attendance
from ckpt_engine.transport.collective.nccl import Communicator, nccl, version_text

KEY = bytes(KEY_BYTES)
LIMIT = 40.0
ROUNDS, WARMUP = 10, 2
GPU = torch.cuda.is_available()
BUCKET = 64 << 20 if GPU else 64 << 10
BUCKETS = 256 if GPU else 8  # 16 GiB each way on GPUs
SLOTS = 2
NAMES = ["rank 0", "worker 0"]

SETTINGS: dict[str, dict[str, str]] = {
    "default": {},
    "more channels": {"NCCL_MIN_P2P_NCHANNELS": "32"},
    "more blocks": {"NCCL_MIN_CTAS": "32"},
    "larger buffers": {"NCCL_BUFFSIZE": str(16 << 20)},
    "larger pieces": {"NCCL_BUFFSIZE": str(16 << 20), "NCCL_P2P_NVL_CHUNKSIZE": str(2 << 20)},
    "more blocks, larger pieces": {
        "NCCL_MIN_CTAS": "32",
        "NCCL_BUFFSIZE": str(16 << 20),
        "NCCL_P2P_NVL_CHUNKSIZE": str(2 << 20),
    },
    "copy engines": {"NCCL_P2P_USE_CUDA_MEMCPY": "1"},
}


class OnGpu:
    """One member's communicators: one for both directions, or one for each."""

    def __init__(self, attendance: Attendance, rank: int) -> None:
        torch.cuda.set_device(rank)
        self._device = torch.device("cuda", rank)
        self._out = [torch.full((BUCKET,), rank + 1, dtype=torch.uint8, device=self._device) for _ in range(SLOTS)]
        self._in = [torch.zeros(BUCKET, dtype=torch.uint8, device=self._device) for _ in range(SLOTS)]
        self._peer, self._rank = 1 - rank, rank
        self._streams = [torch.cuda.Stream(self._device, priority=-1) for _ in range(2)]
        torch.cuda.synchronize(self._device)
        stop_at = time.monotonic() + LIMIT
        self._groups = []
        for number in range(2):
            if rank == 0:
                attendance.set(f"id {number}", nccl().unique_id())
            id = attendance.wait(f"id {number}", stop_at, dict.fromkeys(NAMES))
            self._groups.append(Communicator(nccl(), id, rank, 2, self._check(stop_at)))

    def run(self, way: str) -> None:
        """All buckets, `one` way, both `grouped`, or both `apart`."""
        check = self._check(time.monotonic() + LIMIT)
        for number in range(BUCKETS):
            slot = number % SLOTS
            send = [(self._peer, self._out[slot].data_ptr(), BUCKET)]
            receive = [(self._peer, self._in[slot].data_ptr(), BUCKET)]
            if way == "one":
                asked = [(0, send, []) if self._rank == 0 else (0, [], receive)]
            elif way == "grouped":
                asked = [(0, send, receive)]
            else:  # rank 0 sends over the first communicator and receives over the second one, rank 1 the other way
                asked = sorted([(self._rank, send, []), (1 - self._rank, [], receive)], key=lambda each: each[0])
            for group, sends, receives in asked:
                self._groups[group].exchange(sends, receives, self._streams[group].cuda_stream)
            for group, _, _ in asked:
                self._groups[group].complete(check)
        done = [torch.cuda.Event() for _ in self._streams]
        for event, stream in zip(done, self._streams, strict=True):
            event.record(stream)
        while not all(event.query() for event in done):
            check()
            time.sleep(20e-6)

    def right(self) -> bool:
        """Whether the other one's bytes have come."""
        return all(bool((slot == self._peer + 1).all()) for slot in self._in)

    def close(self) -> None:
        for group in self._groups:
            group.abort()

    def _check(self, stop_at: float) -> Callable[[], None]:
        def check() -> None:
            if time.monotonic() > stop_at:
                for group in self._groups:
                    group.abort()
                raise TimeoutError(f"rank {self._rank} waited for longer than {LIMIT:g} s")

        return check


class OnHost:
    """The same over Gloo, to show that the benchmark runs."""

    def __init__(self, attendance: Attendance, rank: int) -> None:
        self._out = torch.full((BUCKET,), rank + 1, dtype=torch.uint8)
        self._in = torch.zeros(BUCKET, dtype=torch.uint8)
        self._peer, self._rank = 1 - rank, rank
        self._group = GlooGroup(attendance, NAMES, rank, "127.0.0.1", LIMIT)

    def run(self, way: str) -> None:
        for _ in range(BUCKETS):
            send = None if way == "one" and self._rank == 1 else (self._peer, self._out)
            receive = None if way == "one" and self._rank == 0 else (self._peer, self._in)
            self._group.finish(self._group.start(send, receive), LIMIT)

    def right(self) -> bool:
        return bool((self._in == self._peer + 1).all())

    def close(self) -> None:
        self._group.close()


def member(rank: int, where: tuple[str, int], told: Any) -> None:
    """One of the two processes. told: takes the seconds of each way from rank 0, which ends when both are done."""
    attendance = Attendance(where, KEY, NAMES[rank], NAMES[0], LIMIT)
    pair: Any = OnGpu(attendance, rank) if GPU else OnHost(attendance, rank)
    found = {}

    def meet(what: str) -> None:
        """Both go on within a fraction of a millisecond: nobody sleeps between two questions."""
        attendance.set(f"{what} {rank}", b"")
        stop_at = time.monotonic() + LIMIT
        while attendance.get(f"{what} {1 - rank}") is None:
            assert time.monotonic() < stop_at, f"{NAMES[1 - rank]} did not come to {what!r}"

    for way in ("one", "grouped", "apart"):
        seconds = []
        for number in range(WARMUP + ROUNDS):
            meet(f"{way} {number}")
            began = time.perf_counter()
            pair.run(way)
            seconds.append(time.perf_counter() - began)
        found[way] = statistics.median(seconds[WARMUP:])
    assert pair.right(), f"rank {rank} has other bytes than were sent"
    if rank == 0:
        told.put(found)
    meet("over")
    pair.close()
    attendance.close()


def measure(setting: str) -> dict[str, Any]:
    """GB/s that each GPU receives, under one of SETTINGS."""
    door = MeetingDoor()
    door.meeting(b"", KEY)
    told = multiprocessing.get_context("spawn").SimpleQueue()
    before = {name: os.environ.get(name) for name in SETTINGS[setting]}
    os.environ.update(SETTINGS[setting])
    try:
        multiprocessing.spawn(member, (door.address, told), nprocs=2)
        rates = {way: BUCKET * BUCKETS / seconds / 1e9 for way, seconds in told.get().items()}
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
        door.close()
    return {"setting": setting, **SETTINGS[setting], "GB_s": rates, "grouped_over_one": rates["grouped"] / rates["one"]}


def main() -> None:
    if GPU and torch.cuda.device_count() < 2:
        sys.exit(f"it needs two GPUs, this host shows {torch.cuda.device_count()}")
    if unknown := set(sys.argv[1:]) - SETTINGS.keys():
        sys.exit(f"unknown settings {', '.join(sorted(unknown))}: there are {', '.join(SETTINGS)}")
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # NVLink multicast can put a shared host's GPUs out of service
    print(
        json.dumps({"nccl": version_text(nccl().version) if GPU else "none: over Gloo", "bucket": BUCKET}), flush=True
    )
    for setting in sys.argv[1:] or list(SETTINGS):
        try:
            print(json.dumps(measure(setting)), flush=True)
        except Exception as error:  # one that this NCCL does not bear keeps nobody from the others
            print(json.dumps({"setting": setting, "failed": str(error)[-600:]}), flush=True)


if __name__ == "__main__":
    main()
