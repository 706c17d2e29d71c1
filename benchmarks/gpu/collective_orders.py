"""One source's weights to all other GPUs by our schedule, with members numbered in several orders.

NCCL may serve exchanges of one distance (peer minus rank, modulo the members) by the same channels. In the order that
is used, each hop of a chain has distance 1. Here the same chain runs with the numbers of its members exchanged, so that
hops have other distances; with three members all hops always have one distance, so give it four GPUs or more. Without
GPUs it runs over Gloo, with few bytes, to show that it works.

    python -m benchmarks.gpu.collective_orders [MEMBERS]
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import multiprocessing

from ckpt_engine.core.boxes import whole
from ckpt_engine.core.collective import CollectiveMember, Schedule, arrange, make_schedule
from ckpt_engine.core.collective_buckets import BoxWant
from ckpt_engine.core.collective_plan import KEY_BYTES
from ckpt_engine.transport.collective.door import MeetingDoor
from ckpt_engine.transport.collective.meeting import Attendance
from ckpt_engine.transport.collective.part import held_boxes

KEY = bytes(KEY_BYTES)
LIMIT = 60.0
ROUNDS, WARMUP = 10, 2
GPU = torch.cuda.is_available()
TENSORS = 64 if GPU else 4
SHAPE = (16384, 8192) if GPU else (256, 128)  # of bfloat16: 16 GiB in all on GPUs


def orders(members: int) -> dict[str, tuple[int, ...]]:
    """By name: the rank of each member of the chain. The source stays the lead."""
    rest = range(1, members)
    zigzag = [low if turn % 2 == 0 else members - low for turn in range(members - 1) for low in [turn // 2 + 1]]
    return {
        "one after the other": (0, *rest),
        "backwards": (0, *reversed(rest)),
        "zigzag": (0, *dict.fromkeys(zigzag)),
    }


def distances(order: Sequence[int]) -> list[int]:
    """Of each hop of the chain, as NCCL counts."""
    return [(there - here) % len(order) for here, there in pairwise(order)]


def renumbered(schedule: Schedule, order: Sequence[int]) -> Schedule:
    """The same exchanges, with each member under its number in `order`."""
    back = sorted(range(len(order)), key=order.__getitem__)

    def moved(exchange: Any) -> Any:
        return None if exchange is None else exchange._replace(peer=order[exchange.peer])

    steps = [
        [step._replace(send=moved(step.send), receive=moved(step.receive)) for step in schedule.steps[old]]
        for old in back
    ]
    return replace(
        schedule,
        members=tuple(schedule.members[old] for old in back),
        buckets=tuple(
            bucket._replace(chain=tuple(order[each] for each in bucket.chain)) for bucket in schedule.buckets
        ),
        steps=tuple(map(tuple, steps)),
        slots=tuple(schedule.slots[old] for old in back),
    )


def run(rank: int, members: int, order: Sequence[int], where: tuple[str, int], told: Any) -> None:
    """One member. told: takes the seconds of each round, from the last one of the chain."""
    device = torch.device("cuda", rank) if GPU else torch.device("cpu")
    gpus = [bytes([number]) * 16 if GPU else b"" for number in range(members)]
    chain = arrange([CollectiveMember(f"{number:03}", "h", number == 0, gpus[number]) for number in range(members)])
    wants = [BoxWant(worker, 0, index, whole(SHAPE)) for worker in range(1, members) for index in range(TENSORS)]
    schedule = renumbered(make_schedule(chain, wants, [2] * TENSORS), order)
    names = [member.name for member in schedule.members]
    attendance = Attendance(where, KEY, names[rank], names[0], LIMIT)
    fill = 1.0 if rank == 0 else 0.0
    memory = [torch.full(SHAPE, fill, dtype=torch.bfloat16, device=device) for _ in range(TENSORS)]
    held = held_boxes([(index, whole(SHAPE), each) for index, each in enumerate(memory)])
    dtypes = [torch.bfloat16] * TENSORS
    if GPU:
        from ckpt_engine.transport.collective.on_gpu import GpuMember

        torch.cuda.set_device(device)
        member: Any = GpuMember(schedule, rank, attendance, held, dtypes, device, LIMIT)
    else:
        from ckpt_engine.transport.collective.on_host import HostMember

        member = HostMember(schedule, rank, attendance, held, dtypes, "127.0.0.1", LIMIT)
    seconds = []
    for number in range(WARMUP + ROUNDS):
        attendance.set(f"{number} {rank}", b"")
        for other in range(members):
            attendance.wait(f"{number} {other}", time.monotonic() + LIMIT, dict.fromkeys(names))
        began = time.perf_counter()
        member.run(LIMIT)
        seconds.append(time.perf_counter() - began)
    assert all(bool((each == 1).all()) for each in memory), "what arrived is not what was sent"
    if rank == order[-1]:
        told.put(seconds[WARMUP:])
    attendance.set(f"over {rank}", b"")
    for other in range(members):
        attendance.wait(f"over {other}", time.monotonic() + LIMIT, dict.fromkeys(names))
    member.close()
    attendance.close()


def main() -> None:
    members = int(sys.argv[1]) if len(sys.argv) > 1 else max(4, torch.cuda.device_count())
    size = TENSORS * SHAPE[0] * SHAPE[1] * 2
    for name, order in orders(members).items():
        door = MeetingDoor()
        door.meeting(b"", KEY)
        told = multiprocessing.get_context("spawn").SimpleQueue()
        multiprocessing.spawn(run, (members, order, door.address, told), nprocs=members)
        median = statistics.median(told.get())
        found = {"order": name, "ranks": order, "distances": distances(order), "seconds": median}
        print(json.dumps({**found, "bytes": size, "GB_s": size / median / 1e9}), flush=True)
        door.close()


if __name__ == "__main__":
    main()
