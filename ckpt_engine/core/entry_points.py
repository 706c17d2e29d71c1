"""What installed packages offer under a group of entry points: the names, and which of them are ours. It loads nothing
that they name, and does not decide what such a thing must be.

Our own engines and transports are found in this way too, so those of other packages are their equals.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType

OURS = frozenset({"ckpt_engine", "ckpt_engine_adapters"})
"""The packages of this distribution."""

REINSTALL = "the metadata of ckpt-engine is missing here, or older than its code: install it again (pip install)"
"""Why a group has none of ours, and what to do."""

log = logging.getLogger(__name__)


def points_of(group: str) -> Mapping[str, EntryPoint]:
    """The entry points of a group by name, sorted. Of two with one name ours is taken, else the first; the other is
    logged and left out. A group without any of ours is logged too. Looked for once for each `sys.path`."""
    return _points_of(group, tuple(sys.path))


@cache
def _points_of(group: str, path: tuple[str, ...]) -> Mapping[str, EntryPoint]:
    found: dict[str, EntryPoint] = {}
    for point in sorted(entry_points(group=group), key=lambda point: (not is_ours(point), point.name, point.value)):
        first = found.setdefault(point.name, point)
        if first.value != point.value:
            what = "ckpt-engine: %s %s (%s) is left out: %s has that name already"
            log.error(what, group, point.name, point.value, first.value)
    if not any(map(is_ours, found.values())):
        log.error("ckpt-engine: none of its own %s is known: %s", group, REINSTALL)
    return MappingProxyType({name: found[name] for name in sorted(found)})


def is_ours(point: EntryPoint) -> bool:
    """Whether an entry point names something of this distribution."""
    return point.value.partition(":")[0].partition(".")[0] in OURS
