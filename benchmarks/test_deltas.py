"""What a new version takes on the network as what has changed, beside all of it in the same run.

Two relays bring each version from one origin: one takes deltas, one takes all. The model is a part of a 0.6B model's
tensors in bfloat16. A step changes a share of all elements, scattered: by one to three steps of their last bit, as
optimizers do, or to random bits, which no coder makes shorter.

Bytes are counted on loopback, deltas "always". Seconds are those of a network of 100 Mbit/s between two hosts, which
are network namespaces on one switch, deltas "auto"; once with the cable pulled for three seconds in the middle.
"""

from __future__ import annotations

import os
import subprocess
import threading
import time
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks.test_relay import LAYER, Trainer
from ckpt_engine.core.sealed_record import ProvenRecord
from ckpt_engine.host.facts import this_host
from ckpt_engine.host.relay_directory import DIRECTORY
from ckpt_engine.relay.deltas import DeltaUse
from ckpt_engine.relay.slots import FillWish, Slots, SlotVersion, Want
from ckpt_engine.transport.base import Network
from ckpt_engine.transport.registry import all_transports
from ckpt_engine.v1.manager_pb2 import WantTable
from ckpt_engine.v1.weights_pb2 import Identity, OfferedRegion, SourceTable
from tests.line_process import LineProcess
from tests.network.hosts import NetworkHost, hosts
from tests.relay.relay_process import written

SHAPES = [*(LAYER * 3), (10_000, 1024), (1024,), ()]
MEMORY = 512 << 20
SHARES = (0.001, 0.01, 0.03, 0.1, 0.4)
LOOPBACK = Network("127.0.0.1:0", "127.0.0.1", 5.0)
RATE = "100mbit"
CUT_SECONDS = 3.0


def advance(trainer: Trainer, share: float, kind: str, seed: int) -> None:
    """One step of training, which changes this share of all elements."""
    generator = torch.Generator().manual_seed(seed)
    for each in trainer.memory:
        bits = each.reshape(-1).view(torch.int16)
        chosen = torch.rand(bits.shape, generator=generator) < share
        count = int(chosen.sum())
        if kind == "steps":
            bits[chosen] += torch.randint(1, 4, (count,), generator=generator, dtype=torch.int16)
        else:
            bits[chosen] = torch.randint(-(1 << 15), 1 << 15, (count,), generator=generator, dtype=torch.int16)


def wish(recorded: ProvenRecord, version: int, sources: list[SourceTable], table: WantTable | None) -> FillWish:
    identity = Identity(lineage="run", version=version, root=recorded.root)
    want = Want(everything=True)
    return FillWish(identity, recorded.record, sources, want, table, [want] if table is not None else [])


def want_table(near: OfferedRegion | None, far: str, name: str = "near") -> WantTable:
    """Of one origin, and one relay that asks it."""
    table = WantTable(wants=[WantTable.Wants(everything=True)])
    table.relays.add(relay=f"relay {name}", chunks=near, origin=True)
    table.relays.add(relay=f"relay {far}")
    return table


@pytest.mark.parametrize("kind", ["steps", "random"])
def test_bytes_on_the_network(
    benchmark: BenchmarkFixture, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, rows = Trainer(SHAPES), []

    def made(name: str, deltas: DeltaUse) -> Slots:
        monkeypatch.setenv(DIRECTORY, str(tmp_path / name))
        return Slots(name, this_host(), MEMORY, all_transports(), network=LOOPBACK, deltas=deltas)

    with ExitStack() as stack:
        stack.callback(trainer.arena.close)
        near, changes, full = (
            stack.enter_context(closing(made(name, use)))
            for name, use in (("near", "always"), ("changes", "always"), ("full", "never"))
        )
        for version, share in enumerate((0.0, *SHARES)):
            advance(trainer, share, kind, version)
            recorded = trainer.sealed(trainer.needs(1))
            near.fill(version % 2, wish(recorded, version, [trainer.table], want_table(near.chunks, "")), 600.0)
            found: dict[str, SlotVersion] = {}
            for name, each in (("changes", changes), ("full", full)):
                asked = wish(recorded, version, [], want_table(near.chunks, name))
                found[name] = each.fill(version % 2, asked, 600.0)
                assert not found[name].filled.missing
            size = found["full"].layout.bytes
            delta = found["changes"].filled.deltas
            if version:
                rows.append(
                    {
                        "changed": share,
                        "changed_counted": round(delta.changed_bytes / size, 6),
                        "to_full": round(delta.network_bytes / found["full"].filled.deltas.network_bytes, 5),
                        "bytes": delta.network_bytes,
                        "full_bytes": found["full"].filled.deltas.network_bytes,
                        "as_deltas": round(delta.delta_bytes / size, 4),
                        "seconds": round(found["changes"].filled.seconds, 3),
                        "full_seconds": round(found["full"].filled.seconds, 3),
                    }
                )
    benchmark.pedantic(lambda: None, rounds=1)
    benchmark.extra_info.update(kind=kind, model_bytes=size, rows=rows, load=os.getloadavg()[0])
    for row in rows:
        print(f"\n{kind} {row['changed']:.1%}: {row['to_full']:.3%} of full, {row['seconds']} s", end="")
    assert all(row["to_full"] <= 1.02 for row in rows)


def test_seconds_over_100_mbit(benchmark: BenchmarkFixture, tmp_path: Path) -> None:
    trainer, rows = Trainer(SHAPES), []
    with ExitStack() as stack:
        stack.callback(trainer.arena.close)
        found = stack.enter_context(hosts(2))
        near, changes, full = [
            stack.enter_context(
                LineProcess(
                    "benchmarks.network_host",
                    name,
                    str(MEMORY),
                    host.address,
                    use,
                    before=["ip", "netns", "exec", host.namespace],
                    **{DIRECTORY: str(tmp_path / name)},
                )
            )
            for name, host, use in (
                ("near", found[0], "auto"),
                ("changes", found[1], "auto"),
                ("full", found[1], "never"),
            )
        ]
        for each in (near, changes, full):
            each.answer()
        chunks = OfferedRegion.FromString(bytes.fromhex(near.ask(chunks=True)))
        limit = ("root", "tbf", "rate", RATE, "burst", "256kb", "latency", "200ms")
        for share, is_cut in ((0.0, False), (0.01, False), (0.1, False), (0.01, True), (0.1, True)):
            version = len(rows)
            advance(trainer, share, "steps", version)
            recorded = trainer.sealed(trainer.needs(1))
            near.ask(fill=[version % 2, written(wish(recorded, version, [trainer.table], want_table(chunks, "")))])
            if version == 1:
                command = ["ip", "netns", "exec", found[0].namespace, "tc", "qdisc", "add", "dev", found[0].device]
                subprocess.run([*command, *limit], check=True, timeout=60)
            row: dict[str, object] = {"changed": share, "cut_seconds": CUT_SECONDS if is_cut else 0}
            for name, each in (("changes", changes), ("full", full)):
                cable = threading.Thread(target=_cut, args=(found[0], 0.2)) if is_cut else None
                before = found[0].sent()
                if cable is not None:
                    cable.start()
                answer = each.ask(fill=[version % 2, written(wish(recorded, version, [], want_table(chunks, name)))])
                if cable is not None:
                    cable.join()
                row |= {
                    f"{name}_seconds": round(answer["seconds"], 2),
                    f"{name}_bytes": answer["network_bytes"],
                    f"{name}_on_the_wire": found[0].sent() - before,
                }
                row["changes_in_full"] = row.get("changes_in_full", 0) or sum(answer["whole"].values())
            rows.append(row)
            print("\n", row, end="")
    benchmark.pedantic(lambda: None, rounds=1)
    benchmark.extra_info.update(rate=RATE, rows=rows[1:], load=os.getloadavg()[0])


def _cut(host: NetworkHost, after: float) -> None:
    """Pulls a host's cable for a while."""
    time.sleep(after)
    host.cut()
    time.sleep(CUT_SECONDS)
    host.mend()
