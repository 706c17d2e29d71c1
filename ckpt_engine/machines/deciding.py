"""Hands out the commands of one event: all of them, or none."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

Command = TypeVar("Command")


def commands_of(out: list[Command], decide: Callable[[], None]) -> list[Command]:
    """Returns what `decide` puts into `out`, and empties `out`.

    If `decide` raises, which is a defect, its commands are dropped: half of them may make no sense.
    """
    try:
        decide()
        return out[:]
    finally:
        out.clear()
