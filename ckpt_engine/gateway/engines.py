"""What adapters declare of their engines for the gateway: dialects, how to recognise an engine, how to ask its load.

It joins all adapters' declarations once, when the gateway starts. It decides nothing about replicas or requests.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import NamedTuple

from ckpt_engine.core.problems import precondition
from ckpt_engine.engine.kinds import UnknownAdapterError, engine_kind, engine_names
from ckpt_engine.gateway.chat_text import ChatText
from ckpt_engine.gateway.dialect import Dialect
from ckpt_engine.gateway.rendering import RenderedDialect
from ckpt_engine.http_client.connections import Answer

log = logging.getLogger("ckpt_engine.gateway")


class Mark(NamedTuple):
    """How to recognise an engine without a manager: its answer with status 200 to GET `route` contains `text`.

    Engines are tried in the order of their names, so an engine with a mark that others share must come after them.
    """

    route: str
    text: str


@dataclass(frozen=True)
class Load:
    """How to ask an engine for its load: GET `route`, and read the answer."""

    route: str
    requests: Callable[[Answer], int | None]
    """Requests that run and wait; None: the answer does not say. May raise ValueError, KeyError and TypeError."""


@dataclass(frozen=True)
class GatewaySide:
    """What the gateway knows of one kind of engine."""

    dialects: tuple[type[Dialect], ...] = ()
    """The dialects that it speaks, each at its own route."""
    passed: tuple[str, ...] = ()
    """Its routes without a dialect, to which requests are passed on as they came. One of them may be missing in a
    server, by its model or its options."""
    rendered: tuple[type[RenderedDialect], ...] = ()
    """Its dialects whose prompts are messages, each at its callers' route."""
    chat_text: ChatText | None = None
    """How its chats go on by text; None: they do not."""
    mark: Mark | None = None
    """None: it cannot be recognised, so any dialect is tried with it."""
    load: Load | None = None
    """None: its load is the number of requests that this process sent it."""
    labels_each_token: bool = False
    """Whether each event of `/v1/completions` has one token and names the version that made it. Other engines name the
    version that they hold when they answer, which may not have made the tokens before."""


class Engines:
    """All kinds of engines. Immutable."""

    def __init__(self, sides: Mapping[str, GatewaySide]) -> None:
        """sides: by kind of engine, in the order in which they are recognised.

        Raises FAILED_PRECONDITION if two engines speak different dialects at one route: the gateway reads a request
        before it knows which engine answers it.
        """
        self.sides = dict(sides)
        self.dialects: dict[str, type[Dialect]] = {}  # by route
        speakers: dict[str, set[str]] = {}
        for name, side in self.sides.items():
            for dialect in side.dialects:
                first = self.dialects.setdefault(dialect.route, dialect)
                if first is not dialect:
                    others = ", ".join(sorted(speakers[dialect.route]))
                    raise precondition(
                        f"{dialect.route} is {_place(first)} of engine {others}, and {_place(dialect)} of {name}: a "
                        "gateway reads a route in one form; let both name one dialect, or uninstall the package of one"
                    )
                speakers.setdefault(dialect.route, set()).add(name)
        # Route to the kinds of engine that speak its dialect.
        self.speakers = {route: frozenset(names) for route, names in speakers.items()}
        # Route that has no dialect to the kinds of engine that requests are passed on to there.
        routes = {route for side in self.sides.values() for route in side.passed}
        self.passed = {
            route: frozenset(name for name, side in self.sides.items() if route in side.passed) for route in routes
        }
        # Route to the rendered dialect of each kind of engine that has one there.
        self.rendered: dict[str, dict[str, type[RenderedDialect]]] = {}
        for name, side in self.sides.items():
            for rendered in side.rendered:
                self.rendered.setdefault(rendered.caller_route, {})[name] = rendered
        self.chat_texts = {name: side.chat_text for name, side in self.sides.items() if side.chat_text is not None}
        # Kinds of engine with events that name the version of each token.
        self.labelling = frozenset(name for name, side in self.sides.items() if side.labels_each_token)


def installed_engines() -> Engines:
    """The engines of the installed adapters. An adapter that cannot be loaded is left out and logged.

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
