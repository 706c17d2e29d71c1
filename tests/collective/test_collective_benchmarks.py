"""The benchmarks of collectives, over Gloo with few bytes: so much of them as needs no GPU has been seen to work before
anybody pays for GPUs."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import collective_both_ways, collective_stages
from benchmarks.gpu.collective_stages import Point, stages_of
from benchmarks.gpu.test_sharded import layout

on_cpus = pytest.mark.skipif(torch.cuda.is_available(), reason="with GPUs it moves 16 GB: run the benchmark itself")


@pytest.mark.slow
@on_cpus
def test_both_ways_brings_the_others_bytes() -> None:
    """The benchmark itself asserts what arrives."""
    found = collective_both_ways.measure("default")
    assert found["GB_s"].keys() == {"one", "grouped", "apart"}


@on_cpus
def test_a_setting_leaves_the_environment_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_BUFFSIZE", "1")
    monkeypatch.setattr(collective_both_ways, "SETTINGS", {"some": {"NCCL_BUFFSIZE": "2", "NCCL_MIN_CTAS": "3"}})
    seen = {}

    def spawned(*_: object, **__: object) -> None:
        seen.update({name: collective_both_ways.os.environ.get(name) for name in ("NCCL_BUFFSIZE", "NCCL_MIN_CTAS")})
        raise InterruptedError

    monkeypatch.setattr(collective_both_ways.multiprocessing, "spawn", spawned)
    with pytest.raises(InterruptedError):
        collective_both_ways.measure("some")
    assert seen == {"NCCL_BUFFSIZE": "2", "NCCL_MIN_CTAS": "3"}
    assert collective_both_ways.os.environ["NCCL_BUFFSIZE"] == "1"
    assert "NCCL_MIN_CTAS" not in collective_both_ways.os.environ


@pytest.mark.slow
@on_cpus
def test_stages_of_whole_updates_are_told() -> None:
    with tempfile.TemporaryDirectory(prefix="ckpt") as short:  # a socket's path has to be
        found = collective_stages.measure(Path(short), 1, "reference", 1)
    assert found["members"] == 2
    assert {"first_bucket", "other_buckets", "verify", "agent_PauseEngine"} <= found["medians"].keys()
    assert all(each["median"] >= 0 for name, each in found["medians"].items() if name.startswith("agent_"))


def test_stages_are_those_of_the_slowest_member() -> None:
    names = ("vote", "dirty", "transfer", "first", "arrived", "install", "verify", "commit", "clean")
    points = [
        Point(10.0, 1, "trainer.part.vote"),
        Point(13.5, 1, "trainer.part.run"),
        Point(19, 1, "trainer.part.sent"),
    ]
    points += [Point(11.0 + number, 2, f"worker.install.{name}") for number, name in enumerate(names)]
    points += [Point(12.0 + 2 * number, 3, f"worker.install.{name}") for number, name in enumerate(names)]
    points += [Point(5.0, 4, "agent.does.PauseEngine.begin"), Point(7.0, 4, "agent.does.PauseEngine.end")]
    found = stages_of(points, 1, [2, 3])
    assert found["last_vote_to_trainer_begins"] == 1.5
    assert found["last_vote_to_last_worker_begins"] == 2.0
    assert found["trainer_begins_after_first_worker"] == 0.5
    assert (found["first_bucket"], found["other_buckets"], found["verify"]) == (2.0, 2.0, 2.0)
    assert found["agent_PauseEngine"] == 2.0
    with pytest.raises(AssertionError, match=r"process 3 never reached worker\.install\.first"):
        stages_of([each for each in points if each[1:] != (3, "worker.install.first")], 1, [2, 3])


@pytest.mark.parametrize(
    ("case", "gpus", "ranks", "workers"),
    [
        ("same", 2, 2, [0, 1]),
        ("same", 8, 2, [0, 1]),
        ("others", 2, 0, [0, 1]),
        ("others", 3, 1, [1, 2]),
        ("others", 4, 2, [2, 3]),
        ("others", 8, 4, [6, 7]),
    ],
)
def test_ranks_and_workers_have_gpus_of_their_own(case: str, gpus: int, ranks: int, workers: list[int]) -> None:
    assert layout(case, gpus) == (ranks, workers)
