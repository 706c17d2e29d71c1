"""Installs from relays: plans that read only from relays which hold the version, and what their readers must find.

Relays and replicas that have to do with each other are one route: mostly one relay, and the replicas of its host; a
replica on several hosts, or two relays of one host, bring relays together. Routes go side by side, and one that fails
spoils no other. On each: what its relays hold is joined, plans are compiled along the sealed record, finer pieces are
digested by the relays and must add up to it.

A relay that fails on the way is left out, and its route begins anew with the others, which may hold all that is needed.
If nobody can say which one failed, each is tried alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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
from ckpt_engine.machines.manager.recipients import Recipients, Way
from ckpt_engine.machines.manager.sealing import Sealing, refs_of
from ckpt_engine.v1 import manager_pb2, weights_pb2

Problem = weights_pb2.Problem


@dataclass
class Route:
    """The relays that together serve some replicas, and how far their plans have come.

    fillings: of its relays. way: what their replicas are installed with, once it is known. problem: why not. out:
    relays that failed on it; others go on in its place if `replaced`.
    """

    fillings: tuple[Filling, ...]
    published: Published | None = None
    compiled: Compiled | None = None
    sealing: Sealing | None = None
    way: Way | None = None
    problem: Problem | None = None
    unfit: dict[str, Problem] = field(default_factory=dict)
    out: dict[str, Problem] = field(default_factory=dict)
    replaced: bool = False

    @property
    def relays(self) -> set[str]:
        """The relays, by the ids of what they offer."""
        return {filling.relay for filling in self.fillings}

    @property
    def replicas(self) -> set[str]:
        """The replicas, by name."""
        return {name for filling in self.fillings for name in filling.replicas}

    @property
    def tables(self) -> set[bytes]:
        """Digests of the tables by which its relays are read."""
        return {filling.answer.table for filling in self.fillings if filling.answer is not None}

    @property
    def over(self) -> bool:
        """Whether nothing more comes of it."""
        return self.way is not None or self.problem is not None or self.replaced

    @property
    def unread(self) -> dict[str, Problem]:
        """The relays of it that nobody reads, with the reason."""
        if self.way is not None or self.replaced:
            return self.out
        why = self.problem or next(iter(self.unfit.values()), None)
        return {} if why is None else dict.fromkeys(self.relays, why) | self.out


class Routes:
    """The routes of one update. record: the sealed record of `identity`."""

    def __init__(
        self, course: Course, recipients: Recipients, identity: weights_pb2.Identity, record: manager_pb2.BlobRef
    ) -> None:
        self._course = course
        self._state = course.state
        self._recipients = recipients
        self._identity = identity
        self._record = record
        self._routes: list[Route] = []

    def start(self, fillings: Sequence[Filling], now: float) -> None:
        """Begins with the relays that hold the version. fillings: theirs."""
        for each in _connected(fillings):
            self._join(each, now)

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
        """Takes an answer of a relay."""
        for number, route in enumerate(tuple(self._routes)):
            if route.sealing is None or route.over or not route.sealing.missing():
                continue
            asked = route.sealing.asked(body)
            problem = route.sealing.take(body)
            if problem is not None:
                self._again(route, dict.fromkeys(asked, problem), problem, now)
            self._combine(number, route, now)

    def done(self, step: str, number: int, done: Done, now: float) -> None:
        """A task of one route ended."""
        route = self._routes[number]
        if route.over:
            return
        if done.problem is not None:
            self._again(route, {}, done.problem, now)
        elif step == "join":
            self._plan(number, route, cast(Joined, done.result), now)
        elif step == "plan":
            self._seal(number, route, cast(Compiled, done.result), now)
        else:
            assert route.compiled is not None
            route.way = Way(route.compiled, cast(Combined, done.result))

    def overdue(self, seconds: float, now: float) -> None:
        """Ends the routes whose time is over, `seconds` after the update began. They begin anew without the relays that
        are silent."""
        self._course.begin("joining", self._state.deadlines.plan, now)
        problem = deadline(f"it was not planned with {seconds:.1f} s after the update began").problem
        for route in tuple(self._routes):
            silent = [] if route.sealing is None else [source.source for source in route.sealing.missing()]
            if not route.over and silent:
                self._again(route, dict.fromkeys(silent, problem), problem, now)
            elif not route.over:
                route.problem = problem

    def ways(self) -> dict[str, Way]:
        """The way of each replica that is installed from relays only."""
        return {
            name: route.way
            for route in self._routes
            if route.way is not None
            for name in {name for name, _ in route.way.compiled.plans}
        }

    def gone(self, relay: str, why: str, now: float) -> None:
        """Goes on without a relay that is not there any more."""
        problem = unavailable(f"{relay}: {why}").problem
        for route in tuple(self._routes):
            if relay in route.relays and not route.over:
                self._again(route, {relay: problem}, problem, now)

    def unread(self) -> dict[str, Problem]:
        """Relays that hold the version and are read by nobody, with the reason."""
        return {relay: why for route in self._routes for relay, why in route.unread.items()}

    def unfit(self) -> dict[str, Problem]:
        """Why replicas that were to be installed from relays are not; by name."""
        return {name: problem for route in self._routes if not route.replaced for name, problem in route.unfit.items()}

    def blobs(self) -> list[manager_pb2.BlobRef]:
        """Blobs that members may fetch, or that are still needed."""
        refs: list[manager_pb2.BlobRef] = []
        for route in self._routes:
            refs += [route.published.manifest] if route.published is not None else []
            refs += refs_of(route.compiled, route.sealing, None if route.way is None else route.way.combined)
        return refs

    def _join(self, fillings: tuple[Filling, ...], now: float) -> None:
        route = Route(fillings)
        tables = route.tables
        offers = tuple(
            HeldOffer(holder.source, held.table, held.record if held.HasField("record") else None)
            for holder in self._state.members.connected_holders()
            for held in holder.held
            if held.table.digest in tables and held.identity == self._identity
        )
        self._routes.append(route)
        task = JoinSources(self._identity, offers, self._record, self._course.left(now))
        self._course.run(f"join {len(self._routes) - 1}", task)

    def _again(self, route: Route, failed: Mapping[str, Problem], why: Problem, now: float) -> None:
        """Goes on without those that failed; with each alone if nobody can say who did. Ends it if nobody is left."""
        rest = [filling for filling in route.fillings if filling.relay not in failed]
        parts = _connected(rest) if failed else [(each,) for each in rest if len(rest) > 1]
        route.out |= failed
        route.replaced = bool(parts)
        route.problem = None if parts else why
        for part in parts:
            self._join(part, now)

    def _plan(self, number: int, route: Route, joined: Joined, now: float) -> None:
        route.out |= joined.refused
        if joined.published is None or joined.record is None:
            refused = next(iter(joined.refused.values()), None)
            route.problem = refused or unavailable("what it holds is not told any more").problem
            return
        route.published = joined.published
        workers = tuple(worker for worker in self._recipients.workers() if worker.key[0] in route.replicas)
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
        route.sealing = Sealing(self._course, route.published, compiled, keep=True, fence=self._course.filling)
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


def _connected(fillings: Iterable[Filling]) -> list[tuple[Filling, ...]]:
    """Groups of relays: those that share a replica are together."""
    found: list[tuple[Filling, ...]] = []
    for filling in fillings:
        near = [other for other in found if any(not set(each.replicas).isdisjoint(filling.replicas) for each in other)]
        found = [other for other in found if other not in near] + [
            (*(each for other in near for each in other), filling)
        ]
    return found
