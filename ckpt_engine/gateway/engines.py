"""What adapters tell the gateway of their engines: which dialects they speak, how one is recognised, what it has to do.

It joins what all of them say, once when the gateway starts, and decides nothing about replicas or requests.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import NamedTuple

from ckpt_engine.core.problems import precondition
from ckpt_engine.engine.kinds import UnknownAdapterError, engine_kind, engine_names
from ckpt_engine.gateway.dialect import Dialect
from ckpt_engine.http_client.connections import Answer

log = logging.getLogger("ckpt_engine.gateway")


class Mark(NamedTuple):
    """By what an engine is recognised that no manager tells of: its answer with status 200 to GET `route` has `text`.

    Engines are tried in the order of their names, so that one whose mark others have too must come after them.
    """

    route: str
    text: str


@dataclass(frozen=True)
class Load:
    """How an engine is asked what it has to do: GET `route`, and what its answer says."""

    route: str
    requests: Callable[[Answer], int | None]
    """Requests that run and wait; None: the answer does not say. May raise ValueError, KeyError and TypeError."""


@dataclass(frozen=True)
class GatewaySide:
    """What the gateway asks of one kind of engine."""

    dialects: tuple[type[Dialect], ...] = ()
    """Those that it speaks, at their own routes."""
    mark: Mark | None = None
    """None: nothing tells it from others, so that any dialect is tried with it."""
    load: Load | None = None
    """None: it counts as having what this process sent it."""
    labels_each_token: bool = False
    """Whether each event of `/v1/completions` is of one token and names the version that made it. Others name the
    version that they hold when they answer, which says nothing of the tokens before."""


class Engines:
    """What is known of all kinds of engines. Immutable."""

    def __init__(self, sides: Mapping[str, GatewaySide]) -> None:
        """sides: by kind of engine, in the order in which they are recognised.

        Raises FAILED_PRECONDITION if two engines speak different dialects at one route: the gateway reads a request
        before it knows which engine answers it.
        """
        self.sides = dict(sides)
        self.dialects: dict[str, type[Dialect]] = {}
        """By route."""
        speakers: dict[str, set[str]] = {}
        for name, side in self.sides.items():
            for dialect in side.dialects:
                known = self.dialects.setdefault(dialect.route, dialect)
                if known is not dialect:
                    others = ", ".join(sorted(speakers[dialect.route]))
                    raise precondition(
                        f"{dialect.route} is {_place(known)} of engine {others}, and {_place(dialect)} of {name}: a "
                        "gateway reads a route in one form; let both name one dialect, or uninstall the package of one"
                    )
                speakers.setdefault(dialect.route, set()).add(name)
        self.speakers = {route: frozenset(names) for route, names in speakers.items()}
        """Kinds of engine that speak the dialect of a route."""
        self.labelling = frozenset(name for name, side in self.sides.items() if side.labels_each_token)
        """Kinds of engine whose events name the version of each token."""


def installed_engines() -> Engines:
    """What the adapters of this environment say. One that cannot be loaded is left out, and logged.

    Raises FAILED_PRECONDITION as Engines does.
    """
    sides: dict[str, GatewaySide] = {}
    for name in engine_names():
        try:
            place = engine_kind(name).gateway
            side = resolve_name(place) if place else GatewaySide()
        except UnknownAdapterError as error:
            log.error("engine %s is left out: %s", name, error)
        except Exception:
            log.exception("engine %s is left out: what its adapter says to the gateway cannot be loaded", name)
        else:
            sides[name] = side
    return Engines(sides)


def _place(dialect: type[Dialect]) -> str:
    return f"{dialect.__module__}.{dialect.__qualname__}"
