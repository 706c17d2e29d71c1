"""Searches for garbage while a command loads its modules: hardly any, since what they make stays.

They take a tenth of a command's start, and more the more it loads.
"""

from __future__ import annotations

import gc

_OBJECTS = 1_000_000
"""That are made before a search; a command that never says that it is loaded has one now and then."""

_usual = gc.get_threshold()


def begin_loading() -> None:
    """First of all in a process; on its main thread."""
    gc.set_threshold(_OBJECTS)


def end_loading() -> None:
    """Before the process serves: searches are as frequent as ever, among what is made from now on."""
    gc.freeze()
    gc.set_threshold(*_usual)
