"""What becomes of the commands of one event: all of them are handed out, or none."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

Command = TypeVar("Command")


def commands_of(out: list[Command], decide: Callable[[], None]) -> list[Command]:
    """What `decide` has put into `out`, which is empty afterwards.

    If it raises, which is a defect, nothing of that is left for the next event: nobody knows whether the half of it
    makes sense. What must arrive is sent again by its owner's timer.
    """
    try:
        decide()
        return out[:]
    finally:
        out.clear()
