"""The part of an update in which weights go by way of relays: these are filled, then installs are planned from them.

It lies between sealing and the intent, so nothing is paused meanwhile, and a failure leaves every replica as it was.
Replicas that no relay serves are installed from the trainer's memory, unless the trainer is not to wait for them
(`until="held"`): then they keep what they serve. Where all can read that memory, and no relay was asked for, the update
does not spend all of its time on waiting for relays that another update uses.

Plans of installs read only from relays which hold the version. Relays that share a replica are one group with their
replicas: mostly one relay, and the replicas of its host. Groups are planned side by side, and one that fails affects no
other. For each group what its relays hold is joined, plans are compiled along the sealed record, and finer pieces are
digested by the relays and must add up to it. A relay that fails on the way is left out, and its group begins again with
the others, which may hold all that is needed. If it is unknown which one failed, each is tried alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ckpt_engine.core.problems import deadline, unavailable
from ckpt_engine.core.version import Fence, Version
from ckpt_engine.machines.events import Compiled, CompilePlans, Done, Joined, JoinSources, Published
from ckpt_engine.machines.manager.course import Course, Phase
from ckpt_engine.machines.manager.members import Holder, Member
from ckpt_engine.machines.manager.placing import PlacedFilling, RelayAbsent, RelayPlacing, RelayRetry
from ckpt_engine.machines.manager.plan_pipeline import Failed, Planned, PlanPipeline, PlanTask, Sealing, Way
from ckpt_engine.machines.manager.recipients import Recipients, led_by, with_words
from ckpt_engine.machines.manager.relay_facts import lost_relays, missing_relays, relay_hosts
from ckpt_engine.v1 import manager_pb2, weights_pb2


class UpdateRelays:
    """The relays of one update, once its root is known. record: the sealed record."""

    def __init__(self, course: Course, recipients: Recipients, identity: Version, record: manager_pb2.BlobRef) -> None:
        self._course = course
        self._recipients = recipients
        self._identity = identity
        self._record = record
        self._placing = RelayPlacing(course, recipients, identity, record)
        self._before: UpdateRelays | None = None
        self._groups = RelayGroups(course, recipients, identity, record)
        self.ways: dict[str, Way] = {}  # of the replicas that are installed from relays, once that is decided
        self.trainer_gone: weights_pb2.Problem | None = None  # why the trainer must not be read any more; None: it may
        self.late_problem: weights_pb2.Problem | None = None  # why none was filled in time, if others used them
        self._queued, self._skipped, self._free = False, False, 0.0
        course.awaited[Phase.FILLING] = lambda: [each.relay for each in self._placing.missing()]

    def start(self, compiled: Compiled, before: UpdateRelays | None, now: float) -> bool:
        """Begins to fill relays, or waits for updates that use them. Returns whether there are any to fill. before: the
        relays of the update whose installs go on."""
        self._compiled, self._before = compiled, before
        return self._begin(now)

    def _begin(self, now: float) -> bool:
        self._placing = RelayPlacing(self._course, self._recipients, self._identity, self._record)
        self._placing.choose(self._compiled, None if self._before is None else self._before._placing)
        if not self._course.claim(self._placing.claim()):
            if not self._queued:
                self._queued = True
                self._course.begin(Phase.QUEUEING, self._patience(now), now)
            return True
        self._before = None
        if not self._placing.missing():
            return False
        self._free = now - self._course.started if self._queued else 0.0
        self._course.begin(Phase.FILLING, self._filling_seconds(now), now)
        return True

    def _filling_seconds(self, now: float) -> float:
        return min(self._course.state.deadlines.fill, (self._course.goal.end - now) / 2)

    def _patience(self, now: float) -> float:
        """Seconds to wait for relays that others use: all that are left if some replica needs relays."""
        return self._filling_seconds(now) if self._may_do_without else self._course.goal.end - now

    @property
    def _may_do_without(self) -> bool:
        """Whether relays are optional: every replica can read the trainer, and no option asks for relays."""
        goal = self._course.goal
        required = goal.prefetch != manager_pb2.PREFETCH_AUTO or goal.until == manager_pb2.UNTIL_HELD
        return not required and not self._recipients.cut_off

    def send(self, now: float) -> None:
        """Sends commands, again, to all relays that have not answered."""
        if self._course.phase is Phase.FILLING:
            self._placing.send(self._course.remaining(now))
        else:
            self._groups.send(now)

    def advance(self, now: float) -> bool:
        """Advances as far as it can: from waiting for relays to filling them, then to plans. Returns whether all is
        done."""
        if self._skipped:
            return True
        if self._course.phase is Phase.QUEUEING and (self._course.waits or not self._begin(now)):
            return not self._course.waits
        if self._course.phase is Phase.FILLING:
            self._placing.advance(self._course.remaining(now))
        if self._course.phase is Phase.FILLING and not self._placing.missing():
            self._course.begin(Phase.JOINING, self._course.state.deadlines.plan, now)
            self._groups.start(self._placing.held(), now)
        return self._course.phase is Phase.JOINING and self._groups.finished

    def overdue(self, seconds: float, now: float) -> None:
        """Ends a phase, `seconds` after the update began: relays that have not answered are left out."""
        if self._course.phase is Phase.QUEUEING:
            if self._may_do_without:
                self._skipped = True
                self._course.state.claims.withdraw(self._course.number)
                why = f"updates of other pools used relays until {seconds:.1f} s after the update began"
                self._placing.overdue(seconds, deadline(f"{why}, and it was not waited for any longer").problem)
        elif self._course.phase is Phase.FILLING:
            self._placing.overdue(seconds)
            if (fill_seconds := seconds - self._free) < self._free:
                why = f"updates of other pools used relays until {self._free:.1f} s after the update began"
                self.late_problem = deadline(
                    f"{why}, and these were not filled in the {fill_seconds:.1f} s that were left"
                ).problem
        else:
            self._groups.overdue(seconds, now)

    def conclude(self) -> None:
        """Decides how each replica is installed, and leaves out those that cannot be."""
        self.ways = self._groups.ways()
        for relay, problem in self._groups.unread().items():
            self._placing.leave_out(relay, problem)
        why = self._placing.why_not()
        for name, problem in self._groups.unfit().items():
            why[name] = with_words(problem, why[name].message if name in why else "")
        for name, lacks in self._placing.lacking().items():
            if name in why:
                why[name] = with_words(why[name], lacks)
        never, unknown = "", "no relay within its reach holds the version"
        if disconnected := missing_relays(self._course.state):
            unknown += f"; {disconnected}"
        if self.trainer_gone is not None:
            never, unknown = self.trainer_gone.message, "no relay was filled for it"
        elif self._course.goal.until == manager_pb2.UNTIL_HELD:
            never = "the trainer goes on when relays hold the version"
        lost = lost_relays(self._course.state, self._recipients, self._course.goal.published)
        for name, relays in lost.items():
            known = why.get(name, weights_pb2.Problem())
            if away := missing_relays(self._course.state, [each for each in relays if each not in known.message]):
                why[name] = led_by(away, known)
        self._recipients.take_ways(self._identity, self.ways.keys(), why, unknown, never)

    def give_up_trainer(self, problem: weights_pb2.Problem) -> bool:
        """Gives up the trainer, which is lost or may change its weights. Returns whether the update goes on without it,
        from relays that hold the version or are being filled. Then the trainer is not read any more."""
        if self._course.phase is Phase.QUEUEING:
            return False  # no relay was told anything
        if self.trainer_gone is None and (self._placing.missing() or self._placing.held()):
            self.trainer_gone = problem
        return self.trainer_gone is not None

    def add_to(self, report: manager_pb2.UpdateReport) -> None:
        """Adds to a report what relays did."""
        report.relays.extend(self._placing.reports())
        report.prefetch = self._placing.describe()
        report.warnings.extend(self._placing.warnings())

    def blobs(self) -> list[manager_pb2.BlobRef]:
        """Blobs that members may fetch, or that are still needed."""
        return [*self._placing.blobs(), *self._groups.blobs()]

    # -- relays come, go and answer

    def lost(self, holder: Holder) -> None:
        """Takes the end of a holder's session."""
        if self._course.refusable:
            self._placing.lost(holder)

    def note_return(self, holder: Holder) -> bool:
        """Takes a holder's hello. Returns whether it takes part."""
        return self._placing.note_return(holder)

    def drop(self, relay: str, why: str, now: float) -> None:
        """Goes on without a relay that will not come back, or has not in time."""
        if self._course.refusable:
            self._placing.drop(relay, why)
            self._groups.drop(relay, why, now)

    def timer(self, step: RelayAbsent | RelayRetry, now: float) -> None:
        """Takes a timer of a relay."""
        match step:
            case RelayAbsent(relay):
                lease = self._course.state.deadlines.lease
                why = f"it lost its session and did not come back within {lease:g} s"
                self.drop(relay, f"{why}: see whether it runs and reaches this manager", now)
            case RelayRetry(relay):
                self._placing.retry(relay)

    def answered(self, member: Member, body: manager_pb2.RelayFilled | manager_pb2.RelayProgress) -> None:
        """Takes a relay's answer or progress."""
        if (
            self._course.phase is not Phase.FILLING
            or not isinstance(member, Holder)
            or Fence.of(body.fence) != self._course.relay_fence
        ):
            return
        if isinstance(body, manager_pb2.RelayFilled):
            self._placing.take(member, body)
        else:
            message = f"filling {member.source}"
            progress = manager_pb2.UpdateProgress(
                stage=manager_pb2.STAGE_PLAN, bytes_done=body.bytes_done, bytes_total=body.bytes_total, message=message
            )
            self._course.tell(progress)

    def sealed(self, body: manager_pb2.Sealed, now: float) -> None:
        """Takes a relay's digests of finer pieces."""
        if self._course.phase is Phase.JOINING:
            self._groups.take(body, now)

    def planned(self, task: PlanTask, done: Done, now: float) -> None:
        """Takes the end of a pipeline's task, which may be of a group."""
        if self._course.phase is Phase.JOINING:
            self._groups.planned(task, done, now)


Problem = weights_pb2.Problem


@dataclass
class RelayGroup:
    """Relays that together serve some replicas, and the state of these replicas' plans."""

    fillings: tuple[PlacedFilling, ...]  # of its relays
    pipeline: PlanPipeline
    unfit: dict[str, Problem] = field(default_factory=dict)  # replicas for which no plan can be made
    failures: dict[str, Problem] = field(default_factory=dict)  # why relays failed
    replaced: bool = False  # other groups go on in its place

    @property
    def relays(self) -> set[str]:
        """The ids of what its relays offer."""
        return {filling.relay for filling in self.fillings}

    @property
    def replicas(self) -> set[str]:
        """The names of its replicas."""
        return {name for filling in self.fillings for name in filling.replicas}

    @property
    def tables(self) -> set[bytes]:
        """Digests of the tables by which its relays are read."""
        return {filling.answer.table for filling in self.fillings if filling.answer is not None}

    @property
    def finished(self) -> bool:
        """Whether it has plans, or has failed."""
        return isinstance(self.pipeline.stage, Way | Failed)

    @property
    def unread(self) -> dict[str, Problem]:
        """Its relays that are not read, with the reason."""
        stage = self.pipeline.stage
        if isinstance(stage, Way) or self.replaced:
            return self.failures
        why = stage.problem if isinstance(stage, Failed) else next(iter(self.unfit.values()), None)
        return {} if why is None else dict.fromkeys(self.relays, why) | self.failures


class RelayGroups:
    """The groups of one update. record: the sealed record of `identity`."""

    def __init__(self, course: Course, recipients: Recipients, identity: Version, record: manager_pb2.BlobRef) -> None:
        self._course = course
        self._state = course.state
        self._recipients = recipients
        self._identity = identity
        self._record = record
        self._groups: list[RelayGroup] = []

    def start(self, fillings: Sequence[PlacedFilling], now: float) -> None:
        """Begins to plan. fillings: of the relays that hold the version."""
        for each in _connected(fillings):
            self._join(each, now)

    @property
    def finished(self) -> bool:
        """Whether all groups have plans, or have failed."""
        return all(group.finished for group in self._groups)

    def send(self, now: float) -> None:
        """Sends commands, again, to the relays that have not digested."""
        for group in self._groups:
            group.pipeline.send(self._course.remaining(now))

    def take(self, body: manager_pb2.Sealed, now: float) -> None:
        """Takes an answer of a relay."""
        for group in tuple(self._groups):
            if group.pipeline.take(body):
                self._go_on(group, now)

    def planned(self, task: PlanTask, done: Done, now: float) -> None:
        """Takes the end of a pipeline's task, which may be of one group."""
        for group in tuple(self._groups):
            if group.pipeline.done(task, done):
                self._go_on(group, now)

    def overdue(self, seconds: float, now: float) -> None:
        """Ends the groups without plans, `seconds` after the update began. Those with silent relays begin again without
        these."""
        self._course.begin(Phase.JOINING, self._state.deadlines.plan, now)
        problem = deadline(f"it was not planned with {seconds:.1f} s after the update began").problem
        for group in tuple(self._groups):
            silent = [source.source for source in group.pipeline.missing()]
            if silent:
                self._restart(group, dict.fromkeys(silent, problem), problem, now)
            elif not group.finished:
                group.pipeline.stage = Failed(problem)

    def ways(self) -> dict[str, Way]:
        """By name, the ways of the replicas that are installed from relays."""
        return {
            name: way
            for group in self._groups
            if isinstance(way := group.pipeline.stage, Way)
            for name in {name for name, _ in way.compiled.plans}
        }

    def drop(self, relay: str, why: str, now: float) -> None:
        """Goes on without a relay that will not come back."""
        problem = unavailable(f"{relay}: {why}").problem
        for group in tuple(self._groups):
            if relay in group.relays and not group.finished:
                self._restart(group, {relay: problem}, problem, now)

    def unread(self) -> dict[str, Problem]:
        """The relays that hold the version and are not read, with the reason."""
        return {relay: why for group in self._groups for relay, why in group.unread.items()}

    def unfit(self) -> dict[str, Problem]:
        """By name, why replicas that were to be installed from relays are not."""
        return {name: problem for group in self._groups if not group.replaced for name, problem in group.unfit.items()}

    def blobs(self) -> list[manager_pb2.BlobRef]:
        """Blobs that members may fetch, or that are still needed."""
        return [ref for group in self._groups for ref in group.pipeline.blobs()]

    def _join(self, fillings: tuple[PlacedFilling, ...], now: float) -> None:
        group = RelayGroup(fillings, PlanPipeline(self._state))
        offers = self._state.members.offers(self._identity)
        self._groups.append(group)
        read_offers = tuple(offer for offer in offers if offer.table.digest in group.tables)
        group.pipeline.run(JoinSources(self._identity, read_offers, self._record, self._course.remaining(now)))

    def _restart(self, group: RelayGroup, failed: Mapping[str, Problem], why: Problem, now: float) -> None:
        """Replaces a group by groups of the relays that did not fail, or of each relay alone if it is unknown which
        failed. The group fails if none is left."""
        rest = [filling for filling in group.fillings if filling.relay not in failed]
        parts = _connected(rest) if failed else [(each,) for each in rest if len(rest) > 1]
        group.failures |= failed
        group.replaced = bool(parts)
        group.pipeline.stage = Failed(why)
        for part in parts:
            self._join(part, now)

    def _go_on(self, group: RelayGroup, now: float) -> None:
        """Begins the next stage of a group's pipeline, if one has ended."""
        match group.pipeline.stage:
            case Failed(problem, sources):
                self._restart(group, dict.fromkeys(sources, problem), problem, now)
            case Joined() as joined:
                self._plan(group, joined, now)
            case Planned(published, compiled):
                self._seal(group, published, compiled, now)
            case Sealing() if not group.pipeline.missing():
                group.pipeline.combine(self._course.remaining(now))

    def _plan(self, group: RelayGroup, joined: Joined, now: float) -> None:
        group.failures |= joined.refused
        if joined.published is None or joined.record is None:
            refused = next(iter(joined.refused.values()), None)
            group.pipeline.stage = Failed(refused or unavailable("what it holds is not told any more").problem)
            return
        workers = tuple(worker for worker in self._recipients.workers() if worker.key[0] in group.replicas)
        seconds, root, relays = self._course.remaining(now), self._identity.root, relay_hosts(self._course.state)
        keeps = self._course.goal.keeps_draft
        task = CompilePlans(joined.published, workers, seconds, joined.record, root, relays=relays, keeps_draft=keeps)
        group.pipeline.run(task)

    def _seal(self, group: RelayGroup, published: Published, compiled: Compiled, now: float) -> None:
        group.unfit = dict(compiled.unfit)
        if not compiled.plans:
            unfit = next(iter(compiled.unfit.values()), None)
            group.pipeline.stage = Failed(unfit or unavailable("no replica is left to read it").problem)
            return
        sealing = Sealing(self._course, published, compiled, self._course.relay_fence, keep=True)
        group.pipeline.seal(sealing, self._course.remaining(now))
        self._go_on(group, now)


def _connected(fillings: Iterable[PlacedFilling]) -> list[tuple[PlacedFilling, ...]]:
    """Groups the fillings of relays: those that share a replica are together."""
    groups: list[tuple[PlacedFilling, ...]] = []
    for filling in fillings:
        near = [other for other in groups if any(not set(each.replicas).isdisjoint(filling.replicas) for each in other)]
        groups = [other for other in groups if other not in near] + [
            (*(each for other in near for each in other), filling)
        ]
    return groups
