"""What a scrub costs the engine that it runs beside, on a CPU: steps a second with and without it, in turns.

    python -m benchmarks.scrub_cost -o FILE

A step reads all weights once, as decoding a token does, on the engine's thread, while the scrub of the same process
hashes them on its own. Paces: off; the one at which 16.4 GB (Qwen3-8B) are hashed in 60 s; and the fastest that any
interval leads to, a quarter of the time. Arms are measured in turns, and by the processor's time of each thread beside
the clock's, since a busy machine takes turns away from both.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ckpt_engine.engine.target import ModuleTarget, Weights
from tests.install.install_world import Checkpoint, OneWorker

ROWS, COLUMNS, LAYERS = 4096, 2048, 16  # 256 MiB of bfloat16
WINDOW_SECONDS = 2.0
ROUNDS = 5
MODEL_BYTES, MODEL_SECONDS = 16.4e9, 60.0
FASTEST = 1e-3
"""An interval in which nothing can be hashed, so that the share of the time is what bounds it."""


class Layers(nn.Module):
    """Matrices that a token goes through one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(
            nn.Parameter(torch.zeros(ROWS, COLUMNS, dtype=torch.bfloat16), requires_grad=False) for _ in range(LAYERS)
        )

    def load_weights(self, weights: Weights) -> None:
        for name, weight in weights:
            self.get_parameter(name).data.copy_(weight)

    def step(self, vector: Tensor) -> Tensor:
        """One token: every weight is read once."""
        for weight in self.weights:
            vector = torch.mv(weight, vector)[:COLUMNS]
            vector = vector / vector.norm()
        return vector


class Window(NamedTuple):
    """What a window came to."""

    steps: float  # a second
    steps_by_processor: float  # a second of the engine's thread on a processor
    hashed: float  # bytes a second
    scrub_seconds: float  # of the other threads on a processor, for each gigabyte hashed; 0 if none was


def window(model: Layers, worker: OneWorker, size: int) -> Window:
    """Steps for a while. size: bytes of a pass."""
    vector = torch.ones(COLUMNS, dtype=torch.bfloat16)
    count, passes = 0, _passes(worker)
    began, own, all_threads = time.perf_counter(), time.thread_time(), time.process_time()
    while (now := time.perf_counter()) - began < WINDOW_SECONDS:
        vector = model.step(vector)
        count += 1
    own, all_threads = time.thread_time() - own, time.process_time() - all_threads
    hashed = (_passes(worker) - passes) * size
    scrub_seconds = (all_threads - own) / (hashed / 1e9) if hashed else 0.0
    return Window(count / (now - began), count / own, hashed / (now - began), scrub_seconds)


def measure(directory: Path) -> dict[str, Any]:
    """All arms, in turns."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(1)
    weights = {
        f"weights.{number}": torch.randn(ROWS, COLUMNS, generator=generator).to(torch.bfloat16)
        for number in range(LAYERS)
    }
    checkpoint = Checkpoint(weights)
    size = sum(weight.nbytes for weight in weights.values())
    intervals = {"off": 0.0, "pace": MODEL_SECONDS * size / MODEL_BYTES, "fastest": FASTEST}
    arms = {}
    for name, interval in intervals.items():
        (directory / name).mkdir()
        model = Layers()
        worker = OneWorker(ModuleTarget(model), directory / name, scrub_seconds=interval)
        report = worker.update(checkpoint).report
        assert not report.HasField("problem"), report.problem.message
        arms[name] = model, worker
    found: dict[str, list[Window]] = {name: [] for name in intervals}
    for _ in range(ROUNDS):
        for name, (model, worker) in arms.items():
            one, other = (each for key, (_, each) in arms.items() if key != name)
            with one.scrub.halted(), other.scrub.halted():
                found[name].append(window(model, worker, size))
    for _, worker in arms.values():
        worker.installer.close()
    checkpoint.close()
    return {
        "bytes": size,
        "host": {"machine": platform.machine(), "processors": os.cpu_count(), "load": round(os.getloadavg()[0], 1)},
        "arms": {
            name: {
                "interval_seconds": round(intervals[name], 4),
                "steps_per_second": round(median(each.steps for each in windows), 2),
                "steps_per_processor_second": round(median(each.steps_by_processor for each in windows), 2),
                "of_off_by_processor": round(
                    median(
                        each.steps_by_processor / off.steps_by_processor
                        for each, off in zip(windows, found["off"], strict=True)
                    ),
                    4,
                ),
                "hashed_gigabytes_per_second": round(median(each.hashed for each in windows) / 1e9, 3),
                "scrub_processor_seconds_per_gigabyte": round(median(each.scrub_seconds for each in windows), 3),
            }
            for name, windows in found.items()
        },
    }


def _passes(worker: OneWorker) -> float:
    """Passes so far, with the part of the one that goes on."""
    current = worker.scrub._round
    part = current.done / current.bytes if current is not None and current.bytes else 0.0
    return worker.scrub._state.passes + part


def main() -> None:
    """Runs it and writes FILE."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", type=Path, required=True, metavar="FILE")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        found = measure(Path(directory))
    options.o.write_text(json.dumps(found, indent=2) + "\n")
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
