"""What an install by what has changed takes in the pause, beside one in full, by the same worker in the same run.

One worker of 6 layers in bfloat16 reads a relay of its host, version after version, in turns by changes and in full.
A step changes a share of all elements, scattered, by one to three of the last bit. Seconds are the worker's own, from
its order to its answer: bytes, engine's steps, proof. Requests are paused for as long, and for what the agent's calls
take, which is equal. What the relay needs to compare its two versions is apart: nothing is paused then, but a trainer
that waits until the version is held waits for it, too.
"""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path
from statistics import quantiles

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from ckpt_engine.delta import table
from ckpt_engine.host.facts import this_host
from ckpt_engine.host.relay_directory import DIRECTORY
from ckpt_engine.relay.slots import Slots
from ckpt_engine.transport.shared_memory.memory import SharedMemoryTransport
from tests.install.install_models import TensorParallel
from tests.install.install_world import Checkpoint
from tests.relay.relay_world import Replica, seal, tables, wish

SHAPE = {"heads": 16, "kv_heads": 8, "head": 64, "hidden": 1024, "inner": 2560, "vocabulary": 4096, "experts": 0}
LAYERS = 6
SHARES = (0.001, 0.01, 0.03)
ROUNDS = 5


def test_pause_by_changes_and_in_full(
    benchmark: BenchmarkFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DIRECTORY, str(tmp_path / "relays"))
    monkeypatch.setattr(table, "MOST_SHARE", 8)  # also where a full install is faster
    made = TensorParallel(0, 1, layers=LAYERS, **SHAPE)
    checkpoint = Checkpoint(made.checkpoint())
    replica = Replica(checkpoint, tmp_path / "engine", 1, layers=LAYERS, **SHAPE)
    slots = Slots("near", this_host(), 2 << 30, {"shared_memory": SharedMemoryTransport()})
    compared: list[float] = []
    compare = slots._changes

    def timed(*arguments: object) -> int | str:
        began = time.perf_counter()
        found = compare(*arguments)  # type: ignore[arg-type]
        compared.append(time.perf_counter() - began)
        return found

    monkeypatch.setattr(slots, "_changes", timed)
    version, rows, size = 0, [], 0
    try:
        for share in (0.001, *SHARES):  # the first is thrown away
            taken: dict[str, list[float]] = {}
            del compared[:]
            for turn in range(2 * ROUNDS + 2):
                version += 1
                generator = torch.Generator().manual_seed(version)
                for weight in checkpoint.weights.values():
                    bits = weight.view(-1).view(torch.int16)
                    count = max(1, int(share * len(bits)))
                    chosen = torch.randint(len(bits), (count,), generator=generator)
                    bits[chosen] += torch.randint(1, 4, (count,), generator=generator, dtype=torch.int16)
                recorded = seal(checkpoint, [replica])
                held = slots.fill(version % 2, wish(recorded, version, tables(checkpoint), [replica]), 600)
                size = held.layout.bytes
                if turn % 2:
                    replica.workers[0].installer._base = None
                (answer,) = replica.install(held.table, recorded, version, ahead=True)
                report = answer.report
                assert not report.HasField("problem"), report.problem.message
                assert bool(report.by_changes) == (not turn % 2 and version > 1), report.in_full
                if turn > 1:
                    way = "by changes" if report.by_changes else "in full"
                    for name, seconds in (("", answer.seconds), ("verify ", report.verify_seconds)):
                        taken.setdefault(name + way, []).append(seconds)
            rows.append(
                {
                    "share": share,
                    "milliseconds": {way: spread(found) for way, found in taken.items()},
                    "of_full": round(middle(taken["by changes"]) / middle(taken["in full"]), 3),
                    "verify_of_full": round(middle(taken["verify by changes"]) / middle(taken["verify in full"]), 3),
                    "compare_milliseconds": spread(compared),
                }
            )
            print(f"\n{rows[-1]}")
    finally:
        slots.close()
    benchmark.pedantic(lambda: None, rounds=1)  # the rounds are in `extra_info`
    benchmark.extra_info.update(
        rows=rows[1:],
        bytes=size,
        threads=torch.get_num_threads(),
        load=os.getloadavg()[0],
        processors=len(os.sched_getaffinity(0)),
        python=platform.python_version(),
        torch=torch.__version__,
    )


def middle(seconds: list[float]) -> float:
    return quantiles(seconds, n=4)[1]


def spread(seconds: list[float]) -> dict[str, float]:
    """Milliseconds: median and quartiles."""
    low, median, high = (round(each * 1e3, 2) for each in quantiles(seconds, n=4))
    return {"median": median, "25 %": low, "75 %": high}
