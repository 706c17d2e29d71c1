"""What a forked child closes: mainly sockets, which would hide its parent's death from peers if they stayed open."""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Forgets(Protocol):
    """Something that belongs to the process that made it."""

    def forget(self) -> None:
        """Called in a forked child: closes inherited copies without telling peers. Never raises."""
        ...


_registered: weakref.WeakSet[Forgets] = weakref.WeakSet()


def forget_in_children(thing: Forgets) -> None:
    """Has every child that is forked from now on call `forget`, for as long as `thing` lives. Any thread."""
    _registered.add(thing)


def _after_fork() -> None:
    for each in list(_registered):
        each.forget()


os.register_at_fork(after_in_child=_after_fork)
