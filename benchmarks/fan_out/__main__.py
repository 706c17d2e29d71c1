"""Simulates fan-out beside what others do, and writes a table and a plot.

    python -m benchmarks.fan_out [--plot docs/fan-out.svg] [--json benchmarks/results/fan_out.json] [--quick]

Times are simulated; on one core all of it takes some minutes, of which 1 TB on 1,024 hosts takes most.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.fan_out.network import Outcome
from benchmarks.fan_out.plans import (
    RATE,
    World,
    all_pull,
    chain,
    even_chunks,
    fan_out,
    from_rank_0,
    with_faults,
    worst,
)
from benchmarks.fan_out.plot import plot
from ckpt_engine.core.fan_out import plan_fan_out

TRAINERS = 4
SIZES = (16 * 10**9, 10**12)
HOSTS = (1, 8, 64, 256, 1024)
SEEDS = {(16 * 10**9, 1024): 5, (10**12, 256): 2, (10**12, 1024): 1}

Row = dict[str, float | int | str]


def world(hosts: int, size: int, trainers: int = TRAINERS) -> World:
    """Everybody has 100 Gbit/s, 50 us apart, and verifies 20 GB/s."""
    return World(tuple(even_chunks(range(hosts), size, trainers)), (RATE,) * hosts, (RATE,) * trainers, {})


def rows(sizes: Sequence[int], counts: Sequence[int]) -> list[Row]:
    """One for each size and number of hosts: how late the last host is, by each way."""
    found = []
    ways: dict[str, Callable[[World, bool], Outcome]] = {"rank_0": from_rank_0, "all_pull": all_pull, "chain": chain}
    for size in sizes:
        for count in counts:
            of = world(count, size)
            begun = time.perf_counter()
            plan_fan_out(of.chunks, of.names, of.trainers)
            planned = time.perf_counter() - begun
            row: Row = {"bytes": size, "hosts": count, "chunks": len(of.chunks), "planned_s": round(planned, 2)}
            row["bound_s"] = round(float(of.bounds().max()), 2)
            result = fan_out(of, True)
            row["fan_out"] = round(worst(result, of), 3)
            row["models_sent"] = round(float(result.sent[count:].sum() / size), 3)
            single = world(count, size, 1)
            row["fan_out_one_trainer"] = round(worst(fan_out(single, True), single), 3)
            if count >= 8:
                faulty = [with_faults(of, seed) for seed in range(SEEDS.get((size, count), 10))]
                row["fan_out_faults"] = round(max(worst(fan_out(each, True), each) for each in faulty), 3)
                row["chain_one_slow"] = round(worst(chain(replace(faulty[0], died={}), True), faulty[0]), 3)
            for name, way in ways.items():
                # A star's time is the same for every byte, so a part of a large model says all.
                part = of if name == "chain" or size * count < 10**13 else world(count, size // 16)
                row[name] = round(worst(way(part, True), part), 3)
            found.append(row)
            print(json.dumps(row), flush=True)
    return found


def table(found: Sequence[Row]) -> str:
    """Markdown."""
    lines = [
        "| model | hosts | bound | fan-out | one trainers' host | with faults | rank 0 | all pull | chain | plan |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in found:
        size = "16 GB" if row["bytes"] == SIZES[0] else "1 TB"
        lines.append(
            f"| {size} | {row['hosts']} | {row['bound_s']} s | **{row['fan_out']}** | {row['fan_out_one_trainer']} | "
            f"{row.get('fan_out_faults', '')} | {row['rank_0']} | {row['all_pull']} | {row['chain']} | "
            f"{row['planned_s']} s |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help="16 GB, and no more than 64 hosts")
    asked = parser.parse_args()
    found = rows(SIZES[:1] if asked.quick else SIZES, HOSTS[:3] if asked.quick else HOSTS)
    print(table(found))
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=1) + "\n")
    if asked.plot:
        asked.plot.write_text(plot(found))


if __name__ == "__main__":
    main()
