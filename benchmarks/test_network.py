"""How fast one relay fills itself from another one's, on two hosts, against a raw socket between the same two.

The hosts are network namespaces on one switch: every byte is copied by this machine's processors on its way, there is
no network card to do it. About one GiB of a model's tensors, 400 of them; the digest is in the pass. Fillings and raw
sockets take turns, so that whatever else the machine does slows both.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import torch
from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks.network_host import WAYS
from benchmarks.test_relay import LAYER, Trainer
from ckpt_engine.core.sealed_record import ProvenRecord
from ckpt_engine.host.relay_directory import DIRECTORY
from ckpt_engine.relay.slots import FillWish, Want
from ckpt_engine.v1.weights_pb2 import Identity, SourceTable
from tests.line_process import LineProcess
from tests.network.hosts import hosts
from tests.relay.relay_process import written

SHAPES = [*(LAYER * 36), (1024,), (7, 5), (3, 1), ()]
ROUNDS = 10
MEMORY = 3 << 30


def wish_of(recorded: ProvenRecord, table: SourceTable) -> FillWish:
    identity = Identity(lineage="run", version=1, root=recorded.root)
    return FillWish(identity, recorded.record, [table], Want(everything=True))


def test_relay_to_relay(benchmark: BenchmarkFixture, tmp_path: Path) -> None:
    trainer = Trainer(SHAPES)
    recorded = trainer.sealed(trainer.needs(1))
    with ExitStack() as stack:
        stack.callback(trainer.arena.close)
        found = stack.enter_context(hosts(2))
        near, far = [
            stack.enter_context(
                LineProcess(
                    "benchmarks.network_host",
                    name,
                    str(MEMORY),
                    host.address,
                    before=["ip", "netns", "exec", host.namespace],
                    **{DIRECTORY: str(tmp_path / name)},
                )
            )
            for name, host in zip(("near", "far"), found, strict=True)
        ]
        for each in (near, far):
            each.answer()
        held = near.ask(fill=[0, written(wish_of(recorded, trainer.table))])
        table = SourceTable.FromString(bytes.fromhex(held["table"]))
        port = near.ask(serve=[0, held["size"]])
        asked = written(wish_of(recorded, table))
        times: dict[str, list[float]] = {"tcp": [], **{way: [] for way in WAYS}}
        cpu: dict[str, list[float]] = {name: [] for name in times}
        sent = 0
        for turn in range(ROUNDS + 2):
            for name in times:
                before = near.ask(cpu=True) + far.ask(cpu=True)
                on_the_wire = found[0].sent()
                if name == "tcp":
                    seconds = far.ask(fill=[turn % 2, asked])["seconds"]
                    sent = found[0].sent() - on_the_wire
                else:
                    seconds = far.ask(receive=[found[0].address, port, name, held["size"]])
                if turn > 1:  # both slots have been laid out, and their pages are there
                    times[name].append(seconds)
                    cpu[name].append(near.ask(cpu=True) + far.ask(cpu=True) - before)
    size = held["bytes"]
    speeds = speeds_of(size, times)
    ratios = {way: round(speeds["tcp"] / speeds[way], 3) for way in WAYS}
    keep(benchmark, size, times, cpu, sent, ratio_to_raw=ratios)
    assert size == table_bytes(table)


def speeds_of(size: int, times: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """GB/s of each that took turns. times: seconds of each for `size` bytes."""
    return {name: size / median(kept) / 1e9 for name, kept in times.items()}


def keep(
    benchmark: BenchmarkFixture,
    size: int,
    times: Mapping[str, Sequence[float]],
    cpu: Mapping[str, Sequence[float]],
    sent: int,
    **own: object,
) -> None:
    """Writes down, and prints, what was measured side by side. cpu: seconds of processors. sent: bytes on the wire of
    one filling. own: what one benchmark has to say beside that."""
    speeds = speeds_of(size, times)
    benchmark.pedantic(lambda: None, rounds=1)  # the rounds are in `extra_info`
    benchmark.extra_info.update(
        bytes=size,
        tensors=len(SHAPES),
        gigabytes_per_second={name: round(speed, 3) for name, speed in speeds.items()},
        cpu_seconds_a_gigabyte={name: round(median(kept) / size * 1e9, 3) for name, kept in cpu.items()},
        bytes_on_the_wire_to_bytes=round(sent / size, 4),
        milliseconds={name: [round(each * 1e3, 1) for each in sorted(kept)] for name, kept in times.items()},
        processors=len(os.sched_getaffinity(0)),
        load=os.getloadavg()[0],
        python=platform.python_version(),
        torch=torch.__version__,
        kernel=platform.release(),
        **own,
    )
    print(f"\n{benchmark.name}: " + ", ".join(f"{name} {speed:.2f} GB/s" for name, speed in speeds.items()))
    print(benchmark.extra_info)


def table_bytes(table: SourceTable) -> int:
    """Of all shards of a table of bfloat16."""
    found = 0
    for shard in table.shards:
        volume = 1
        for start, stop in zip(shard.start, shard.stop, strict=True):
            volume *= stop - start
        found += 2 * volume
    return found
