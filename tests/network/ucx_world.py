"""Owners of chunks in other processes, with and without UCX."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckpt_engine.host.processes import process_start_time
from ckpt_engine.transport.ucx.packages import installed
from ckpt_engine.v1.weights_pb2 import OfferedRegion
from tests.line_process import LineProcess

NEEDS_NIXL = pytest.mark.skipif(installed() is None, reason="NIXL is not installed (pip install nixl-cu12 --no-deps)")


class Other(LineProcess):
    """An owner in a process of its own; see owner_process.py. before: of its command line, such as `ip netns exec`."""

    def __init__(self, devices: str = "lo", address: str = "127.0.0.1", before: tuple[str, ...] = ()) -> None:
        super().__init__("tests.network.owner_process", devices, address, before=before)

    def __call__(self, do: str, **given: Any) -> Any:
        """Has a command done. Raises RuntimeError with what the relay says against it."""
        answer = self.ask(do=do, **given)
        if "no" in answer:
            raise RuntimeError(answer["no"])
        return answer["ok"]

    def lent(self) -> OfferedRegion:
        """Where its chunks are asked for, which it lends from now on."""
        return OfferedRegion.FromString(bytes.fromhex(self("lend")))


def alive(pid: int) -> bool:
    """Whether there is such a process; one that has ended and that its parent has not waited for yet is none."""
    return process_start_time(pid) != 0


def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Waits for something that is to come true."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.01)


def helpers(pid: int) -> list[int]:
    """All processes below one, as this host numbers them."""
    children = [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return children + [each for child in children for each in helpers(child)]


def maps(pid: int) -> set[str]:
    """How a process maps memory files of relays."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {line.split()[1] for line in lines if "memfd:ckpt-engine relay" in line}
