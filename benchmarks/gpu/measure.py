"""Ceilings and the arithmetic of medians, for benchmarks on GPUs."""

from __future__ import annotations

import importlib.metadata
import time
from collections.abc import Callable, Sequence
from statistics import median, quantiles
from typing import Any

import torch

from tests.cluster import Replica

ROUNDS = 10
WARMUP = 2
BUFFER = 4 << 30


class Series:
    """Numbers of one kind, one for each round, in named lists."""

    def __init__(self) -> None:
        self._values: dict[str, list[float]] = {}

    def add(self, **values: float) -> None:
        for name, value in values.items():
            self._values.setdefault(name, []).append(value)

    def last(self, rounds: int) -> dict[str, Any]:
        """Median, interquartile range, the largest and number of the last `rounds` values of each list (warm-up comes
        first)."""
        found = {}
        for name, values in self._values.items():
            kept = values[-rounds:]
            spread = quantiles(kept, n=4) if len(kept) > 1 else [kept[0]] * 3
            told = {"median": median(kept), "iqr": spread[2] - spread[0], "worst": max(kept), "rounds": len(kept)}
            found[name] = told
        return found

    def first(self) -> dict[str, float]:
        """The first value of each list: of the round that maps and prepares everything."""
        return {name: values[0] for name, values in self._values.items()}

    def median(self, name: str, rounds: int = ROUNDS) -> float:
        return median(self._values[name][-rounds:])


def seconds_of(work: Callable[[], object]) -> float:
    """Wall time of `work` until every GPU of this process is idle again."""
    _synchronize()
    began = time.perf_counter()
    work()
    _synchronize()
    return time.perf_counter() - began


def _synchronize() -> None:
    for device in range(torch.cuda.device_count()):
        torch.cuda.synchronize(device)


class CopyCeiling:
    """How fast one contiguous buffer goes from one place to another; gigabytes (10^9) a second of payload. Host
    memory is pinned."""

    def __init__(self, source: str, destination: str, size: int = BUFFER) -> None:
        self._source = torch.empty(size // 2, dtype=torch.int16, device=source, pin_memory=source == "cpu")
        self._source.random_() if source != "cpu" else self._source.fill_(3)
        to_host = destination == "cpu"
        self._destination = torch.empty(size // 2, dtype=torch.int16, device=destination, pin_memory=to_host)
        self._size = size
        self.once()

    def once(self) -> float:
        """Of one copy. After idle moments a GPU is some percent slower for a while."""
        seconds = seconds_of(lambda: self._destination.copy_(self._source, non_blocking=True))
        return self._size / seconds / 1e9

    def sustained(self) -> float:
        """Median of seven copies in a row: the ceiling."""
        return median(self.once() for _ in range(7))


def engine_check(replica: Replica) -> str:
    """How its engine was checked before its first update, with seconds; empty: it was not
    (CKPT_ENGINE_CHECK_ENGINE=always checks tested versions, too)."""
    status = replica.status
    return status.engine_check if status is not None else ""


def versions(*packages: str) -> dict[str, str]:
    """What the numbers depend on."""
    found = {"gpu": torch.cuda.get_device_name(0), "gpus": str(torch.cuda.device_count()), "torch": torch.__version__}
    for package in ("triton", "grpcio", "protobuf", *packages):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "absent"
    return found


def rounded(values: dict[str, Any]) -> dict[str, Any]:
    """Floats with five significant digits, at any depth."""
    return {
        key: rounded(value)
        if isinstance(value, dict)
        else float(f"{value:.5g}")
        if isinstance(value, float)
        else [float(f"{each:.5g}") if isinstance(each, float) else each for each in value]
        if isinstance(value, Sequence) and not isinstance(value, str)
        else value
        for key, value in values.items()
    }
