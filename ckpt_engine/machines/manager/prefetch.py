"""The relays of one update, between sealing and the intent: which is filled for which replicas, and with what result.

- A relay is filled for the replicas with a worker that reaches it. It gets what all workers of its host need, also
  workers of replicas that are disconnected now. If other relays read it, it gets what they need, too.
- A relay is commanded to fill once the relays that it reads hold the version (`core.relay_routes`). If one of those
  fails, relays that wait for it get another route. Relays that were reading it are commanded again as soon as another
  relay holds the version. A relay that failed although all its upstream relays hold the version tries again a few
  times, since a network may be cut for a moment.
- A relay counts as filled once its hello names the version with the same table as its answer.
- A relay that fails, disconnects, or does not answer in time is excluded with a reason; this affects no replica.
- A slot that replicas may be reading is never overwritten: the slot of the version that an earlier update still
  installs, or else of the lineage's last version.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ckpt_engine.core.problems import precondition, unavailable
from ckpt_engine.core.relay_routes import Route, relay_routes
from ckpt_engine.core.version import Version
from ckpt_engine.machines.events import Compiled
from ckpt_engine.machines.manager.claims import Claim
from ckpt_engine.machines.manager.course import Course
from ckpt_engine.machines.manager.members import Holder, Holding
from ckpt_engine.machines.manager.recipients import Recipients
from ckpt_engine.machines.manager.relay_facts import (
    KnownNeeds,
    connected_relays,
    origins_of,
    readers_of,
    relay_hosts,
    station_of,
)
from ckpt_engine.machines.manager.relay_filling import (
    FINAL,
    PlannedFilling,
    SharedFilling,
    blobs_of,
    fill_command,
    filled_together,
    lacking,
    reports,
    shortfalls,
)
from ckpt_engine.machines.manager.relay_or_collective import by_way_of, in_between, prefetch_decision
from ckpt_engine.v1 import manager_pb2, weights_pb2

Problem = weights_pb2.Problem


@dataclass(frozen=True, slots=True)
class RelayAbsent:
    """The timer of an update that ends waiting for a lost relay."""

    source: str


@dataclass(frozen=True, slots=True)
class RelayRetry:
    """The timer of an update after which a relay that failed tries again."""

    source: str


class UpdatePrefetch:
    """The fillings of one update, once its root and record are known."""

    def __init__(self, course: Course, recipients: Recipients, identity: Version, record: manager_pb2.BlobRef) -> None:
        self._course = course
        self._state = course.state
        self._goal = course.goal
        self._recipients = recipients
        self._identity = identity
        self._record = record
        self._keep: Version | None = None  # that filled relays go on holding
        self._kept_tables: dict[str, bytes] = {}  # by relay, the table by which replicas read what is to be kept
        self._needs = KnownNeeds(course.state, recipients, course.goal.published)
        self._fillings: dict[str, PlannedFilling] = {}
        self._started = False
        self._routed = 0  # relays that were left out when routes were last made
        self._route_reasons: dict[str, str] = {}  # by relay, a sentence that says why it is filled from or for others
        # A relay that does not answer on a network is found to be lost after a lease.
        self._tries = 1 + int(self._state.deadlines.lease / self._state.deadlines.resend)
        self._shared_reasons: dict[str, str] = {}  # by relay, a sentence about those that are filled along with it
        self._together = SharedFilling()
        self.why: dict[str, str] = {}  # by relay, a sentence that says whether it is filled

    def choose(self, compiled: Compiled, before: UpdatePrefetch | None) -> None:
        """Decides which relays are filled. before: the fillings that installs of the update before this one read."""
        last = self._state.versions.last.get(self._goal.lineage)
        self._keep = None if last is None else last.identity
        if before is not None:
            self._keep = before._identity
            self._kept_tables = {
                name: each.answer.table for name, each in before._fillings.items() if each.answer is not None
            }
        # If the version was sealed before, relays bring only what cannot be read without them.
        only = None if self._goal.sealed is None else self._recipients.cut_off.keys()
        readers = readers_of(self._state, self._recipients, self._identity, compiled.distances, only)
        for relay in connected_relays(self._state):
            name = relay.source
            decision = prefetch_decision(name, self._goal.prefetch, self._goal.until, readers[name])
            self.why[name] = decision.why
            if decision.replicas:
                self._fillings[name] = PlannedFilling(name, decision.replicas)
        self._make_routes()

    def claim(self) -> Claim:
        """The claim on relays that are filled, and on holders that these read."""
        names, sources = self._names(), self._names() | self._goal.holders
        return Claim(sources, names, self._keep, self._identity, sources)

    def _names(self) -> frozenset[str]:
        """Relays that are filled, or read by those."""
        ways = [way for each in self._fillings.values() for way in (each.route, each.command_route) if way is not None]
        return frozenset(self._fillings) | frozenset(
            name for way in ways for name in (*way.upstream, *way.others, *way.early)
        )

    def missing(self) -> list[PlannedFilling]:
        """The relays that it waits for. Steps in between alone are not waited for."""
        missing = [each for each in self._fillings.values() if each.exclusion is None and not self._settled(each)]
        return missing if any(each.replicas for each in missing) else []

    def held(self) -> list[PlannedFilling]:
        """The relays that hold the version, say so, and have replicas to be installed from them."""
        return [each for each in self._fillings.values() if each.replicas and self._counts(each)]

    def advance(self, seconds: float) -> None:
        """Commands the relays that can be filled now, and leaves out those that cannot be filled any more. Called
        whenever something has changed."""
        changed = self._started = True
        while changed:
            changed = False
            self._together = self._filled_together()
            self._shared_reasons |= self._together.why
            for filling in list(self._fillings.values()):
                changed |= self._step(filling, seconds)
            if self._routed != len(self._excluded()):
                self._make_routes()
                self._course.extend_claim(self._names())
                changed = True

    def send(self, seconds: float) -> None:
        """Sends the command, again, to all that have not answered."""
        for filling in self.missing():
            if filling.command is not None and filling.answer is None:
                self._tell(filling, seconds)

    def take(self, holder: Holder, body: manager_pb2.RelayFilled) -> None:
        """Takes a relay's answer."""
        filling = self._fillings.get(holder.source)
        if filling is None or filling.exclusion is not None or filling.command is None:
            return
        if body.attempt == filling.command.attempt:
            filling.answer, filling.session = body, holder.session_id

    def lost(self, holder: Holder) -> None:
        """Gives a relay some time to come back, since its session has ended."""
        filling = self._fillings.get(holder.source)
        if filling is not None and filling.exclusion is None:
            self._course.timer(RelayAbsent(holder.source), self._state.deadlines.lease)

    def note_return(self, holder: Holder) -> bool:
        """Takes a relay's hello. Returns whether it is being filled. Another process of this name holds nothing of what
        the one before it has fetched, so it starts over."""
        filling = self._fillings.get(holder.source)
        if filling is None:
            return False
        self._course.cancel(RelayAbsent(holder.source))
        if filling.answer is not None and filling.session != holder.session_id:
            filling.answer = filling.command = filling.early = None
            filling.ahead = False
            filling.tried.clear()
        return True

    def retry(self, source: str) -> None:
        """Lets a relay be commanded again, a moment after it failed."""
        filling = self._fillings.get(source)
        if filling is not None:
            filling.pausing = False
            filling.tried.clear()

    def drop(self, source: str, why: str) -> None:
        """Leaves out a relay that will not come back, or has not in time."""
        filling = self._fillings.get(source)
        holder = self._state.members.holders.get(source)
        if filling is not None and filling.exclusion is None and (holder is None or holder.peer is None):
            filling.exclusion = unavailable(why).problem

    def overdue(self, seconds: float, why: Problem | None = None) -> None:
        """Leaves out all relays that it waits for, `seconds` after the update began. why: the reason of all of them;
        None: each has its own."""
        for filling in self.missing():
            unready = [name for name in filling.route.upstream if not self._has(name)]
            filling.exclusion = why or filling.too_late(unready, f"{seconds:.1f} s after the update began")

    def leave_out(self, relay: str, problem: Problem) -> None:
        """Leaves out a relay that was filled, and cannot be installed from."""
        filling = self._fillings[relay]
        filling.exclusion = filling.exclusion or problem

    def reports(self) -> list[manager_pb2.RelayReport]:
        """A report for each relay."""
        return reports(self._fillings.values())

    def why_not(self) -> dict[str, Problem]:
        """By replica, why its relay does not count, or what of the version the relay lacks."""
        return shortfalls(self._fillings.values(), self._state.members.holders)

    def warnings(self) -> list[str]:
        """Sentences for a report that is fine but not what was asked for."""
        if self._goal.prefetch != manager_pb2.PREFETCH_ALWAYS or self._fillings:
            return []
        return [f"prefetch is 'always', and no relay was filled, so replicas read the trainer: {self._reasons()}"]

    def describe(self) -> str:
        """A sentence for people: why relays were filled or not, and why some do not count."""
        out = [f"{each.relay} is left out: {each.exclusion.message}" for each in self._excluded() if each.exclusion]
        return "; ".join([self._reasons(), *out])

    def blobs(self) -> list[manager_pb2.BlobRef]:
        """Blobs that relays may fetch."""
        return blobs_of(self._fillings.values())

    def lacking(self) -> dict[str, str]:
        """By replica, what its relay was not told to fetch, since no relay reaches it."""
        reasons = lacking(self._fillings.values(), self._goal.published.sources, relay_hosts(self._state))
        return {name: self._with_failures(why) for name, why in reasons.items()}

    def _reasons(self) -> str:
        reasons = [self._reason(name) for name in sorted({*self.why, *self._route_reasons})]
        return "; ".join(reasons) or "no relay has a session with this manager"

    def _reason(self, name: str) -> str:
        """Why a relay is filled; if only for others, nothing but that."""
        filling = self._fillings.get(name)
        if name in self._route_reasons and filling is not None and not filling.replicas:
            return self._route_reasons[name]
        return "; ".join(
            filter(None, (self.why.get(name), self._route_reasons.get(name), self._shared_reasons.get(name)))
        )

    # -- routes

    def _make_routes(self) -> None:
        """Makes routes for all relays that are not filled yet, and for those that may have lost what they read."""
        out = {each.relay for each in self._excluded()}
        self._routed = len(out)
        relays = [relay for relay in self._known_relays() if relay.source not in out]
        targets = [name for name, each in self._fillings.items() if name not in out and (each.replicas or each.command)]
        published = self._goal.published
        names = frozenset(source.source for source in published.sources)
        parts = published.parts or frozenset({names} if names else ())
        holding = {
            relay.source: frozenset(map(min, parts)) - frozenset(self._lacks(relay.source))
            for relay in relays
            if self._has(relay.source) and not self._is_partial(relay.source)
        }
        routes = relay_routes(origins_of(published), parts, [station_of(relay) for relay in relays], targets, holding)
        for name in [each.relay for each in self._fillings.values() if not each.replicas and each.command is None]:
            if name not in routes.by_relay and name not in out:
                del self._fillings[name]
                self._route_reasons.pop(name, None)
        for name, route in routes.by_relay.items():
            self._fillings.setdefault(name, PlannedFilling(name, ())).route = route
        for name, route in routes.by_relay.items():
            self._explain(name, route)
        for name, why in routes.unreached.items():
            if self._fillings[name].command is None:
                self._fillings[name].exclusion = precondition(self._with_failures(why)).problem
            else:
                self._fillings[name].route = Route(0, ())  # none is left to wait for
        self._routed = len(self._excluded())

    def _known_relays(self) -> list[Holder]:
        """The relays that are connected, and those that take part and may come back. Once filling has begun, without
        those that another update uses."""
        holders = self._state.members.holders
        relays = {relay.source: relay for relay in connected_relays(self._state)}
        relays |= {name: holders[name] for name in self._fillings if name in holders}
        blocked = self._course.blocked(self._keep) if self._started else frozenset()
        return [relays[name] for name in sorted(relays.keys() - blocked) if relays[name].filling is not None]

    def _lacks(self, name: str) -> tuple[str, ...]:
        filling = self._fillings.get(name)
        return () if filling is None else (filling.command_route or filling.route).lacks

    def _explain(self, name: str, route: Route) -> None:
        origin = "the trainer" if self._goal.sealed is None else "the version's holders"
        if not self._fillings[name].replicas:
            self._route_reasons[name] = in_between(name, route.children, origin)
        elif route.upstream:
            self._route_reasons[name] = by_way_of(route.upstream, origin, bool(route.sources))

    def _is_partial(self, name: str) -> bool:
        """Whether a relay has less of the version than it is to have."""
        filling = self._fillings.get(name)
        return filling is not None and (filling.failed or filling.ahead or filling.answer is None)

    def _with_failures(self, why: str) -> str:
        """Adds the failures of relays that might have fed it to why a relay is not filled."""
        failed = [each for each in self._excluded() if not each.replicas]
        reasons = [f"{each.relay} is left out: {each.exclusion.message}" for each in failed if each.exclusion]
        return "; ".join([*reasons, why])

    # -- one relay's turn

    def _step(self, filling: PlannedFilling, seconds: float) -> bool:
        """Does what can be done with one relay now. Returns whether something has changed."""
        if filling.exclusion is not None or not (filling.is_due or filling.failed):
            return False
        if filling.command is None and filling.route.ahead:
            self._give_order(filling, replace(filling.route, upstream=(), others=(), early=()), {}, seconds)
            filling.ahead = True
            return True
        if any(not self._is_ready(name, filling.route) for name in filling.route.upstream):
            return False  # it will be ready, or routes are made again
        tables = self._tables(filling)
        if filling.is_due or {table.digest for table in tables.values()} - filling.tried:
            self._give_order(filling, filling.route, tables, seconds)
            return True
        if filling.pausing:
            return False
        assert filling.answer is not None
        if tables and filling.attempts <= self._tries and filling.answer.problem.code not in FINAL:
            filling.pausing = True
            self._course.timer(RelayRetry(filling.relay), self._state.deadlines.resend)
            return True
        if filling.answer.HasField("problem"):
            filling.exclusion = filling.answer.problem
            return True
        return False

    def _give_order(
        self, filling: PlannedFilling, route: Route, upstream: Mapping[str, manager_pb2.BlobRef], seconds: float
    ) -> None:
        """Commands a relay to fetch the version by this route."""
        filling.attempts += filling.command_route is not None
        filling.tried |= {table.digest for table in upstream.values()}
        if filling.ahead:
            filling.early, filling.ahead = filling.answer, False
        filling.command = self._command(filling, route, list(upstream.values()))
        filling.command_route, filling.answer = route, None
        self._tell(filling, seconds)

    def _filled_together(self) -> SharedFilling:
        """The relays that can be filled now and are filled together."""
        new = (each for each in self._fillings.values() if each.command is None and each.exclusion is None)
        due = [each for each in new if all(self._is_ready(name, each.route) for name in each.route.upstream)]

        def command(each: PlannedFilling) -> manager_pb2.FillRelay:
            return fill_command(self._course, self._needs, self._identity, each.relay, each.route, ())

        return filled_together(due, self._state.members.holders, command, self._course.relay_fence)

    def _is_ready(self, name: str, route: Route) -> bool:
        """Whether a relay of a route's upstream can be read."""
        return self._has(name) and (name in route.early or not self._is_partial(name) or self._gave_up(name))

    def _gave_up(self, name: str) -> bool:
        """Whether a relay will never have more than it has."""
        filling = self._fillings.get(name)
        return filling is not None and self._settled(filling)

    def _settled(self, filling: PlannedFilling) -> bool:
        """Whether its contents are final. If not, missing cells may still come from another relay."""
        if filling.ahead or not self._holds(filling):
            return False
        return not filling.failed or (not filling.pausing and all(map(self._has, filling.route.upstream)))

    def _counts(self, filling: PlannedFilling) -> bool:
        return filling.exclusion is None and not filling.ahead and self._holds(filling)

    def _holds(self, filling: PlannedFilling) -> bool:
        holder = self._state.members.holders.get(filling.relay)
        if holder is None or holder.peer is None or filling.answer is None:
            return False
        return any(self._is_it(filling, held) for held in holder.held)

    def _is_it(self, filling: PlannedFilling, held: Holding) -> bool:
        """Whether `held` is what the relay was filled with: another slot may hold the version for other needs."""
        return (
            filling.answer is not None and held.identity == self._identity and held.table.digest == filling.answer.table
        )

    def _has(self, name: str) -> bool:
        """Whether others can read the version from a relay."""
        return self._table_of(name) is not None

    def _table_of(self, name: str) -> manager_pb2.BlobRef | None:
        """The table by which others read the version from a relay; None: they cannot. It was filled now, or before."""
        holder, filling = self._state.members.holders.get(name), self._fillings.get(name)
        if holder is None or holder.peer is None or (filling is not None and filling.exclusion is not None):
            return None
        for held in holder.held:
            if held.identity == self._identity and (filling is None or held.table.digest in filling.tables()):
                return held.table
        return None

    def _tables(self, filling: PlannedFilling) -> dict[str, manager_pb2.BlobRef]:
        """By relay, the tables that it reads, in the order in which equally near ones are asked. After the first
        command those of partial relays are left out: they are no reason to try again."""
        tables: dict[str, manager_pb2.BlobRef] = {}
        for name in (*filling.route.upstream, *filling.route.others):
            table = self._table_of(name)
            if table is not None and (filling.command is None or filling.ahead or not self._is_partial(name)):
                tables[name] = table
        return tables

    # -- what it is told

    def _tell(self, filling: PlannedFilling, seconds: float) -> None:
        holder = self._state.members.holders.get(filling.relay)
        if holder is None or filling.command is None:
            return
        command = manager_pb2.FillRelay()
        command.CopyFrom(filling.command)
        command.deadline_seconds = seconds
        self._state.send(holder, command)

    def _command(
        self, filling: PlannedFilling, route: Route, upstream: list[manager_pb2.BlobRef]
    ) -> manager_pb2.FillRelay:
        command = fill_command(self._course, self._needs, self._identity, filling.relay, route, upstream)
        command.record.CopyFrom(self._record)
        command.attempt = filling.attempts
        if filling.command is None and filling.relay in self._together.orders:
            command.fan_out.CopyFrom(self._together.orders[filling.relay])
        if self._keep is not None:
            command.keep.CopyFrom(self._keep.message())
            command.keep_table = self._kept_tables.get(filling.relay, b"")
        return command

    def _excluded(self) -> list[PlannedFilling]:
        return [each for each in self._fillings.values() if each.exclusion is not None]
