"""The pause of an update into a server that quantises what it loads, beside one that keeps bfloat16, in one run.

    python -m benchmarks.gpu.quantised_pause -o FILE                    # vLLM
    python -m benchmarks.gpu.quantised_pause -o FILE --engine sglang

Both servers have Qwen3-8B's shapes and share GPU 0 with the trainer, whose live parameters they read, so that the
difference is what the engine's processing takes. Updated in turns, without clients.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.gpu.measure import ROUNDS, WARMUP, Series, rounded, versions
from benchmarks.gpu.qwen3_8b import BYTES, Tree, renew, write_config
from benchmarks.gpu.rivals import SGLANG_SIZES
from ckpt_engine import Trainer
from tests.cluster import Cluster, Replica, running_cluster
from tests.gpu.gpu_server import start_gpu_vllm
from tests.gpu.sglang_fleet import start_gpu_sglang

ARGUMENTS: dict[str, tuple[str, ...]] = {"bfloat16": (), "fp8": ("--quantization", "fp8")}
UP_SECONDS = 400.0


def start_vllm(cluster: Cluster, name: str, config: Path) -> Replica:
    return start_gpu_vllm(cluster, name, config, *ARGUMENTS[name], visible="0")


def start_sglang(cluster: Cluster, name: str, config: Path) -> Replica:
    sizes = [each if each != "0.5" else "0.3" for each in SGLANG_SIZES]  # of the GPU's memory, for either server
    return start_gpu_sglang(cluster, name, config, *sizes, *ARGUMENTS[name], visible="0")


START: dict[str, Callable[[Cluster, str, Path], Replica]] = {"vllm": start_vllm, "sglang": start_sglang}


def update(trainer: Trainer, replica: Replica, series: Series) -> list[str]:
    """One of this replica; returns what its report says of quantised layers."""
    report = trainer.update_weights(timeout=120, replicas=[replica.name])
    assert report.ok, f"{report}\n{replica.tail()}"
    assert report.verified
    assert report.nbytes == BYTES, f"{report.nbytes} of {BYTES} bytes: {report}"
    (outcome,) = report.replicas
    (worker,) = outcome.message.workers
    stages = {f"stage_{name}": seconds for name, seconds in outcome.stages.items()}
    series.add(pause_seconds=outcome.pause_seconds, sync_seconds=outcome.sync_seconds, **stages)
    return [f"{each.method}: {each.layers} layers" for each in worker.quantised]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--engine", choices=tuple(START), default="vllm")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("torch sees no GPU here")
    with TemporaryDirectory(prefix="quantised") as directory, running_cluster(Path(directory) / "cluster") as cluster:
        config = write_config(Path(directory) / "model")
        replicas = {name: START[options.engine](cluster, name, config) for name in ARGUMENTS}
        model = Tree("cuda:0")
        renew(model, 1)
        for replica in replicas.values():
            replica.registered(UP_SECONDS)
        with Trainer(cluster.address, lineage="quantised-pause") as trainer:
            trainer.publish(model, move=True)
            series = {name: Series() for name in replicas}
            layers: dict[str, list[str]] = {}
            for seed in range(WARMUP + ROUNDS):
                renew(model, seed)
                for name, replica in replicas.items():
                    layers[name] = update(trainer, replica, series[name])
    pause = {name: series[name].median("pause_seconds") for name in series}
    result: dict[str, Any] = {
        "engine": options.engine,
        "bytes": BYTES,
        "quantised": layers,
        "pause_over_bfloat16": pause["fp8"] / pause["bfloat16"],
        **{name: {"first": each.first(), **each.last(ROUNDS)} for name, each in series.items()},
        "versions": versions(options.engine),
    }
    options.output.write_text(json.dumps(rounded(result), indent=1) + "\n")
    for name, seconds in pause.items():
        print(f"RESULT {options.engine} {name}: pause {1e3 * seconds:.1f} ms; {layers[name]}", flush=True)


if __name__ == "__main__":
    main()
