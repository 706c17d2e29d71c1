"""Decides which updates and attempts run side by side, and which call begins next.

Updates of different pools run side by side, from the first step to the report. Two that meet (`Goal.meets`: one pool,
one lineage) take turns, with one exception. An update of which only the installs go on, since its callers returned when
relays held its version, lets the next one prepare, seal and fill. There are never more than these two: the intent of
the second waits for the end of the first.

Of the calls, rollbacks come first, in the order in which they came, then the lineages with all ranks gathered. A call
begins if it meets nothing that runs, and nothing before it in this order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ckpt_engine.core.problems import CkptEngineError, aborted
from ckpt_engine.machines.events import Call, Done, Key, RollbackCall, UpdateCall, WaitCall
from ckpt_engine.machines.manager.claims import Claim
from ckpt_engine.machines.manager.course import Phase, UpdateTask, UpdateTimer
from ckpt_engine.machines.manager.deployments import Deployments
from ckpt_engine.machines.manager.goal import Goal, QueuedGoal
from ckpt_engine.machines.manager.holdings import Holdings
from ckpt_engine.machines.manager.members import Member
from ckpt_engine.machines.manager.plan_pipeline import PlanTask
from ckpt_engine.machines.manager.publications import Publications
from ckpt_engine.machines.manager.rank_calls import GatherEnd, Gathers, SessionsAbsent
from ckpt_engine.machines.manager.report import Corrections
from ckpt_engine.machines.manager.rollbacks import RollbackEnd, Rollbacks
from ckpt_engine.machines.manager.state import ManagerState
from ckpt_engine.machines.manager.update import Update
from ckpt_engine.machines.manager.waits import ReportSearch, WaitEnd, Waits
from ckpt_engine.v1 import manager_pb2


@dataclass
class Updates:
    """The updates that run, side by side."""

    state: ManagerState
    on_end: Callable[[Update], None]  # called with each update that has ended
    running: list[Update] = field(default_factory=list)  # those that run, in the order in which they began

    def all(self) -> list[Update]:
        """A copy of the list of updates that run: it stays as it is when one of them ends."""
        return list(self.running)

    def lets(self, goal: Goal, call: int | None = None) -> bool:
        """Whether a goal may begin beside what runs, and has its holders. A version that was sealed before needs these
        from its beginning. call: its number, if it waits for holders."""
        return self.passes(goal) and self.state.claims.lets(self.claim(goal), call)

    def claim(self, goal: Goal) -> Claim:
        """The claim with which an update begins: on the holders of a version that was sealed before."""
        if goal.sealed is None:
            return Claim()
        held = self.state.members.offers(goal.sealed)
        doubles = frozenset(name for name in goal.holders if sum(offer.source == name for offer in held) > 1)
        ranks = (source.source for source in goal.published.sources if source.rank is not None)
        orders = goal.holders | {f"{goal.lineage}\n{rank}" for rank in ranks}
        return Claim(orders, reads=goal.sealed, sources=goal.holders, doubles=doubles)

    def passes(self, goal: Goal) -> bool:
        """Whether a goal may begin beside what runs, apart from the holders that it reads."""
        near = self._near(goal)
        return not near or (goal.sealed is None and len(near) == 1 and near[0].released)

    def start(self, goal: Goal, now: float, call: int | None = None) -> None:
        """Begins an update that `lets` has let."""
        before = next(iter(self._near(goal)), None)
        update = Update(self.state, goal, self._update_ended, before)
        self.running.append(update)
        self.state.claims.begin(update.number, self.claim(goal), call)
        update.start(now)

    def next(self, now: float) -> None:
        """Lets updates go on that waited for others. Called after every event."""
        for update in self.all():
            update.look(now)

    def attempts(self) -> list[Update]:
        """The updates that bring up a late replica."""
        return [update for update in self.running if update.goal.is_attempt]

    def in_the_way(self) -> set[int]:
        """The numbers of jobs with holders that updates wait for; attempts wait for one another."""
        claims, attempts = self.state.claims, {update.number for update in self.attempts()}
        return {number for waiting in claims.waiting.keys() - attempts for number in claims.in_the_way(waiting)}

    def installs(self, name: str) -> int:
        """The highest install epoch that a replica may be welcomed with. It is below that of an intent which is for the
        replica and is not on the disk yet, even if higher ones were given out since."""
        updates = [update for update in self.running if name in update.goal.replicas]
        intents = [(update.installs, update.phase) for update in updates]
        limits = [fence.epoch - (phase is Phase.RECORDING) for fence, phase in intents if fence is not None]
        return min([self.state.installs, *limits])

    # -- events, handed to all updates

    def message(self, member: Member, body: object, now: float) -> None:
        """Hands on a message that may carry a fence of an update."""
        for update in self.all():
            update.message(member, body, now)

    def note_return(self, member: Member, now: float) -> None:
        """Hands on that a member said hello, or published."""
        for update in self.all():
            update.note_return(member, now)

    def lost(self, member: Member, now: float) -> None:
        """Hands on that a member's session ended without a goodbye."""
        for update in self.all():
            update.member_lost(member, now)

    def drop_member(self, member: Member, now: float, alive: bool) -> None:
        """Hands on that a member will not come back. alive: its process was connected until now."""
        for update in self.all():
            update.drop_member(member, now, alive)

    def outrun(self) -> None:
        """Hands on that members have seen higher epochs."""
        for update in self.all():
            update.outrun()

    def cancelled(self, call: Call) -> None:
        """Hands on that a call was cancelled."""
        for update in self.all():
            for rank in [rank for rank, other in update.goal.calls.items() if other == call]:
                update.caller_left(rank)

    def timer(self, key: UpdateTimer, now: float) -> None:
        """Hands a timer to its update."""
        for update in self.all():
            if update.number == key.number:
                update.timer(key.step, now)

    def done(self, key: UpdateTask, done: Done, now: float) -> bool:
        """Hands the end of a task to its update. Returns whether the update still ran."""
        updates = [update for update in self.all() if update.number == key.number]
        for update in updates:
            update.done(key.step, done, now)
        return bool(updates)

    def planned(self, task: PlanTask, done: Done, now: float) -> None:
        """Hands on the end of a pipeline's task, which may be of one of the updates."""
        for update in self.all():
            update.planned(task, done, now)

    def _near(self, goal: Goal) -> list[Update]:
        return [update for update in self.running if update.goal.meets(goal)]

    def _update_ended(self, update: Update) -> None:
        self.running.remove(update)
        self.state.claims.end(update.number)
        refusal = update.refusal
        if update.goal.is_attempt and not update.course.cut:
            self._note_failure(update)
        if update.goal.is_attempt and update.goal.sealed is not None and refusal is not None and not update.course.cut:
            notice = manager_pb2.NotBrought(identity=update.goal.sealed.message(), reason=refusal.message)
            self.state.send_to(update.goal.replicas[0], notice)
        self.on_end(update)

    def _note_failure(self, update: Update) -> None:
        """Stores with a late replica why the attempt for it failed, or that it did not."""
        replica = self.state.members.replicas.get(update.goal.replicas[0])
        problems = [] if update.refusal is None else [update.refusal]
        if update.report is not None:
            problems = [
                each.problem for each in update.report.replicas if each.outcome != manager_pb2.OUTCOME_NEW_SERVING
            ]
        if replica is not None:
            replica.failure = problems[0].message if problems else ""


@dataclass
class Turns:
    """Takes calls about updates, and decides which update or rollback begins next."""

    state: ManagerState
    publications: Publications
    holdings: Holdings
    deployments: Deployments

    def __post_init__(self) -> None:
        self.updates = Updates(self.state, self._update_ended)
        self.gathers = Gathers(self.state, self.publications)
        self.rollbacks = Rollbacks(self.state, self.holdings)
        self.waits = Waits(self.state)
        self.corrections = Corrections(self.state)

    def join(self, event: UpdateCall | RollbackCall | WaitCall, now: float) -> None:
        """Takes a call in, or refuses it."""
        try:
            match event:
                case RollbackCall(call, request):
                    self.rollbacks.join(call, request, now)
                case WaitCall(call, request):
                    self.waits.join(call, request, self.updates.all())
                case UpdateCall(call, request):
                    self._check_alone(request.lineage)
                    self.gathers.join(call, request, now)
        except CkptEngineError as error:
            self.state.finish(event.call, error.problem)

    def cancelled(self, call: Call) -> None:
        """Forgets a call that was cancelled."""
        for each in (self.gathers, self.rollbacks, self.waits):
            each.cancelled(call)

    def heard(self, name: str) -> None:
        """Corrects a report with what a replica has just told of itself."""
        replica = self.state.members.replicas.get(name)
        if replica is not None:
            self.corrections.look(replica)

    def look(self, settled: bool, may: Callable[[Goal], bool], now: float) -> None:
        """Refuses calls that cannot begin, and queues those that are ready. Called after every event. may: see
        `begin`."""
        self.gathers.look(settled, now)
        self.rollbacks.look(settled, [update.goal for update in self.updates.running], now)
        claims = {each.call: self.updates.claim(each.goal) for each in self._next(may) if each.call is not None}
        self.state.claims.reserve(claims)

    def coming(self) -> list[QueuedGoal]:
        """The calls that are ready and have not begun, in their order."""
        return [*self.rollbacks.coming(), *self.gathers.coming()]

    def turning(self) -> list[QueuedGoal]:
        """Those of them that wait for no deployment: attempts, which carry deployments out, give way to these alone."""
        return [each for each in self.coming() if self.deployments.lets(each.goal)]

    def begin(self, may: Callable[[Goal], bool], now: float) -> bool:
        """Begins the next call. Returns whether one could begin. may: whether a goal may begin, as far as its caller
        knows."""
        for coming in self._next(may):
            if self.updates.lets(coming.goal, coming.call):
                coming.dequeue()
                self.updates.start(coming.goal, now, coming.call)
                return True
        return False

    def _next(self, may: Callable[[Goal], bool]) -> list[QueuedGoal]:
        """The calls that could begin now, apart from the holders that they need."""
        passed: list[Goal] = []
        ready = []
        for coming in self.coming():
            if not any(map(coming.goal.meets, passed)) and self.updates.passes(coming.goal) and may(coming.goal):
                ready.append(coming)
            passed.append(coming.goal)
        return ready

    def timer(self, key: Key, now: float) -> None:
        """Hands a timer to what waits for it."""
        match key:
            case GatherEnd() | SessionsAbsent():
                self.gathers.timer(key, now)
            case WaitEnd(number):
                self.waits.timer(number, self.updates.all())
            case RollbackEnd(number):
                self.rollbacks.timer(number)
            case _:
                raise AssertionError(f"a timer of nothing that waits: {key}")

    def done(self, done: Done) -> None:
        """Hands the end of a task to what waits for it."""
        match done.key:
            case ReportSearch(number):
                self.waits.found(number, done, self.updates.all())
            case _:
                raise AssertionError(f"a task of nothing that waits: {done.key}")

    def deployment_ended(self, report: manager_pb2.UpdateReport) -> None:
        """Answers calls that wait for a deployment's end. Those of its trainer that called for the same version again,
        since they lost a manager, are told if it was undone; else they go on to an update, which changes nothing."""
        identity = report.identity
        self.waits.ended((identity.lineage, identity.version), None, report)
        if report.deployment.state == manager_pb2.Deployment.STATE_UNDONE:
            self.gathers.answer(identity.lineage, identity.version, report)

    def describe(self) -> str:
        """The calls that wait, for people; empty: there are none."""
        return " | ".join(filter(None, (self.rollbacks.describe(), self.gathers.describe())))

    def _check_alone(self, lineage: str) -> None:
        """Raises ABORTED if an update of this lineage runs that holds its callers. During a rollback or an attempt the
        ranks may gather."""
        for running in self.updates.all():
            if not running.released and running.goal.sealed is None and running.goal.lineage == lineage:
                raise aborted(f"another update runs: {running.describe()}")

    def _update_ended(self, update: Update) -> None:
        """Takes the end of an update: answers calls that wait for it, and corrects reports."""
        if update.started is not None:
            self.deployments.begin(update.started)
            return
        if update.goal.is_attempt:
            self.deployments.take_attempt(update)
        self.waits.update_ended(update)
        if update.report is not None and update.goal.is_attempt and not update.unresolved:
            for outcome in update.report.replicas:
                self.corrections.take_attempt(outcome)
        elif update.report is not None:
            self.corrections.take_report(update.report, update.goal.min_replicas, update.unresolved)
            for name in update.unresolved:
                self.heard(name)
