"""One member of the benchmark's collective: rank 0 on GPU 0 holds a model of Qwen3-8B's shapes, worker 0 on GPU 1
wants all of it. Each round moves it once by bare NCCL (torch's, which has a process group of its own) in buckets as
large as ours, and once by our schedule, unpacked where it belongs. The worker prints one JSON line.

    python -m benchmarks.gpu.collective_rank MEMBER ROUNDS WARMUP SLOTS     stdin: where to meet
"""

from __future__ import annotations

import json
import sys
import time

import torch
from torch import distributed

from benchmarks.gpu.measure import Series
from benchmarks.gpu.qwen3_8b import BYTES, SHAPES, Tree, renew
from ckpt_engine.core.boxes import whole
from ckpt_engine.core.collective import CollectiveMember, arrange, make_schedule
from ckpt_engine.core.collective_buckets import BUCKET_BYTES, BoxWant
from ckpt_engine.core.collective_plan import KEY_BYTES
from ckpt_engine.digest.prepared import prepare_digests
from ckpt_engine.transport.collective import on_gpu
from ckpt_engine.transport.collective.door import MeetingDoor
from ckpt_engine.transport.collective.meeting import Attendance
from ckpt_engine.transport.collective.nccl import nccl, version_text
from ckpt_engine.transport.collective.on_gpu import AHEAD, GpuMember
from ckpt_engine.transport.collective.part import held_boxes

KEY = bytes(KEY_BYTES)
LIMIT = 60.0
OTHERS = (("ours_from_idle_seconds", 0.1, AHEAD), ("ours_further_ahead_seconds", 0.0, 4 * AHEAD))
"""Ours again: after GPUs have been idle for as long as a pause takes, and with more rounds queued at a time."""


def main() -> None:
    member, rounds, warmup, slots = map(int, sys.argv[1:])
    device = torch.device("cuda", member)
    torch.cuda.set_device(device)
    if member == 0:
        door = MeetingDoor()
        door.meeting(b"", KEY)
        rival_store = distributed.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        print(json.dumps([*door.address, rival_store.port]), flush=True)
        where = (*door.address, rival_store.port)
    else:
        where = json.loads(sys.stdin.readline())
        rival_store = distributed.TCPStore("127.0.0.1", where[2], None, False)
    names = ["rank 0", "worker 0"]
    attendance = Attendance((where[0], where[1]), KEY, names[member], names[0], LIMIT)
    model = Tree(str(device))
    parameters = dict(model.named_parameters())
    shapes = sorted(SHAPES.items())
    held = [(index, whole(shape), parameters[name].detach()) for index, (name, shape) in enumerate(shapes)]
    members = arrange([CollectiveMember(names[0], "h", True, b"0"), CollectiveMember(names[1], "h", False, b"1")])
    wants = [BoxWant(1, 0, index, whole(shape)) for index, (_, shape) in enumerate(shapes)]
    schedule = make_schedule(members, wants, [2] * len(shapes), slots=slots)
    began = time.perf_counter()
    ours = GpuMember(schedule, member, attendance, held_boxes(held), [torch.bfloat16] * len(shapes), device, LIMIT)
    made = time.perf_counter() - began

    distributed.init_process_group("nccl", store=rival_store, rank=member, world_size=2, device_id=device)
    buffers = [torch.empty(BUCKET_BYTES, dtype=torch.uint8, device=device) for _ in range(2)]
    sizes = [BUCKET_BYTES] * (BYTES // BUCKET_BYTES) + [BYTES % BUCKET_BYTES]

    def bare() -> None:
        for number, size in enumerate(sizes):
            part = buffers[number % 2][:size]
            distributed.send(part, 1) if member == 0 else distributed.recv(part, 0)

    def timed(name: str, work: object) -> float:
        distributed.barrier()
        torch.cuda.synchronize()
        began = time.perf_counter()
        work()  # type: ignore[operator]
        torch.cuda.synchronize()
        return time.perf_counter() - began

    digests = prepare_digests([(memory, box.start) for _, box, memory in held])
    series = Series()
    for number in range(warmup + rounds):
        if member == 0:
            renew(model, number)
            attendance.set(f"digests {number}", json.dumps(digests.run()).encode())
        bare_seconds = timed("bare", bare)
        bytes_ours = timed("ours", lambda: ours.run(LIMIT))
        bare_again = timed("bare", bare)
        others = {}
        for name, idle, ahead in OTHERS:
            time.sleep(idle)
            on_gpu.AHEAD = ahead
            others[name] = timed(name, lambda: ours.run(LIMIT))
        on_gpu.AHEAD = AHEAD
        began = time.perf_counter()
        if member == 1:
            expected = json.loads(attendance.wait(f"digests {number}", time.monotonic() + LIMIT, dict.fromkeys(names)))
            began = time.perf_counter()
            assert digests.run() == expected, "what arrived is not what was sealed"
        series.add(
            bare_seconds=min(bare_seconds, bare_again),
            ours_seconds=bytes_ours,
            verify_seconds=time.perf_counter() - began,
            **others,
        )
    if member == 1:
        bare_rate = BYTES / series.median("bare_seconds", rounds) / 1e9
        our_rate = BYTES / series.median("ours_seconds", rounds) / 1e9
        print(
            json.dumps(
                {
                    "bytes": BYTES,
                    "bucket_bytes": schedule.slot_bytes,
                    "buckets": len(schedule.buckets),
                    "memory": [schedule.memory(each) for each in (0, 1)],
                    "nccl": version_text(nccl().version),
                    "made_seconds": made,
                    "bare_GB_s": bare_rate,
                    "transfer_and_install_GB_s": our_rate,
                    "share_of_bare": our_rate / bare_rate,
                    "first": series.first(),
                    "medians": series.last(rounds),
                }
            ),
            flush=True,
        )
    distributed.barrier()
    ours.close()
    attendance.close()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
