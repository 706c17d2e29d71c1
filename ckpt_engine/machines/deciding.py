"""What becomes of the commands of one event: all of them are handed out, or none."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

Command = TypeVar("Command")


def commands_of(out: list[Command], decide: Callable[[], None]) -> list[Command]:
    """What `decide` has put into `out`, which is empty afterwards.

    If it raises, which is a defect, nothing of that is left: nobody knows whether the half of it makes sense.
    """
    try:
        decide()
        return out[:]
    finally:
        out.clear()
