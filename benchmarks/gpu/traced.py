"""A traced update with its prediction: what each stage took beside what bytes and rates say, rates measured first.

    python -m benchmarks.gpu.traced -o DIRECTORY                       # Qwen3-8B's shapes on GPU 0, reference engine
    python -m benchmarks.gpu.traced -o DIRECTORY --replica-gpu 1       # the replica on another GPU
    python -m benchmarks.gpu.traced -o DIRECTORY --engine vllm         # CKPT_ENGINE_VLLM_PYTHON names its Python
    python -m benchmarks.gpu.traced -o DIRECTORY --cpu                 # 215 MB from shared memory, on the CPU

DIRECTORY gets `trace.json` (the last update, for Perfetto; see docs/timeline.md), `rates.json` (for `ckpt-engine trace
--rates`), `trace.txt` (what the command said), and `prediction.json`: for each stage the prediction, the median of what
it took, their ratio, and whether that is within 30 %; with the rates of this machine and with the built-in ones. Stages
that no rate explains (planning, an engine's pause) have no prediction.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

from benchmarks.gpu.measure import CopyCeiling, Series, rounded, versions
from benchmarks.gpu.qwen3_8b import Tree, renew, write_config
from ckpt_engine import Trainer, UpdateReport
from ckpt_engine.core.prediction import Rates, measured
from ckpt_engine.digest.prepared import prepare_digests
from ckpt_engine.timeline.predicted import Whereabouts, compare_stages
from tests.cluster import Cluster, Replica, running_cluster
from tests.gpu.gpu_server import start_gpu_vllm
from tests.tiny_model import make_tiny_qwen3

WITHIN = 0.3
LINEAGE = "traced"
BUFFER = 2 << 30
COMMAND_SECONDS = 60.0


def timed(work: Callable[[], object], rounds: int = 7) -> float:
    """Median seconds, after two that do not count."""
    found = []
    for _ in range(rounds + 2):
        began = time.perf_counter()
        work()
        found.append(time.perf_counter() - began)
    return median(found[2:])


def digest_rate(model: nn.Module) -> float:
    """GB/s of all parameters' digests, in the process that has them."""
    tensors = [parameter.detach() for parameter in model.parameters()]
    prepared = prepare_digests([(tensor, (0,) * tensor.dim()) for tensor in tensors])
    return prepared.bytes / timed(prepared.run) / 1e9


def gpu_rates(model: nn.Module, replica_gpu: int) -> dict[str, Any]:
    """Of this machine, measured while nothing else runs."""
    same = CopyCeiling("cuda:0", "cuda:0", BUFFER).sustained()
    links: dict[str, dict[str, float]] = {"cuda_ipc": {"same gpu": same}}
    if replica_gpu:
        links["cuda_ipc"]["gpu"] = CopyCeiling("cuda:0", f"cuda:{replica_gpu}", BUFFER).sustained()
    torch.cuda.empty_cache()
    return {"links": links, "copy": {"gpu": same}, "digest": {"gpu": digest_rate(model)}}


def cpu_rates(model: nn.Module) -> dict[str, Any]:
    """Of this machine. Workers of a small engine have one thread, so copies and digests do here."""
    source = torch.empty(256 << 20, dtype=torch.uint8).fill_(3)
    target = torch.empty_like(source).fill_(4)
    copy = source.nbytes / timed(lambda: target.copy_(source)) / 1e9
    return {"links": {"shared_memory": {"host": copy}}, "copy": {"host": copy}, "digest": {"host": digest_rate(model)}}


@contextlib.contextmanager
def started(path: Path, engine: str, cpu: bool, replica_gpu: int) -> Iterator[tuple[Cluster, Replica, nn.Module]]:
    """A manager, a replica that has registered, and the trainer's model."""
    config = path / "model"
    threads = {"OMP_NUM_THREADS": str(min(16, len(os.sched_getaffinity(0))))}
    visible = {"CUDA_VISIBLE_DEVICES": str(replica_gpu)}
    model: nn.Module
    if cpu:
        sizes = {"layers": 12, "hidden": 1024, "intermediate": 2560, "vocabulary": 4096}
        model = make_tiny_qwen3(config, 1, weights=False, **sizes)
    else:
        write_config(config)
        model = Tree("cuda:0")
        renew(model, 1)
    with running_cluster(path / "cluster") as cluster:
        if cpu:
            replica = cluster.replica("r", "reference", config)
        elif engine == "vllm":
            replica = start_gpu_vllm(cluster, "r", config, "--enforce-eager", visible=str(replica_gpu))
        else:
            replica = cluster.replica("r", "reference", config, "--device", "cuda", environment={**threads, **visible})
        yield cluster, replica.registered(240), model


def table_of(reports: list[UpdateReport], rates: Rates, places: Whereabouts) -> list[dict[str, Any]]:
    """A row for each stage: medians of all reports."""
    series = Series()
    reasons: dict[str, str] = {}
    expected: dict[str, float] = {}
    for report in reports:
        for each in compare_stages(report.message, rates, places):
            if each.fact is not None:
                series.add(**{each.stage: each.fact})
            reasons.setdefault(each.stage, "")
            if each.expected is not None:
                expected[each.stage], reasons[each.stage] = each.expected.seconds, each.expected.because
    facts = series.last(len(reports))
    rows = []
    for stage, because in reasons.items():
        fact = facts.get(stage, {}).get("median")
        row: dict[str, Any] = {"stage": stage, "predicted": expected.get(stage), "took": fact, "because": because}
        if fact and stage in expected:
            ratio = fact / expected[stage]
            row |= {"took_over_predicted": ratio, "within_30_percent": abs(ratio - 1.0) <= WITHIN}
            row |= {"iqr": facts[stage]["iqr"]}
        rows.append(rounded(row))
    return rows


def measure(path: Path, output: Path, engine: str, cpu: bool, replica_gpu: int, updates: int) -> dict[str, Any]:
    """See the module. updates: that count; one before them maps everything."""
    if cpu:
        torch.set_num_threads(1)
    reports: list[UpdateReport] = []
    with started(path, engine, cpu, replica_gpu) as (cluster, replica, model):
        rates = rounded(cpu_rates(model) if cpu else gpu_rates(model, replica_gpu))
        (output / "rates.json").write_text(json.dumps(rates, indent=1) + "\n")
        with Trainer(cluster.address, lineage=LINEAGE) as trainer:
            trainer.publish(model, move=True)
            for number in range(updates + 1):
                if cpu:
                    with torch.no_grad():
                        for parameter in model.parameters():
                            parameter.add_(0.125)
                else:
                    renew(model, 2 + number)
                report = trainer.update_weights(timeout=120.0)
                assert report.ok, f"{report}\n{replica.tail()}"
                assert report.verified
                reports.append(report)
            places = Whereabouts.of(cluster.status())
            command = ["trace", str(reports[-1].version), "-o", str(output / "trace.json"), "--force"]
            command += ["--manager", cluster.address, "--lineage", LINEAGE, "--rates", str(output / "rates.json")]
            written = subprocess.run(
                [sys.executable, "-m", "ckpt_engine", *command],
                capture_output=True,
                text=True,
                timeout=COMMAND_SECONDS,
                check=False,
            )
            (output / "trace.txt").write_text(written.stdout + written.stderr)
            assert written.returncode == 0, written.stdout + written.stderr
    here = Rates.of(rates, measured())
    found = {
        "bytes": reports[-1].nbytes,
        "transports": sorted({f"{use.transport}: {use.reason}" for use in reports[-1].replicas[0].transports}),
        "rates_GB_s": rates,
        "by_rates_of_this_machine": table_of(reports[1:], here, places),
        "by_built_in_rates": table_of(reports[1:], measured(), places),
        "first_update": table_of(reports[:1], here, places),
        "versions": {"torch": torch.__version__} if cpu else versions("vllm"),
    }
    (output / "prediction.json").write_text(json.dumps(found, indent=1) + "\n")
    return found


def _print(found: dict[str, Any]) -> None:
    for name in ("by_rates_of_this_machine", "by_built_in_rates"):
        print(f"RESULT {name}: {found['bytes']} bytes, {found['transports']}")
        for row in found[name]:
            said, took = ("-" if row[key] is None else f"{1e3 * row[key]:.2f} ms" for key in ("predicted", "took"))
            verdict = {True: "within 30 %", False: "NOT within 30 %", None: ""}[row.get("within_30_percent")]
            print(f"  {row['stage']:<10}{took:>12}{said:>12}  {verdict}  {row['because']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, required=True, help="a directory; made if it is not there")
    parser.add_argument("--engine", choices=("reference", "vllm"), default="reference")
    parser.add_argument("--replica-gpu", type=int, default=0)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--updates", type=int, default=10)
    options = parser.parse_args()
    if not options.cpu and not torch.cuda.is_available():
        parser.error("torch sees no GPU here; --cpu takes a small model without one")
    options.output.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix="traced") as directory:
        found = measure(
            Path(directory), options.output, options.engine, options.cpu, options.replica_gpu, options.updates
        )
    _print(found)


if __name__ == "__main__":
    main()
