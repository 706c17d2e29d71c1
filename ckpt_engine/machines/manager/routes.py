"""Installs from relays: plans that read only from relays which hold the version, and what their readers must find.

Relays and replicas that have to do with each other are one route: mostly one relay, and the replicas of its host; a
replica on several hosts, or two relays of one host, bring relays together. Routes go side by side, and one that fails
spoils no other. On each: what its relays hold is joined, plans are compiled along the sealed record, finer pieces are
digested by the relays and must add up to it.

A relay that fails on the way is left out, and its route begins anew with the others, which may hold all that is needed.
If it is not known which one failed, each is tried alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ckpt_engine.core.problems import deadline, unavailable
from ckpt_engine.core.version import Version
from ckpt_engine.machines.events import Compiled, CompilePlans, Done, Joined, JoinSources, Published
from ckpt_engine.machines.manager.course import Course
from ckpt_engine.machines.manager.filling import Filling
from ckpt_engine.machines.manager.plan_pipeline import Failed, Planned, PlanPipeline, PlanTask, Sealing, Way
from ckpt_engine.machines.manager.recipients import Recipients
from ckpt_engine.v1 import manager_pb2, weights_pb2

Problem = weights_pb2.Problem


@dataclass
class Route:
    """The relays that together serve some replicas, and how far their plans have come."""

    fillings: tuple[Filling, ...]  # of its relays
    pipeline: PlanPipeline
    unfit: dict[str, Problem] = field(default_factory=dict)  # replicas that no plan can be made for
    out: dict[str, Problem] = field(default_factory=dict)  # relays that failed on it
    replaced: bool = False  # others go on in its place

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
        return isinstance(self.pipeline.stage, Way | Failed)

    @property
    def unread(self) -> dict[str, Problem]:
        """The relays of it that are not read, with the reason."""
        stage = self.pipeline.stage
        if isinstance(stage, Way) or self.replaced:
            return self.out
        why = stage.problem if isinstance(stage, Failed) else next(iter(self.unfit.values()), None)
        return {} if why is None else dict.fromkeys(self.relays, why) | self.out


class Routes:
    """The routes of one update. record: the sealed record of `identity`."""

    def __init__(self, course: Course, recipients: Recipients, identity: Version, record: manager_pb2.BlobRef) -> None:
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
            route.pipeline.send(self._course.left(now))

    def take(self, body: manager_pb2.Sealed, now: float) -> None:
        """Takes an answer of a relay."""
        for route in tuple(self._routes):
            if route.pipeline.take(body):
                self._go_on(route, now)

    def planned(self, task: PlanTask, done: Done, now: float) -> None:
        """A task of a pipeline ended, which may be of one route."""
        for route in tuple(self._routes):
            if route.pipeline.done(task, done):
                self._go_on(route, now)

    def overdue(self, seconds: float, now: float) -> None:
        """Ends the routes whose time is over, `seconds` after the update began. They begin anew without the relays that
        are silent."""
        self._course.begin("joining", self._state.deadlines.plan, now)
        problem = deadline(f"it was not planned with {seconds:.1f} s after the update began").problem
        for route in tuple(self._routes):
            silent = [source.source for source in route.pipeline.missing()]
            if silent:
                self._again(route, dict.fromkeys(silent, problem), problem, now)
            elif not route.over:
                route.pipeline.stage = Failed(problem)

    def ways(self) -> dict[str, Way]:
        """The way of each replica that is installed from relays only."""
        return {
            name: way
            for route in self._routes
            if isinstance(way := route.pipeline.stage, Way)
            for name in {name for name, _ in way.compiled.plans}
        }

    def gone(self, relay: str, why: str, now: float) -> None:
        """Goes on without a relay that is not there any more."""
        problem = unavailable(f"{relay}: {why}").problem
        for route in tuple(self._routes):
            if relay in route.relays and not route.over:
                self._again(route, {relay: problem}, problem, now)

    def unread(self) -> dict[str, Problem]:
        """Relays that hold the version and are not read, with the reason."""
        return {relay: why for route in self._routes for relay, why in route.unread.items()}

    def unfit(self) -> dict[str, Problem]:
        """Why replicas that were to be installed from relays are not; by name."""
        return {name: problem for route in self._routes if not route.replaced for name, problem in route.unfit.items()}

    def blobs(self) -> list[manager_pb2.BlobRef]:
        """Blobs that members may fetch, or that are still needed."""
        return [ref for route in self._routes for ref in route.pipeline.blobs()]

    def _join(self, fillings: tuple[Filling, ...], now: float) -> None:
        route = Route(fillings, PlanPipeline(self._state))
        offers = self._state.members.offers(self._identity)
        self._routes.append(route)
        read = tuple(offer for offer in offers if offer.table.digest in route.tables)
        route.pipeline.run(JoinSources(self._identity, read, self._record, self._course.left(now)))

    def _again(self, route: Route, failed: Mapping[str, Problem], why: Problem, now: float) -> None:
        """Goes on without those that failed; with each alone if it is not known which did. Ends it if none is left."""
        rest = [filling for filling in route.fillings if filling.relay not in failed]
        parts = _connected(rest) if failed else [(each,) for each in rest if len(rest) > 1]
        route.out |= failed
        route.replaced = bool(parts)
        route.pipeline.stage = Failed(why)
        for part in parts:
            self._join(part, now)

    def _go_on(self, route: Route, now: float) -> None:
        """Goes on if a stage of a route's pipeline has ended."""
        match route.pipeline.stage:
            case Failed(problem, sources):
                self._again(route, dict.fromkeys(sources, problem), problem, now)
            case Joined() as joined:
                self._plan(route, joined, now)
            case Planned(published, compiled):
                self._seal(route, published, compiled, now)
            case Sealing() if not route.pipeline.missing():
                route.pipeline.combine(self._course.left(now))

    def _plan(self, route: Route, joined: Joined, now: float) -> None:
        route.out |= joined.refused
        if joined.published is None or joined.record is None:
            refused = next(iter(joined.refused.values()), None)
            route.pipeline.stage = Failed(refused or unavailable("what it holds is not told any more").problem)
            return
        workers = tuple(worker for worker in self._recipients.workers() if worker.key[0] in route.replicas)
        seconds, root = self._course.left(now), self._identity.root
        route.pipeline.run(CompilePlans(joined.published, workers, seconds, joined.record, root))

    def _seal(self, route: Route, published: Published, compiled: Compiled, now: float) -> None:
        route.unfit = dict(compiled.unfit)
        if not compiled.plans:
            unfit = next(iter(compiled.unfit.values()), None)
            route.pipeline.stage = Failed(unfit or unavailable("nobody is left to read it").problem)
            return
        sealing = Sealing(self._course, published, compiled, self._course.filling, keep=True)
        route.pipeline.seal(sealing, self._course.left(now))
        self._go_on(route, now)


def _connected(fillings: Iterable[Filling]) -> list[tuple[Filling, ...]]:
    """Groups of relays: those that share a replica are together."""
    found: list[tuple[Filling, ...]] = []
    for filling in fillings:
        near = [other for other in found if any(not set(each.replicas).isdisjoint(filling.replicas) for each in other)]
        found = [other for other in found if other not in near] + [
            (*(each for other in near for each in other), filling)
        ]
    return found
