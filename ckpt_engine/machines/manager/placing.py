"""The relays of one update, between sealing and the intent: which is filled for which replicas, and with what result.

- A relay is filled for the replicas with a worker that reaches it. It gets what all workers of its host need, also
  workers of replicas that are disconnected now. If other relays ask it as an origin, it gets what they need, too.
- All relays are commanded at once. Each reads the sources of its host, and asks other relays for the rest: those that
  want the same, and origins (`core.placements`), which may still be filled themselves. Which one it asks for which
  chunk it decides by the table of its command, which names all of them.
- A relay that failed is commanded again as soon as there is an origin that its last command did not name, and else a
  few times, since a network may be cut for a moment. One whose origin is left out is commanded again at once; one
  that lacks something waits until a lost origin is back or left out.
- A relay counts as filled once its hello names the version with the same table as its answer.
- A relay that fails, disconnects, or does not answer in time is excluded with a reason; this affects no replica.
- A slot that replicas may be reading is never overwritten: the slot of the version that an earlier update still
  installs, or else of the lineage's last version.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ckpt_engine.core.placements import Placement, placements
from ckpt_engine.core.problems import deadline, precondition, unavailable
from ckpt_engine.core.relay_remedy import relay_remedy
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
    slow_relays,
    station_of,
)
from ckpt_engine.machines.manager.relay_or_collective import by_way_of, in_between, prefetch_decision
from ckpt_engine.v1 import manager_pb2, weights_pb2

Problem = weights_pb2.Problem

FINAL = frozenset({Problem.CODE_FAILED_PRECONDITION, Problem.CODE_INVALID_ARGUMENT})
"""Problems that another try does not solve: no memory, needs that do not fit."""

Process = tuple[str, str]
"""A relay and the session of its process."""


@dataclass(frozen=True, slots=True)
class RelayAbsent:
    """The timer of an update that ends waiting for a lost relay."""

    source: str


@dataclass(frozen=True, slots=True)
class RelayRetry:
    """The timer of an update after which a relay that failed tries again."""

    source: str


@dataclass
class PlacedFilling:
    """One relay that an update fills: what it was told, and what it answered."""

    relay: str
    replicas: tuple[str, ...]  # to be installed from it; none: it is an origin for others only
    placement: Placement = field(default_factory=Placement)
    command: manager_pb2.FillRelay | None = None  # the last one sent; None: none was
    attempts: int = 0  # commands before `command`
    origins: frozenset[Process] = frozenset()  # that `command` names
    tried: set[Process] = field(default_factory=set)  # that any command named since the last pause
    pausing: bool = False  # a short pause before the next try goes on
    answer: manager_pb2.RelayFilled | None = None  # to `command`
    session: str = ""  # of the process that answered
    exclusion: Problem | None = None  # why the update goes on without it

    @property
    def failed(self) -> bool:
        """Whether it has answered that it could not bring all that it was told to."""
        if self.answer is None:
            return False
        return self.answer.HasField("problem") or bool(self.answer.missing_cells and not self.placement.lacks)

    def too_late(self, since: str) -> Problem:
        """The reason for excluding the relay at the deadline. since: words for the time that passed, which end the
        message."""
        if self.answer is not None and self.answer.HasField("problem"):
            return self.answer.problem
        state = "does not say that it holds the version" if self.answer is not None else "has not answered"
        return deadline(f"it {state} {since}").problem


class RelayPlacing:
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
        self._fillings: dict[str, PlacedFilling] = {}
        self._held: Mapping[str, tuple[str, ...]] = {}  # that hold it and are asked: see core.placements.Placements
        self._generation: dict[str, int] = {}  # of relays that ask: the later they were placed, the higher
        self._tables: dict[int, manager_pb2.WantTable] = {}  # by generation, until anything changes
        self._started = False
        self._placed = 0  # relays that were left out when relays were last placed
        self._reasons_by_relay: dict[str, str] = {}  # a sentence that says why it is filled from or for others
        # A relay that does not answer on a network is found to be lost after a lease.
        self._tries = 1 + int(self._state.deadlines.lease / self._state.deadlines.resend)
        self.why: dict[str, str] = {}  # by relay, a sentence that says whether it is filled

    def choose(self, compiled: Compiled, before: RelayPlacing | None) -> None:
        """Decides which relays are filled. before: the fillings that installs of the update before this one read."""
        last = self._state.versions.last.get(self._goal.lineage)
        self._keep = None if last is None else last.identity
        if self._goal.staging is not None:
            self._keep = self._goal.staging.base
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
                self._fillings[name] = PlacedFilling(name, decision.replicas)
        self._place()

    def claim(self) -> Claim:
        """The claim on relays that are filled, and on holders that these read."""
        names, sources = self._names(), self._names() | self._goal.holders
        return Claim(sources, names, self._keep, self._identity, sources)

    def _names(self) -> frozenset[str]:
        """Relays that are filled, or asked by those."""
        return frozenset(self._fillings) | frozenset(self._held if self._fillings else ())

    def missing(self) -> list[PlacedFilling]:
        """The relays that it waits for. Origins without replicas of their own are not waited for alone."""
        missing = [each for each in self._fillings.values() if each.exclusion is None and not self._settled(each)]
        return missing if any(each.replicas for each in missing) else []

    def held(self) -> list[PlacedFilling]:
        """The relays that hold the version, say so, and have replicas to be installed from them."""
        return [each for each in self._fillings.values() if each.replicas and self._counts(each)]

    def advance(self, seconds: float) -> None:
        """Commands the relays that are to be filled, and leaves out those that cannot be filled any more. Called
        whenever something has changed."""
        changed = self._started = True
        self._tables.clear()
        while changed:
            changed = False
            for filling in list(self._fillings.values()):
                changed |= self._step(filling, seconds)
            if self._placed != len(self._excluded()):
                self._place()
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
        the one before it has brought, so it starts over."""
        filling = self._fillings.get(holder.source)
        if filling is None:
            return False
        self._course.cancel(RelayAbsent(holder.source))
        if filling.answer is not None and filling.session != holder.session_id:
            filling.answer = filling.command = None
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
            self._exclude(filling, unavailable(why).problem)

    def overdue(self, seconds: float, why: Problem | None = None) -> None:
        """Leaves out all relays that it waits for, `seconds` after the update began. why: the reason of all of them;
        None: each has its own."""
        for filling in self.missing():
            self._exclude(filling, why or filling.too_late(f"{seconds:.1f} s after the update began"))

    def leave_out(self, relay: str, problem: Problem) -> None:
        """Leaves out a relay that was filled, and cannot be installed from."""
        filling = self._fillings[relay]
        self._exclude(filling, filling.exclusion or problem)

    def reports(self) -> list[manager_pb2.RelayReport]:
        """A report for each relay."""
        return [
            manager_pb2.RelayReport(
                relay=each.relay,
                filled=_filled(each),
                replicas=each.replicas,
                relays=each.placement.children,
                upstream=each.placement.origins,
                stage=int(bool(each.placement.origins)),
            )
            for each in self._fillings.values()
        ]

    def why_not(self) -> dict[str, Problem]:
        """By replica, why its relay does not count, or what of the version the relay lacks."""
        return shortfalls(self._fillings.values(), self._state.members.holders)

    def warnings(self) -> list[str]:
        """Warnings for a report of an update that went well, but not by way of relays as its caller asked."""
        if self._goal.prefetch != manager_pb2.PREFETCH_ALWAYS or self._fillings:
            return []
        return [f"prefetch is 'always', and no relay was filled, so replicas read the trainer: {self.describe()}"]

    def blobs(self) -> list[manager_pb2.BlobRef]:
        """Blobs that relays with a command may fetch."""
        found = []
        for command in [each.command for each in self._fillings.values() if each.command is not None]:
            found += [command.record, *command.tables, *command.needs, *command.within]
            found += [ref for wants in command.want_table.wants for ref in (*wants.needs, *wants.within)]
        return found

    def lacking(self) -> dict[str, str]:
        """By replica, what its relay was not told to bring, since no relay reaches it."""
        hosts = {source.source: source.host for source in self._goal.published.sources}
        running = relay_hosts(self._state)
        return {
            name: self._with_failures(
                f"{each.relay} reaches nothing that has what {source} holds; {relay_remedy([hosts[source]], running)}"
            )
            for each in self._fillings.values()
            for source in each.placement.lacks[:1]
            for name in each.replicas
        }

    def describe(self) -> str:
        """A sentence for people on each relay: why it was filled or not, or why it does not count."""
        reasons = [self._reason(name) for name in sorted({*self.why, *self._reasons_by_relay, *self._fillings})]
        return "; ".join(filter(None, reasons)) or "no relay has a session with this manager"

    def _reason(self, name: str) -> str:
        """Why a relay is filled; if only for others, nothing but that. If it was left out, nothing but why."""
        filling, reason = self._fillings.get(name), self._reasons_by_relay.get(name)
        if filling is not None and filling.exclusion is not None:
            return f"{name} is left out: {filling.exclusion.message}"
        if reason is not None and filling is not None and not filling.replicas:
            return reason
        return "; ".join(filter(None, (self.why.get(name), reason)))

    # -- which relays

    def _place(self) -> None:
        """Decides which relays are filled and asked, with those that are there now."""
        out = {each.relay for each in self._excluded()}
        self._placed = len(out)
        relays = [relay for relay in self._known_relays() if relay.source not in out]
        targets = [name for name, each in self._fillings.items() if name not in out and each.replicas]
        published = self._goal.published
        names = frozenset(source.source for source in published.sources)
        parts = published.parts or frozenset({names} if names else ())
        holding = {
            relay.source: frozenset(map(min, parts))
            for relay in relays
            if relay.peer is not None
            and relay.source not in self._fillings
            and any(held.identity == self._identity for held in relay.held)
        }
        found = placements(origins_of(published), parts, [station_of(relay) for relay in relays], targets, holding)
        self._held = found.held
        self._tables.clear()
        for name in [each.relay for each in self._fillings.values() if not each.replicas and each.command is None]:
            if name not in found.by_relay and name not in out:
                del self._fillings[name]
                self._reasons_by_relay.pop(name, None)
        for name, placement in found.by_relay.items():
            self._fillings.setdefault(name, PlacedFilling(name, ())).placement = placement
        for name, why in found.unreached.items():
            self._exclude(self._fillings[name], precondition(self._with_failures(why)).problem)
        self._placed = len(self._excluded())
        self._explain()

    def _known_relays(self) -> list[Holder]:
        """The relays that are connected, and those that take part and may come back. Once filling has begun, without
        those that another update uses."""
        holders = self._state.members.holders
        relays = {relay.source: relay for relay in connected_relays(self._state)}
        relays |= {name: holders[name] for name in self._fillings if name in holders}
        blocked = self._course.blocked(self._keep) if self._started else frozenset()
        return [relays[name] for name in sorted(relays.keys() - blocked) if relays[name].filling is not None]

    def _explain(self) -> None:
        """Says why relays are filled from or for others, and along with which."""
        origin = "the trainer" if self._goal.sealed is None else "the version's holders"
        asking = [name for name, each in self._fillings.items() if each.placement.origins and each.exclusion is None]
        slow = slow_relays(self._state.members.holders.values())
        for name, each in self._fillings.items():
            place = each.placement
            if not each.replicas:
                self._reasons_by_relay[name] = in_between(name, place.children, origin) if place.children else ""
            elif place.origins:
                others = len(asking) - 1
                along = f"; it is filled along with {others} other{'s' * (others != 1)}" if others else ""
                leaf = f", but passes nothing on: it {slow[name]}" if name in slow and others else ""
                self._reasons_by_relay[name] = by_way_of(place.origins, origin, bool(place.sources)) + along + leaf

    def _with_failures(self, why: str) -> str:
        """Adds the failures of relays that might have fed it to why a relay is not filled."""
        failed = [each for each in self._excluded() if not each.replicas]
        reasons = [f"{each.relay} is left out: {each.exclusion.message}" for each in failed if each.exclusion]
        return "; ".join([*reasons, why])

    # -- one relay's turn

    def _step(self, filling: PlacedFilling, seconds: float) -> bool:
        """Does what can be done with one relay now. Returns whether something has changed."""
        if filling.exclusion is not None or self._holder(filling.relay) is None:
            return False
        origins = self._origins(filling)
        if filling.command is None or (filling.failed and origins - filling.tried):
            self._give_order(filling, origins, seconds)
            return True
        if filling.answer is None and self._misses_origin(filling, origins):
            self._give_order(filling, origins, seconds)  # what it asks now will not answer
            return True
        if filling.pausing or not filling.failed or self._awaits_origin(filling):
            return False
        assert filling.answer is not None
        if filling.attempts <= self._tries and origins and filling.answer.problem.code not in FINAL:
            filling.pausing = True
            self._course.timer(RelayRetry(filling.relay), self._state.deadlines.resend)
            return True
        if filling.answer.HasField("problem"):
            self._exclude(filling, filling.answer.problem)
            return True
        return False

    def _misses_origin(self, filling: PlacedFilling, origins: frozenset[Process]) -> bool:
        """Whether an origin that its command names was left out, or is another process now, and there is another one.
        Origins that are merely chosen otherwise by now do not make it begin again."""
        return any(map(self._is_lost, filling.origins)) and bool(origins - filling.origins)

    def _is_lost(self, process: Process) -> bool:
        name, session = process
        holder, filling = self._state.members.holders.get(name), self._fillings.get(name)
        return holder is None or holder.session_id != session or (filling is not None and filling.exclusion is not None)

    def _origins(self, filling: PlacedFilling) -> frozenset[Process]:
        """The relays that have, or will have, what its sources lack."""
        found = [(name, self._holder(name)) for name in filling.placement.origins]
        return frozenset((name, holder.session_id) for name, holder in found if holder is not None)

    def _holder(self, name: str) -> Holder | None:
        """A relay with a session that is not left out."""
        holder, filling = self._state.members.holders.get(name), self._fillings.get(name)
        is_out = filling is not None and filling.exclusion is not None
        return None if holder is None or holder.peer is None or is_out else holder

    def _give_order(self, filling: PlacedFilling, origins: frozenset[Process], seconds: float) -> None:
        """Commands a relay to bring the version."""
        filling.attempts += filling.command is not None
        filling.tried |= origins
        filling.origins = origins
        filling.command, filling.answer = self._command(filling), None
        self._tell(filling, seconds)

    def _settled(self, filling: PlacedFilling) -> bool:
        """Whether its contents are final. If not, missing cells may still come from another relay."""
        return self._holds(filling) and not (filling.failed and (filling.pausing or self._may_retry(filling)))

    def _awaits_origin(self, filling: PlacedFilling) -> bool:
        """Whether an origin has lost its session and was not left out yet: it comes back, or relays are placed anew."""
        origins = (self._fillings.get(name) for name in filling.placement.origins)
        return any(each and each.exclusion is None and self._holder(each.relay) is None for each in origins)

    def _may_retry(self, filling: PlacedFilling) -> bool:
        origins = self._origins(filling)
        can_try = bool(origins - filling.tried) or (bool(origins) and filling.attempts <= self._tries)
        return can_try or self._awaits_origin(filling)

    def _counts(self, filling: PlacedFilling) -> bool:
        return filling.exclusion is None and self._holds(filling)

    def _holds(self, filling: PlacedFilling) -> bool:
        holder = self._state.members.holders.get(filling.relay)
        if holder is None or holder.peer is None or filling.answer is None:
            return False
        return any(self._is_it(filling, held) for held in holder.held)

    def _is_it(self, filling: PlacedFilling, held: Holding) -> bool:
        """Whether `held` is what the relay was filled with: another slot may hold the version for other needs."""
        return (
            filling.answer is not None and held.identity == self._identity and held.table.digest == filling.answer.table
        )

    # -- what it is told

    def _tell(self, filling: PlacedFilling, seconds: float) -> None:
        holder = self._state.members.holders.get(filling.relay)
        if holder is None or filling.command is None:
            return
        command = manager_pb2.FillRelay()
        command.CopyFrom(filling.command)
        command.deadline_seconds = seconds
        self._state.send(holder, command)

    def _command(self, filling: PlacedFilling) -> manager_pb2.FillRelay:
        published, place = self._goal.published, filling.placement
        tables = {source.source: source.table for source in published.sources}
        # Other holders of the version. How they are read is unknown: the relay finds out.
        others = [
            held.table
            for other in self._state.members.connected_holders()
            for held in other.held
            if held.identity == self._identity and other.filling is None and other.source not in tables
        ]
        wants = self._wants(filling)
        command = manager_pb2.FillRelay(
            fence=self._course.relay_fence.message(),
            identity=self._identity.message(),
            record=self._record,
            tables=[*(tables[source] for source in place.sources), *others],
            needs=wants.needs,
            everything=wants.everything,
            within=wants.within,
            attempt=filling.attempts,
        )
        if place.origins or place.children:
            command.want_table.CopyFrom(self._table(filling.relay))
        if self._keep is not None:
            command.keep.CopyFrom(self._keep.message())
            command.keep_table = self._kept_tables.get(filling.relay, b"")
        return command

    def _wants(self, filling: PlacedFilling) -> manager_pb2.WantTable.Wants:
        """What a relay is to hold: an origin what all relays need that ask any, since one of them may lose its own.
        Memory for what is not brought to it would be wasted."""
        holders = self._state.members.holders
        names = {filling.relay: 0}
        if filling.placement.children:
            names |= dict.fromkeys((name for name, each in self._fillings.items() if each.placement.origins), 0)
        relays = [holders[name] for name in names if name in holders]
        return manager_pb2.WantTable.Wants(
            needs=self._needs.near(relays),
            everything=any(relay.filling is not None and relay.filling.everything for relay in relays),
            within=() if filling.replicas else self._tables_of(filling.placement.within),
        )

    def _tables_of(self, sources: Iterable[str]) -> list[manager_pb2.BlobRef]:
        tables = {source.source: source.table for source in self._goal.published.sources}
        return [tables[source] for source in sources if source in tables]

    def _table(self, name: str) -> manager_pb2.WantTable:
        """The table that a relay is told: the relays that ask and were there when it was placed, so that no relay asks
        one that came later, and the origins."""
        asking = [each for each in self._fillings.values() if each.exclusion is None and each.placement.origins]
        latest = 1 + max(self._generation.values(), default=-1)
        for each in asking:
            self._generation.setdefault(each.relay, latest)
        generation = self._generation.get(name, latest)
        if generation not in self._tables:
            early = [each for each in asking if self._generation[each.relay] <= generation]
            self._tables[generation] = self._table_with(early)
        return self._tables[generation]

    def _table_with(self, asking: Sequence[PlacedFilling]) -> manager_pb2.WantTable:
        slow = slow_relays(self._state.members.holders.values())
        table = _TableWriter()
        for each in asking:
            table.add(self._holder(each.relay), self._wants(each), leaf=each.relay in slow)
        for each in self._fillings.values():
            if each.placement.children:
                wants = self._wants(each)
                del wants.within[:]
                wants.within.extend(self._tables_of(each.placement.within))
                table.add(self._holder(each.relay), wants, origin=True)
        for relay, within in self._held.items():
            wants = manager_pb2.WantTable.Wants(everything=True, within=self._tables_of(within))
            table.add(self._holder(relay), wants, origin=True)
        return table.message

    def _exclude(self, filling: PlacedFilling, why: Problem) -> None:
        filling.exclusion = why
        self._tables.clear()

    def _excluded(self) -> list[PlacedFilling]:
        return [each for each in self._fillings.values() if each.exclusion is not None]


class _TableWriter:
    """Writes a table, each set of wants once."""

    def __init__(self) -> None:
        self.message = manager_pb2.WantTable()
        self._numbers: dict[bytes, int] = {}

    def add(
        self,
        holder: Holder | None,
        wants: manager_pb2.WantTable.Wants,
        origin: bool = False,
        leaf: bool = False,
    ) -> None:
        """Adds a relay, unless it has no session."""
        if holder is None or holder.filling is None:
            return
        key = wants.SerializeToString(deterministic=True)
        if key not in self._numbers:
            self._numbers[key] = len(self._numbers)
            self.message.wants.append(wants)
        can_be_asked = holder.filling.HasField("chunks")
        self.message.relays.add(
            relay=holder.source,
            chunks=holder.filling.chunks if can_be_asked else None,
            wants=self._numbers[key],
            origin=origin,
            leaf=leaf or not can_be_asked,
        )


def _filled(filling: PlacedFilling) -> manager_pb2.RelayFilled | None:
    """A relay's answer, or why it has none; None: that is unknown, since it may not have been commanded."""
    if filling.answer is not None or filling.exclusion is None:
        return filling.answer
    return manager_pb2.RelayFilled(problem=filling.exclusion)


def shortfalls(fillings: Iterable[PlacedFilling], holders: Mapping[str, Holder]) -> dict[str, Problem]:
    """By replica, why its relay does not count, or what of the version the relay lacks. Names the relay, and the
    origins that it asks, with their addresses."""
    return {name: problem for each in fillings if (problem := _shortfall(each, holders)) for name in each.replicas}


def _shortfall(filling: PlacedFilling, holders: Mapping[str, Holder]) -> Problem | None:
    answer, words = filling.answer, []
    if answer is not None and filling.failed and answer.missing:
        code, count = answer.missing[0].code, answer.missing_cells
        pieces = f"{count} piece{'s' * (count != 1)} of the version"
        words.append(f"{filling.relay} lacks {pieces}: {answer.missing[0].message}")
        is_cut_off = code in (Problem.CODE_DEADLINE_EXCEEDED, Problem.CODE_UNAVAILABLE, Problem.CODE_NOT_FOUND)
    elif filling.exclusion is not None:
        code, message = filling.exclusion.code, filling.exclusion.message
        words.append(message if filling.relay in message else f"{filling.relay}: {message}")
        is_cut_off = code == Problem.CODE_DEADLINE_EXCEEDED
    else:
        return None
    origins = [f"{name} at {holders[name].host.address}" for name in filling.placement.origins if name in holders]
    if origins and is_cut_off:
        words.append(f"it asks {' and '.join(origins)}: see whether that runs and the network carries")
    return Problem(code=code, message="; ".join(words))
