"""What is predicted beside what was measured on GPUs; docs/plan.md has the same table."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ckpt_engine.core.prediction import FILL
from ckpt_engine.planning.foresight import Forecast, foresee
from ckpt_engine.planning.question import PlanOptions, question_of, rates_of
from ckpt_engine.planning.update import plan_update
from ckpt_engine.planning.words import seconds
from tests.planning.known_models import QWEN3_8B

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
NEWER = {name: value for name, value in QWEN3_8B.items() if name != "torch_dtype"} | {"dtype": "bfloat16"}
"""As transformers 5 writes it."""

SIXTEEN = {"digest": {"host": 61.88}}
"""benchmarks/results/digest_16_processors.json: 400 mixed tensors."""

WITHIN = 0.30


class Row(NamedTuple):
    """what: is compared. fact: seconds, of a benchmark's results."""

    what: str
    asked: PlanOptions
    predicted: Callable[[Forecast], float]
    fact: float
    rates: dict[str, Any] | None = None
    held: bool = False


@cache
def results(name: str, test: str = "") -> dict[str, Any]:
    runs = json.loads((RESULTS / f"{name}.json").read_text())["benchmarks"]
    found: dict[str, Any] = next(run for run in runs if test in run["name"])["extra_info"]
    return found


def median(name: str, what: str, test: str = "") -> float:
    return float(results(name, test)["medians"][what]["median"])


def without_load(what: str) -> float:
    """vLLM's, before its streams begin."""
    return float(json.loads((RESULTS / "gpu_under_load.json").read_text())["ours"]["idle"][what]["median"])


def transfer(forecast: Forecast) -> float:
    return forecast.stages["transfer"].seconds


def pause(forecast: Forecast) -> float:
    assert forecast.pause is not None
    return forecast.pause


def call(forecast: Forecast) -> float:
    assert forecast.call is not None
    return forecast.call


def fill(forecast: Forecast) -> float:
    return forecast.stages[FILL].seconds


NOWHERE = Path()
REFERENCE = PlanOptions(NOWHERE, engine="reference")


def rows() -> Iterator[Row]:
    for name, asked in (("gpu_same", PlanOptions(NOWHERE, same_gpus=True)), ("gpu_peer", PlanOptions(NOWHERE))):
        words = "same GPU, vLLM" if asked.same_gpus else "GPU to GPU, vLLM"
        yield Row(f"{words}: transfer", asked, transfer, median(name, "transfer_seconds"))
    vllm = PlanOptions(NOWHERE, same_gpus=True)
    yield Row("same GPU, vLLM: pause", vllm, pause, without_load("pause_seconds"))
    yield Row("same GPU, vLLM: whole call", vllm, call, without_load("report_seconds"))
    sglang = PlanOptions(NOWHERE, engine="sglang", same_gpus=True)
    yield Row("same GPU, SGLang: pause", sglang, pause, median("gpu_sglang", "pause_seconds", "test_idle"))
    for way, prefetch in (("cuda_ipc", "auto"), ("relay", "always")):
        for count in (1, 2, 3):
            asked = replace(REFERENCE, replicas=count, prefetch=prefetch, gpus_per_host=4)
            said = results("gpu_many")[f"{way}, {count}"]
            words = f"4 GPUs, {count} replica{'s' * (count > 1)} by {way}"
            yield Row(f"{words}: transfer", asked, transfer, said["moved_seconds"]["median"])
            yield Row(f"{words}: pause", asked, pause, said["pause_seconds"]["median"])
            yield Row(f"{words}: whole call", asked, call, said["seconds"]["median"])
    sharded = PlanOptions(NOWHERE, "fsdp=2", tp=2, same_gpus=True)
    yield Row("FSDP2 on 2 GPUs to TP2 there: transfer", sharded, transfer, median("gpu_sharded", "transfer_seconds"))
    held = replace(REFERENCE, prefetch="always", until="held")
    yield Row("relay, held: filling", held, fill, median("gpu_relay_two_gpus", "fill_seconds"), held=True)
    yield Row("relay, held: whole call", held, call, median("gpu_relay_two_gpus", "held_seconds"), held=True)
    host = replace(REFERENCE, trainer_memory="host", same_gpus=False)
    said = "gpu_relay_cpu_trainer"
    yield Row("CPU trainer: pause", host, pause, median(said, "pause_seconds"), SIXTEEN)
    yield Row(
        "CPU trainer, digest rate of 16 processors: whole call", host, call, median(said, "call_seconds"), SIXTEEN
    )


def others() -> Iterator[Row]:
    """Where the prediction is off, and docs/plan.md says why."""
    host = replace(REFERENCE, trainer_memory="host")
    slow = median("gpu_relay_cpu_trainer", "call_seconds")
    yield Row("CPU trainer of 16 processors, default rates (2 processors): whole call", host, call, slow)


def forecast(row: Row, tmp_path: Path) -> Forecast:
    (tmp_path / "config.json").write_text(json.dumps(NEWER))
    (tmp_path / "rates.json").write_text(json.dumps(row.rates))
    asked = replace(row.asked, model=tmp_path, rates=tmp_path / "rates.json" if row.rates else None)
    answer = plan_update(question_of(asked))
    assert not answer.impossible
    return foresee(answer, rates_of(asked), asked.engine, row.held)


def written(row: Row, tmp_path: Path) -> str:
    predicted = row.predicted(forecast(row, tmp_path))
    return f"| {row.what} | {seconds(predicted)} | {seconds(row.fact)} | {100 * (predicted / row.fact - 1):+.0f} % |"


@pytest.mark.parametrize("row", list(rows()), ids=lambda row: row.what)
def test_predictions_are_near_what_was_measured(row: Row, tmp_path: Path) -> None:
    predicted = row.predicted(forecast(row, tmp_path))
    assert abs(predicted / row.fact - 1) < WITHIN, (predicted, row.fact)


def test_the_page_has_the_table(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "plan.md").read_text()
    missing = [line for row in (*rows(), *others()) if (line := written(row, tmp_path)) not in page]
    assert not missing, "\n" + "\n".join(missing)
