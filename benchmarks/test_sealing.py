"""What sealing weights on a CPU costs their trainer: by default, with `move=True`, and if only digests were made.

One process has the tensors of a small transformer (0.6 GB, bfloat16) three times. "copied" is what `publish` does by
default: copy, digest the copy, digest what it was made of. "moved" is `move=True`: look at the memory that was left,
digest. "digested" is what no source can do without: digest. All are measured in turns, each after every weight changed,
as an optimizer's step does.
"""

from __future__ import annotations

import os
import time
from statistics import median

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture
from torch import nn

from ckpt_engine.digest.prepared import prepare_digests
from ckpt_engine.source.base import Source
from ckpt_engine.source.open import open_source
from ckpt_engine.v1.weights_pb2 import Atom, Atoms

LAYER = [(1024,), (1024,), (128,), (128,), (2048, 1024), (1024, 1024), (1024, 1024), (1024, 2048)]
LAYER += [(3072, 1024), (3072, 1024), (1024, 3072)]
SHAPES = [*(LAYER * 18), (25_000, 1024), (1024,)]
ROUNDS = 9


class Model(nn.Module):
    """So many tensors, and no computing."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.randn(shape).bfloat16() for shape in SHAPES])

    @torch.no_grad()
    def step(self) -> None:
        """Changes every weight where it lies."""
        for parameter in self.parameters():
            parameter.add_(0.125)


class Sealing:
    """One source, and what an update asks of it."""

    def __init__(self, model: Model, move: bool) -> None:
        began = time.perf_counter()
        self.source: Source = open_source(model, move=move)
        self.publish_seconds = time.perf_counter() - began
        shards = self.source.table().shards
        self.atoms = Atoms(atoms=[Atom(shard=i, start=each.start, stop=each.stop) for i, each in enumerate(shards)])

    def __call__(self) -> None:
        self.source.check()
        self.source.seal()
        self.source.digest(self.atoms)


def milliseconds(what: object) -> float:
    began = time.perf_counter()
    what()  # type: ignore[operator]
    return (time.perf_counter() - began) * 1e3


def test_sealing_on_a_cpu(benchmark: BenchmarkFixture) -> None:
    models = {name: Model() for name in ("copied", "moved", "digested")}
    copied, moved = Sealing(models["copied"], move=False), Sealing(models["moved"], move=True)
    digests = prepare_digests([(each.detach(), (0,) * each.dim()) for each in models["digested"].parameters()])
    ways = {"copied": copied, "moved": moved, "digested": digests.run}
    found: dict[str, list[float]] = {name: [] for name in ways}

    def turn() -> None:
        for name, way in ways.items():
            models[name].step()
            found[name].append(milliseconds(way))

    benchmark.pedantic(turn, rounds=ROUNDS, warmup_rounds=2)
    assert copied.source.table().stays_sealed
    assert not moved.source.table().copied
    size = sum(parameter.nbytes for parameter in models["copied"].parameters()) / 1e9
    taken = {name: median(times[-ROUNDS:]) for name, times in found.items()}
    benchmark.extra_info.update(
        gigabytes=round(size, 3),
        tensors=len(SHAPES),
        threads=torch.get_num_threads(),
        processors=len(os.sched_getaffinity(0)),
        load=round(os.getloadavg()[0], 1),
        milliseconds={name: round(each, 1) for name, each in taken.items()},
        milliseconds_a_gigabyte={name: round(each / size, 1) for name, each in taken.items()},
        rounds={name: [round(each, 1) for each in times[-ROUNDS:]] for name, times in found.items()},
        copied_against_moved=round(taken["copied"] / taken["moved"], 2),
        publish_milliseconds={
            "copied": round(copied.publish_seconds * 1e3),
            "moved": round(moved.publish_seconds * 1e3),
        },
    )


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "--benchmark-only", "-s"]))
