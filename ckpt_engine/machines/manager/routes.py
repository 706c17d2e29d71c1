"""Installs from relays: plans that read only from relays which hold the version, and what their readers must find.

Relays and replicas that have to do with each other are one route: mostly one relay, and the replicas of its host; a
replica on several hosts brings their relays together. Routes go side by side, and one that fails spoils no other. On
each: what its relays hold is joined, plans are compiled along the sealed record, finer pieces are digested by the
relays and must add up to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

from ckpt_engine.core.problems import deadline, unavailable
from ckpt_engine.machines.events import (
    Combined,
    CombineSeals,
    Compiled,
    CompilePlans,
    Done,
    HeldOffer,
    Joined,
    JoinSources,
    Published,
)
from ckpt_engine.machines.manager.course import Course
from ckpt_engine.machines.manager.filling import Filling
from ckpt_engine.machines.manager.sealing import Sealing, refs_of
from ckpt_engine.machines.manager.targets import Targets, Way
from ckpt_engine.v1 import manager_pb2, weights_pb2

Problem = weights_pb2.Problem


@dataclass
class Route:
    """relays, replicas: by name. tables: digests of what the relays hold. way: what its replicas are installed with,
    once it is known. problem: why not."""

    relays: set[str]
    replicas: set[str]
    tables: set[bytes]
    published: Published | None = None
    compiled: Compiled | None = None
    sealing: Sealing | None = None
    way: Way | None = None
    problem: Problem | None = None
    unfit: dict[str, Problem] = field(default_factory=dict)

    @property
    def over(self) -> bool:
        """Whether nothing more comes of it."""
        return self.way is not None or self.problem is not None

    @property
    def why_unread(self) -> Problem | None:
        """Why nobody reads its relays; None if somebody does."""
        return None if self.way is not None else self.problem or next(iter(self.unfit.values()), None)


class Routes:
    """Of one update. record: the sealed record of `identity`."""

    def __init__(
        self, course: Course, targets: Targets, identity: weights_pb2.Identity, record: manager_pb2.BlobRef
    ) -> None:
        self._course = course
        self._state = course.state
        self._targets = targets
        self._identity = identity
        self._record = record
        self._routes: list[Route] = []

    def start(self, fillings: Sequence[Filling], now: float) -> None:
        """fillings: those that hold the version."""
        self._routes = _connected(fillings)
        for number, route in enumerate(self._routes):
            offers = tuple(
                HeldOffer(holder.source, held.table, held.record if held.HasField("record") else None)
                for holder in self._state.members.connected_holders()
                for held in holder.held
                if held.table.digest in route.tables and held.identity == self._identity
            )
            task = JoinSources(self._identity, offers, self._record, self._course.left(now))
            self._course.run(f"join {number}", task)

    @property
    def over(self) -> bool:
        """Whether nothing is waited for."""
        return all(route.over for route in self._routes)

    def send(self, now: float) -> None:
        """Tells, again, the relays that have not digested."""
        for route in self._routes:
            if route.sealing is not None and not route.over:
                route.sealing.send(self._course.left(now))

    def take(self, body: manager_pb2.Sealed, now: float) -> None:
        """An answer of a relay."""
        for number, route in enumerate(self._routes):
            if route.sealing is None or route.over or not route.sealing.missing():
                continue
            route.problem = route.sealing.take(body)
            self._combine(number, route, now)

    def done(self, step: str, number: int, done: Done, now: float) -> None:
        """A task of one route ended."""
        route = self._routes[number]
        if route.over:
            return
        if done.problem is not None:
            route.problem = done.problem
        elif step == "join":
            self._plan(number, route, cast(Joined, done.result), now)
        elif step == "plan":
            self._seal(number, route, cast(Compiled, done.result), now)
        else:
            assert route.compiled is not None
            route.way = Way(route.compiled, cast(Combined, done.result))

    def overdue(self, seconds: float) -> None:
        """Their time is over, `seconds` after the update began."""
        for route in self._routes:
            if not route.over:
                route.problem = deadline(f"it was not planned with {seconds:.1f} s after the update began").problem

    def ways(self) -> dict[str, Way]:
        """By replica, for those that are installed from relays only."""
        return {
            name: route.way
            for route in self._routes
            if route.way is not None
            for name in {name for name, _ in route.way.compiled.plans}
        }

    def gone(self, relay: str, why: str) -> None:
        """It is not there any more: what is still to be done needs it."""
        for route in self._routes:
            if relay in route.relays and not route.over:
                route.problem = unavailable(f"{relay}: {why}").problem

    def unread(self) -> dict[str, Problem]:
        """Relays that hold the version and are read by nobody, with the reason."""
        return {relay: why for route in self._routes if (why := route.why_unread) is not None for relay in route.relays}

    def unfit(self) -> dict[str, Problem]:
        """Why replicas that were to be installed from relays are not; by name."""
        return {name: problem for route in self._routes for name, problem in route.unfit.items()}

    def blobs(self) -> list[manager_pb2.BlobRef]:
        """Blobs that members may fetch, or that are still needed."""
        refs: list[manager_pb2.BlobRef] = []
        for route in self._routes:
            refs += [route.published.manifest] if route.published is not None else []
            refs += refs_of(route.compiled, route.sealing, None if route.way is None else route.way.combined)
        return refs

    def _plan(self, number: int, route: Route, joined: Joined, now: float) -> None:
        if joined.published is None or joined.record is None:
            refused = next(iter(joined.refused.values()), None)
            route.problem = refused or unavailable("what it holds is not told any more").problem
            return
        route.published = joined.published
        workers = tuple(worker for worker in self._targets.workers() if worker.key[0] in route.replicas)
        task = CompilePlans(joined.published, workers, self._course.left(now), joined.record, self._identity.root)
        self._course.run(f"plan {number}", task)

    def _seal(self, number: int, route: Route, compiled: Compiled, now: float) -> None:
        assert route.published is not None
        route.compiled, route.unfit = compiled, dict(compiled.unfit)
        if not compiled.plans:
            route.problem = (
                next(iter(compiled.unfit.values()), None) or unavailable("nobody is left to read it").problem
            )
            return
        route.sealing = Sealing(self._course, route.published, compiled, keep=True)
        route.sealing.send(self._course.left(now))
        self._combine(number, route, now)

    def _combine(self, number: int, route: Route, now: float) -> None:
        if route.over or route.sealing is None or route.sealing.missing():
            return
        assert route.published is not None
        assert route.compiled is not None
        seconds = self._course.left(now)
        task = CombineSeals(route.published, route.compiled, route.sealing.digests(), seconds)
        self._course.run(f"combine {number}", task)


def _connected(fillings: Sequence[Filling]) -> list[Route]:
    """Relays that share a replica are on one route."""
    routes: list[Route] = []
    for filling in fillings:
        assert filling.answer is not None
        route = Route({filling.relay}, set(filling.replicas), {filling.answer.table})
        near = [other for other in routes if not other.replicas.isdisjoint(route.replicas)]
        for other in near:
            route.relays |= other.relays
            route.replicas |= other.replicas
            route.tables |= other.tables
        routes = [other for other in routes if other not in near] + [route]
    return routes
