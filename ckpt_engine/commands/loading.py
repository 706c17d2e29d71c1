"""Keeps the garbage collector from running while a command loads its modules: what they make stays.

Collections take a tenth of a command's start, and more the more it loads.
"""

from __future__ import annotations

import gc

_OBJECTS = 1_000_000
"""Objects made before a collection. A command that never calls `end_loading` still has one now and then."""

_usual = gc.get_threshold()


def begin_loading() -> None:
    """Makes collections rare. Call it first of all in a process, on its main thread."""
    gc.set_threshold(_OBJECTS)


def end_loading() -> None:
    """Makes collections as frequent as usual, among objects made from now on. Call it before the process serves."""
    gc.freeze()
    gc.set_threshold(*_usual)
