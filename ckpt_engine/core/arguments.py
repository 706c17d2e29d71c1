"""Checks a caller's arguments before the manager is called. Pure.

Each function raises INVALID_ARGUMENT with the wrong value and what to give instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any, TypeVar

from ckpt_engine.core.problems import invalid

Choice = TypeVar("Choice")

MOST_VERSION = 1 << 63
MOST_EPOCH = 1 << 64
MOST_COUNT = 1 << 31


def whole(number: object) -> bool:
    """Whether it is an integer. NumPy integers count; booleans do not."""
    return isinstance(number, Integral) and not isinstance(number, bool)


def checked_version(version: object) -> None:
    """Raises INVALID_ARGUMENT unless it is a version: a count of steps, from 0."""
    if not (isinstance(version, Integral) and whole(version) and 0 <= int(version) < MOST_VERSION):
        raise invalid(f"version {version!r} is not a count of steps: give a whole number from 0")


def checked_epoch(epoch: object) -> None:
    """Raises INVALID_ARGUMENT unless it is an epoch, as reports have it."""
    if not (isinstance(epoch, Integral) and whole(epoch) and 0 <= int(epoch) < MOST_EPOCH):
        raise invalid(f"epoch {epoch!r} is not an epoch: give a whole number from 0, as reports say it")


def checked_count(what: str, count: object, of: str) -> None:
    """Raises INVALID_ARGUMENT unless it is a count, from 0. of: the things counted, for the message."""
    if not (isinstance(count, Integral) and whole(count) and 0 <= int(count) < MOST_COUNT):
        raise invalid(f"{what} {count!r} is not a number of {of}: give a whole number from 0")


def checked_names(what: str, names: Sequence[str]) -> Sequence[str]:
    """Returns the names. Refuses a lone string, which would be taken for a list of letters."""
    if isinstance(names, str):
        raise invalid(f"{what} is a list of names: [{names!r}]")
    if not all(isinstance(name, str) for name in names):
        raise invalid(f"{what} is a list of names, not {list(names)!r}")
    return names


def choice(what: str, word: object, choices: Mapping[Any, Choice]) -> Choice:
    """Looks up what `word` stands for. choices: every valid word, with its meaning."""
    if not isinstance(word, str) or word not in choices:
        raise invalid(f"{what} {word!r} is none of {', '.join(choices)}")
    return choices[word]


def checked_flag(what: str, flag: object) -> None:
    """Raises INVALID_ARGUMENT unless it is True, False or None: a string such as "no" would count as true."""
    if not (flag is None or isinstance(flag, bool)):
        raise invalid(f"{what} {flag!r} is neither True nor False")
