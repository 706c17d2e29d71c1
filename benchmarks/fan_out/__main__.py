"""Simulates how a version gets to many hosts beside what others do, and writes a table and a plot.

    python -m benchmarks.fan_out [--plot docs/fan-out.svg] [--json benchmarks/results/fan_out.json] [--only 64 16]

Times are simulated. On one core some 30,000 chunks are received a second: 16 GB to 1,024 hosts take minutes.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.fan_out.plans import (
    all_pull,
    by_chunk,
    chain,
    even_world,
    from_rank_0,
    over_two_hosts,
    with_faults,
    worst,
)
from benchmarks.fan_out.plot import plot

TRAINERS = 4
SIZES = (16 * 10**9, 10**12)
HOSTS = (8, 64, 1024)
LARGE = 10**13
"""Bytes that are received by all hosts together: runs of more are not repeated."""
MOST_RECEIVED = 4 * 10**6
"""Chunks that are received by all hosts together: a run of more has larger chunks, which makes hosts later."""

Row = dict[str, float | int | str]


def row(size: int, hosts: int) -> Row:
    """One size and number of hosts: how late the last host is, by each way."""
    of = even_world(hosts, size, TRAINERS)
    if len(of.sizes) * hosts > MOST_RECEIVED:
        of = even_world(hosts, size, TRAINERS, chunk=size * hosts // MOST_RECEIVED)
    is_large = size * hosts > LARGE
    found: Row = {"bytes": size, "hosts": hosts, "chunks": len(of.sizes), "bound_s": round(float(of.bounds().max()), 2)}
    well = by_chunk(of)
    found["fan_out"] = round(worst(well, of), 3)
    found["models_sent"] = round(float(well.sent[hosts:].sum() / of.model), 3)
    found["busiest"] = round(float(well.sent[:hosts].max() / well.sent[:hosts].mean()), 3)
    found["peers"] = int(well.peers.max())
    found["questions_a_chunk"] = round(float(well.questions.sum() / len(of.sizes) / hosts), 3)
    found["named"], found["grants_again"] = well.named, well.grants_again
    print(json.dumps(found), flush=True)
    for name, seeds, trainers in (
        ("faults", 1 if is_large else 3, TRAINERS),
        ("faults_one_trainer", 1 if is_large else 3, 1),
    ):
        if is_large and trainers == 1:
            continue
        even = of if trainers == TRAINERS else even_world(hosts, size, trainers)
        worlds = [with_faults(even, seed) for seed in range(seeds)]
        runs = [(by_chunk(each), each) for each in worlds]
        found[f"fan_out_{name}"] = round(max(worst(*each) for each in runs), 3)
        found[f"{name}_models_sent"] = round(max(float(one.sent[hosts:].sum() / of.model) for one, _ in runs), 3)
        found[f"{name}_peers"] = max(int(one.peers.max()) for one, _ in runs)
        found[f"{name}_grants_again"] = max(one.grants_again for one, _ in runs)
        found[f"{name}_named"] = max(one.named for one, _ in runs)
        print(json.dumps(found), flush=True)
    slow = replace(of, rates=(of.rates[0] / 2, *of.rates[1:]))
    found["fan_out_one_slow"] = round(worst(by_chunk(slow), slow), 3)
    if not is_large:
        for name, other in (
            ("one_trainer", even_world(hosts, size, 1)),
            ("two_hosts", over_two_hosts(hosts, size, TRAINERS)),
        ):
            found[f"fan_out_{name}"] = round(worst(by_chunk(other), other), 3)
        found["chain"] = round(worst(chain(of), of), 3)
        faulty = replace(with_faults(of, 0), died={})
        found["chain_one_slow"] = round(worst(chain(faulty), faulty), 3)
    # A star's time is the same for every byte, so a part of a large model says all.
    part = of if size * hosts < LARGE // 5 else even_world(hosts, min(size // 16, 16 * 10**9), TRAINERS)
    found["rank_0"] = round(worst(from_rank_0(part), part), 3)
    found["all_pull"] = round(worst(all_pull(part), part), 3)
    print(json.dumps(found), flush=True)
    return found


def table(found: Sequence[Row]) -> str:
    """Markdown."""
    keys = ("fan_out_one_trainer", "fan_out_two_hosts", "fan_out_one_slow", "fan_out_faults")
    keys = (*keys, "fan_out_faults_one_trainer", "peers", "named", "rank_0", "all_pull", "chain")
    lines = [
        "| model | hosts | bound | by chunk | one origin | servers on two hosts | one slow | with faults | "
        "the same, one origin | peers | grants told | rank 0 | all pull | chain |",
        "|---" * 14 + "|",
    ]
    for each in found:
        size = "16 GB" if each["bytes"] == SIZES[0] else "1 TB"
        values = " | ".join(str(each.get(key, "")) for key in keys)
        lines.append(f"| {size} | {each['hosts']} | {each['bound_s']} s | **{each['fan_out']}** | {values} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--json", type=Path, help="rows that it has already are kept, and drawn")
    parser.add_argument("--only", type=int, nargs=2, metavar=("HOSTS", "GB"), help="one row")
    asked = parser.parse_args()
    known: list[Row] = json.loads(asked.json.read_text()) if asked.json and asked.json.exists() else []
    wanted = (
        [(asked.only[1] * 10**9, asked.only[0])] if asked.only else [(size, each) for size in SIZES for each in HOSTS]
    )
    made = [row(*each) for each in wanted]
    kept = [each for each in known if (each["bytes"], each["hosts"]) not in wanted and each["hosts"] in HOSTS]
    found = sorted([*kept, *made], key=lambda each: (int(each["bytes"]), int(each["hosts"])))
    print(table(found))
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=1) + "\n")
    if asked.plot:
        asked.plot.write_text(plot(found))


if __name__ == "__main__":
    main()
