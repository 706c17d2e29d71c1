"""Which routes of an engine's HTTP API anybody may ask for, and when. Pure.

Each engine's adapter sorts the routes of its engine into three classes. What nobody has sorted is of a fourth one, so
that a new version of an engine cannot bring a way around the agent.

A route is written as frameworks write it: `/health`; with a final slash all below it (`/dumper/`); `{name}` stands for
one segment and `{name:path}` for any rest (`/v1/responses/{response_id}/cancel`).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from enum import Enum
from typing import Any

_PLACE = re.compile(r"\{\w+(:path)?\}")


class RouteAccess(Enum):
    """Who may use a route, and when.

    open: says nothing of the weights, answered in any state. gated: generates, or says something of the weights.
    control: changes the engine, or what it computes with; only with the token. unknown: likewise.
    """

    OPEN = "open"
    GATED = "gated"
    CONTROL = "control"
    UNKNOWN = "unknown"


class _Set:
    """Routes of one class."""

    def __init__(self, routes: Collection[str], access: RouteAccess) -> None:
        self.access = access
        self.patterns = [_pattern(route) for route in routes if _PLACE.search(route)]
        plain = [route for route in routes if not _PLACE.search(route)]
        self.below = tuple(route for route in plain if route.endswith("/") and route != "/")
        self.exact = frozenset(plain).difference(self.below)

    def has(self, path: str) -> bool:
        bare = path.rstrip("/") or "/"
        return bare in self.exact or path.startswith(self.below) or any(each.fullmatch(bare) for each in self.patterns)


class EngineRoutes:
    """The classes of one engine's routes. A path that fits routes of two classes is of the strictest."""

    def __init__(self, opened: Collection[str], gated: Collection[str], control: Collection[str]) -> None:
        self._sets = (
            _Set(control, RouteAccess.CONTROL),
            _Set(gated, RouteAccess.GATED),
            _Set(opened, RouteAccess.OPEN),
        )
        self._known = {path: self._judge(path) for each in self._sets for path in each.exact}

    def of(self, path: str) -> RouteAccess:
        """The class of a path without the root path. A trailing slash says nothing: frameworks redirect there."""
        return self._known.get(path) or self._judge(path)

    def _judge(self, path: str) -> RouteAccess:
        return next((each.access for each in self._sets if each.has(path)), RouteAccess.UNKNOWN)

    def of_request(self, scope: Mapping[str, Any]) -> tuple[str, RouteAccess]:
        """Route and class of an ASGI request.

        The framework routes after it has taken the root path away, and older ones do not: what is a control route in
        either reading is one.
        """
        path: str = scope["path"]
        route = route_of(scope)
        access = self.of(route)
        if route is not path and access is not RouteAccess.CONTROL and self.of(path) is RouteAccess.CONTROL:
            return path, RouteAccess.CONTROL
        return route, access


def route_of(scope: Mapping[str, Any]) -> str:
    """The path of an ASGI request as Starlette's router sees it."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "")
    if root and path.startswith(root):
        rest = path[len(root) :]
        if not rest or rest[0] == "/":
            return rest or "/"
    return path


def listed(application: Any) -> Iterator[str]:
    """Every route of a Starlette or FastAPI application, those of mounted ones and included routers too."""
    yield from _listed(getattr(application, "routes", ()), "")


def _listed(routes: Any, before: str) -> Iterator[str]:
    for route in routes:
        included = getattr(route, "effective_candidates", None)  # FastAPI's, of a router that was included
        if included is not None:
            yield from _listed(included(), before)
            continue
        path = getattr(route, "path", "")
        below = getattr(route, "routes", None)
        if below is None:
            yield before + path
        else:
            yield before + path + "/"
            yield from _listed(below, before + path)


def _pattern(route: str) -> re.Pattern[str]:
    expression, end = "", 0
    for place in _PLACE.finditer(route):
        expression += re.escape(route[end : place.start()]) + (".*" if place[1] else "[^/]+")
        end = place.end()
    return re.compile(expression + re.escape(route[end:]))
