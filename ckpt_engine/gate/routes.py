"""Access to the routes of an engine's HTTP API. Pure.

An engine's adapter sorts the engine's routes into three classes. A route in none of them needs the agent's token, so
that a new version of an engine cannot add a way around the agent.

Routes are written as in frameworks: `/health`; with a final slash also all below it (`/dumper/`); `{name}` stands for
one segment and `{name:path}` for any rest (`/v1/responses/{response_id}/cancel`).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from enum import Enum
from typing import Any

_PLACE = re.compile(r"\{\w+(:path)?\}")


class RouteAccess(Enum):
    """When a route may be used."""

    OPEN = "open"  # in any state: its answers do not depend on the weights
    GATED = "gated"  # while the weights are whole: its answers depend on them
    CONTROL = "control"  # only with the token: it changes the engine, or what it computes with
    UNKNOWN = "unknown"  # only with the token: no class has it


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
    """The classes of one engine's routes. A path that matches routes of two classes has the stricter one."""

    def __init__(self, open_routes: Collection[str], gated: Collection[str], control: Collection[str]) -> None:
        self._sets = (
            _Set(control, RouteAccess.CONTROL),
            _Set(gated, RouteAccess.GATED),
            _Set(open_routes, RouteAccess.OPEN),
        )
        self._cache = {path: self._judge(path) for each in self._sets for path in each.exact}

    def of(self, path: str) -> RouteAccess:
        """The class of a path without the root path. A trailing slash is ignored: frameworks redirect it."""
        return self._cache.get(path) or self._judge(path)

    def _judge(self, path: str) -> RouteAccess:
        return next((each.access for each in self._sets if each.has(path)), RouteAccess.UNKNOWN)

    def of_request(self, scope: Mapping[str, Any]) -> tuple[str, RouteAccess]:
        """Route and class of an ASGI request.

        Newer frameworks route by the path without the root path, older ones by the whole path: a request is for a
        control route if either of them is.
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
    """Lists every route of a Starlette or FastAPI application, also of mounted applications and included routers."""
    yield from _listed(getattr(application, "routes", ()), "")


def _listed(routes: Any, before: str) -> Iterator[str]:
    for route in routes:
        included = getattr(route, "effective_candidates", None)  # FastAPI has it for an included router
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
