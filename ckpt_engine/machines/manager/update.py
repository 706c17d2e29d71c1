"""One update that runs: prepare, plan, seal, combine, fill relays, record the intent, install, report.

Until the intent is being recorded every failure refuses it, and no replica has been touched. From then on there is no
refusing: it always ends with an outcome for every replica, at its deadline at the latest. The same steps are those of
an attempt for one replica, which no call asked for. What was sealed before (`goal.held`) its sources only digest.

An update of which all installs read from relays can release its callers at the intent (`until="held"`); its installs
then go on beside the next update, whose intent waits until every replica of this one has an outcome.

Every message that must be acted on is sent again until it is answered, and at once when its receiver comes back.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto

from ckpt_engine.core.problems import CkptEngineError, deadline, unavailable
from ckpt_engine.core.version import Fence, Version
from ckpt_engine.machines.events import Compiled, CompilePlans, Done, Key, RecordOutcome
from ckpt_engine.machines.manager.absences import Absences, CallerAbsent, MemberAbsent, Ranks
from ckpt_engine.machines.manager.collecting import Collecting
from ckpt_engine.machines.manager.course import Course, CourseTimer, PhaseEnd
from ckpt_engine.machines.manager.dry_run import foreseen
from ckpt_engine.machines.manager.goal import Goal
from ckpt_engine.machines.manager.members import Holder, Member, Replica, Trainer
from ckpt_engine.machines.manager.plan_pipeline import Failed, Planned, PlanPipeline, PlanTask, Sealing, Way
from ckpt_engine.machines.manager.prefetch import RelayAbsent, RelayRetry
from ckpt_engine.machines.manager.recipients import Recipients
from ckpt_engine.machines.manager.relay_facts import near_relays
from ckpt_engine.machines.manager.relaying import Relaying
from ckpt_engine.machines.manager.report import build_report, tell_not_finite
from ckpt_engine.machines.manager.state import State
from ckpt_engine.v1 import manager_pb2, weights_pb2

Problem = weights_pb2.Problem


class Update:
    """Runs towards one goal. over: called once, when nothing is left to do. before: an update whose installs go on.

    cut: why it was cut short, if it was. released: its callers have returned, and its installs go on without them.
    refusal: why it was refused, if it was. number: see Course. guessed: see Recipients.
    """

    def __init__(self, state: State, goal: Goal, over: Callable[[Update], None], before: Update | None = None) -> None:
        self.state, self.goal = state, goal
        self.course = Course(state, goal)
        self.fence, self.number = self.course.fence, self.course.number
        self.cut, self.released = "", False
        self.refusal: Problem | None = None
        self._over, self._before = over, before
        self._recipients = Recipients(state, goal, self.fence)
        self.guessed = self._recipients.guessed
        self.course.awaited["preparing"] = lambda: [f"replica {name}" for name in self._recipients.unprepared()]
        self._collecting = Collecting(self.course, self._recipients)
        self._absences = Absences(state, goal, self._recipients, self.course.timer, self.course.cancel)
        self._pipeline = PlanPipeline(state)
        self.course.awaited["sealing"] = lambda: [source.source for source in self._pipeline.missing()]
        self._identity: Version | None = None
        self._relaying: Relaying | None = None
        self._ranks = Ranks(self.course, self._refuse)
        self._installing: Installing | None = None

    # -- for the manager's machine

    @property
    def phase(self) -> str:
        """See `course.REFUSABLE`."""
        return self.course.phase

    @property
    def installs(self) -> Fence | None:
        """The fence of its intent; None before that is decided."""
        return None if self._installing is None else self._installing.fence

    @property
    def report(self) -> manager_pb2.UpdateReport | None:
        """How it ended, once every replica has an outcome."""
        return None if self._installing is None else self._installing.reported

    @property
    def _record(self) -> manager_pb2.BlobRef | None:
        """The sealed record of a version that was sealed before, if that tells what its sources offer."""
        return None if self.goal.held is None else self.goal.held.record

    def describe(self) -> str:
        """What runs, for those that must wait for it."""
        return self.course.describe(self.installs or self.fence)

    def blobs(self) -> list[manager_pb2.BlobRef]:
        """Blobs that members may fetch for it, or that it still needs."""
        refs = [*self._recipients.blobs(), *self._pipeline.blobs(), *self._collecting.blobs()]
        refs += [] if self._relaying is None else self._relaying.blobs()
        return refs + ([] if self._record is None else [self._record])

    def under_way(self) -> tuple[list[str], Version | None]:
        """Which replicas it writes to or is about to, and what: from the intent on, until each has an outcome."""
        return (self._recipients.waiting_for() if self.phase in ("recording", "installing") else []), self._identity

    def start(self, now: float) -> None:
        """Takes the first step."""
        self.course.start(now)
        self._absences.begin(self.goal.replicas, now)
        self._send_missing(now)

    def cut_short(self, reason: str, now: float) -> None:
        """Ends as soon as that is safe: something more important waits. Only for late replicas, and for what waits."""
        self.cut = reason
        if self.course.refusable:
            self._refuse(Problem(code=Problem.ABORTED, message=reason))
        elif self.phase == "installing":
            self._recipients.abandon(reason)
            self.course.hurry(None, now)

    def outrun(self) -> None:
        """Members have seen higher epochs than the ledger had: they would not obey this one."""
        if self.course.refusable:
            self._refuse(unavailable("the ledger was rolled back, and epochs are skipped: try again").problem)

    def caller_left(self, rank: int) -> None:
        """Notes that a rank's call was cancelled."""
        self._ranks.caller_left(rank)

    def look(self, now: float) -> None:
        """Goes on if what it waited for of other updates is over."""
        if self._before is not None and self._before.phase == "over":
            self._before = None
        free = self._before is None
        if free and (self.phase == "waiting" or (self.phase == "leaving" and not self._ranks.undecided)):
            self._intend(now)
        elif self.phase == "queueing" and not self.course.waits:
            self._go_on(now)

    # -- members come and go

    def member_lost(self, member: Member, now: float) -> None:
        """Gives a lost member some time to come back."""
        if isinstance(member, Holder) and self._relaying is not None:
            self._relaying.lost(member)
        if self._absences.concern(member):
            self._absences.lost(member, now)

    def member_back(self, member: Member, now: float) -> None:
        """Tells a member that said hello again, or published, what it may have missed."""
        relay = isinstance(member, Holder) and self._relaying is not None and self._relaying.back(member)
        if not relay and not self._absences.concern(member):
            return
        self._absences.back(member)
        if isinstance(member, Trainer):
            self._ranks.back(member)
        elif isinstance(member, Replica) and member.last_outcome is not None:
            self.message(member, member.last_outcome, now)
        self._send_missing(now)

    def member_gone(self, member: Member, now: float) -> None:
        """Goes on without a member that said goodbye, was replaced by another process, or did not come back in time."""
        if isinstance(member, Holder) and self._relaying is not None:
            self._relaying.gone(member.source, "it left while it was being filled", now)
            self._go_on(now)
        if not self._absences.concern(member):
            return
        if isinstance(member, Replica):
            if self.phase in ("preparing", "installing"):
                self._absences.leave_out(member, now)
                self._go_on(now)
        else:
            self._ranks.gone(member)
            if isinstance(member, Trainer):
                self._collecting.gone(member)
                self._go_on(now)

    # -- messages, results and timers

    def message(self, member: Member, body: object, now: float) -> None:
        """Something of a member that carries a fence; other fences than this one's are of the past."""
        match body:
            case manager_pb2.Prepared() if isinstance(member, Replica) and Fence.of(body.fence) == self.fence:
                if self.phase == "preparing":
                    self._recipients.take_prepared(member, body)
            case manager_pb2.Sealed() if Fence.of(body.fence) in (self.fence, self.course.filling):
                if self.phase == "sealing":
                    self._pipeline.take(body)
                elif self._relaying is not None:
                    self._relaying.sealed(body, now)
            case manager_pb2.RelayFilled() | manager_pb2.RelayProgress() if self._relaying is not None:
                self._relaying.answered(member, body)
            case manager_pb2.ReplicaOutcome() if isinstance(member, Replica) and Fence.of(body.fence) == self.installs:
                if self.phase == "installing":
                    self._recipients.take_outcome(body, member.name)
            case manager_pb2.TookPart() if isinstance(member, Trainer) and Fence.of(body.fence) == self.installs:
                self._collecting.answered(member, body)
            case manager_pb2.Progress() if isinstance(member, Replica) and Fence.of(body.fence) == self.installs:
                self.course.progress(member.name, body)
                if self.cut:
                    self.course.hurry(body, now)
        self._go_on(now)

    def planned(self, task: PlanTask, done: Done, now: float) -> None:
        """A task of a pipeline ended, which may be of this update."""
        if not self._pipeline.done(task, done) and self._relaying is not None:
            self._relaying.planned(task, done, now)
        self._go_on(now)

    def done(self, step: Key, done: Done, now: float) -> None:
        """Another task of this update ended."""
        if step is Entry.REPORT:
            self._end()
        elif done.problem is not None:
            if step is Entry.INTENT and not done.answered and self._identity is not None:
                self.state.versions.doubt(self._identity, self.goal.selection)
            self._refuse(done.problem)
        elif step is Entry.INTENT and self._installing is not None:
            self._install(now)

    def timer(self, step: Key, now: float) -> None:
        """A timer of this update fired."""
        match step:
            case CourseTimer.RESEND:
                self.course.timer(CourseTimer.RESEND, self.state.deadlines.resend)
                self._send_missing(now)
            case CourseTimer.END:
                self._out_of_time(now)
            case CourseTimer.HALF if self.phase == "preparing" and self._recipients.enough:
                self._phase_over(now)
            case PhaseEnd(phase) if phase == self.phase:
                self._phase_over(now)
            case CallerAbsent(rank):
                self._ranks.timer(rank)
            case MemberAbsent() if (member := self._absences.overdue(step)) is not None:
                self.member_gone(member, now)
            case RelayAbsent() | RelayRetry() if self._relaying is not None:
                self._relaying.timer(step, now)
                self._go_on(now)

    # -- from phase to phase

    def _send_missing(self, now: float) -> None:
        """Sends again what has not been answered."""
        if self.phase == "preparing":
            self._recipients.prepare(self.course.left(now))
        elif self.phase == "sealing":
            self._pipeline.send(self.course.left(now))
        elif self.phase in ("filling", "joining") and self._relaying is not None:
            self._relaying.send(now)
        elif self.phase == "installing" and self._installing is not None:
            self._installing.send(now)
            if self.cut:
                self._recipients.abandon(self.cut)
        self._go_on(now)

    def _go_on(self, now: float) -> None:
        """Goes on to the next phase, if all answers of this one are there."""
        if self.phase == "preparing" and not self._recipients.unprepared():
            self._plan(now)
        elif self.phase in ("planning", "sealing", "combining"):
            self._go_on_planning(now)
        elif self.phase in ("queueing", "filling", "joining") and self._relaying is not None:
            if self._relaying.over(now):
                self._intend(now)
        elif self._installing is not None and self.phase == "installing" and not self._installing.waiting_for():
            self._installing.finish(now)

    def _go_on_planning(self, now: float) -> None:
        """Goes on if a stage of the pipeline, each of which is a phase, has ended."""
        match self._pipeline.stage:
            case Failed(problem) if self.phase == "planning" and self._recipients.prepare_again(problem):
                self.course.begin("preparing", self.state.deadlines.prepare, now)
                self._send_missing(now)
            case Failed(problem):
                self._refuse(problem)
            case Planned(compiled=compiled):
                self._seal(compiled, now)
            case Sealing() if not self._pipeline.missing():
                self.course.begin("combining", self.state.deadlines.plan, now)
                self._pipeline.combine(self.course.left(now))
            case Way(combined=combined):
                self._decide_identity(combined.root, now)

    def _plan(self, now: float) -> None:
        if self._too_few(now):
            return
        self.course.begin("planning", self.state.deadlines.plan, now)
        goal, root = self.goal, b"" if self.goal.sealed is None else self.goal.sealed.root
        workers, members = self._recipients.workers(), self._collecting.replicas
        left = self.course.left(now)
        self._pipeline.run(CompilePlans(goal.published, workers, left, self._record, root, members, goal.dry_run))

    def _seal(self, compiled: Compiled, now: float) -> None:
        kept, near = self.goal.sealed is not None, set().union(*near_relays(self.state, self._recipients).values())
        if self._collecting.choose(compiled, near) or self._recipients.try_shut(compiled.unfit, near):
            self._plan(now)
            return
        self._recipients.take_unplanned(self._collecting.explained(compiled.unfit), near)
        if self._too_few(now):
            return
        if self.goal.dry_run:
            self._foresee(now, compiled)
            return
        self.course.begin("sealing", self.state.deadlines.seal, now)
        reader = self.goal.replicas[0] if kept else ""
        sealing = Sealing(self.course, self.goal.published, compiled, self.fence, kept, reader)
        self._pipeline.seal(sealing, self.course.left(now))
        self._go_on(now)

    def _too_few(self, now: float, because: Problem | None = None) -> bool:
        """Whether the update is refused since those that are left are not enough. because: what that comes from."""
        problem = self._recipients.too_few()
        if problem is None or self.goal.is_attempt:
            self._recipients.remember_unfit()
        if problem is not None and self.goal.dry_run and not problem.kept:
            self._foresee(now, None, problem)
        elif problem is not None:
            self._refuse(because or problem)
        return problem is not None

    def _foresee(self, now: float, compiled: Compiled | None, refusal: Problem | None = None) -> None:
        """The end of a dry run: tells what an update would do, or that it would be refused."""
        seconds = now - self.course.started
        self.course.answer(foreseen(self.fence, self.goal, self._recipients, compiled, seconds, refusal))
        self._release()

    def _decide_identity(self, root: bytes, now: float) -> None:
        """The root is known: is this the version that it says it is? Then relays may bring it."""
        goal = self.goal
        self._identity = Version(goal.lineage, goal.version, root)
        if self._refused_identity(now):
            return
        way = self._pipeline.stage
        assert isinstance(way, Way)
        record = way.combined.record or self._record
        needed = goal.sealed is None or bool(self._recipients.cut_off)
        if record is None or not needed:
            self._intend(now)
            return
        self._relaying = self._ranks.relaying = Relaying(self.course, self._recipients, self._identity, record)
        before = None if self._before is None else self._before._relaying
        if self._relaying.start(way.compiled, before, now):
            self._send_missing(now)
        else:
            self._intend(now)

    def _refused_identity(self, now: float) -> bool:
        """Whether the version cannot be what it says, or has no time left."""
        assert self._identity is not None
        try:
            self.course.check(self._identity, now)
        except CkptEngineError as error:
            self._refuse(error.problem)
            return True
        return False

    def _intend(self, now: float) -> None:
        """Records the intent, once every replica of the update before this one has an outcome."""
        direct = self._pipeline.stage
        assert self._identity is not None
        assert isinstance(direct, Way)
        if self._before is not None or self._ranks.undecided:
            self.course.begin("leaving" if self._before is None else "waiting", self.goal.end - now, now)
            return
        if self._relaying is not None:
            self._relaying.conclude()
            if self._too_few(now, self._relaying.left or self._relaying.late):
                return
        if self._refused_identity(now):
            return
        self._installing = Installing(
            self.course, self._recipients, self._absences, self._identity, direct, self._relaying, self._collecting
        )
        self._installing.record(now)

    def _install(self, now: float) -> None:
        """The intent is on the disk: from here on there is no refusing."""
        assert self._installing is not None
        self._installing.begin(now, self.cut)
        if self.goal.until == manager_pb2.HELD:
            # All that remains reads from relays.
            self.course.answer(self._installing.report(now, held=True))
            self.course.release()
            self.released = True
        self._send_missing(now)

    # -- time, and the end

    def _phase_over(self, now: float) -> None:
        """A member was silent too long."""
        seconds = now - self.course.started
        if self.phase == "preparing":
            self._recipients.overdue(seconds)
            self._go_on(now)
        elif isinstance(self._pipeline.stage, Sealing):
            self._refuse(self._pipeline.stage.overdue(seconds))
        elif self._relaying is not None:
            self._relaying.overdue(seconds, now)
            self._go_on(now)

    def _out_of_time(self, now: float) -> None:
        seconds = now - self.course.started
        if self.course.refusable:
            self._refuse(deadline(f"the update was still {self.course.said} after {seconds:.1f} s").problem)
        elif self.phase == "installing" and self._installing is not None:
            self._installing.out_of_time(seconds)
            self._go_on(now)

    def _refuse(self, problem: Problem) -> None:
        self.refusal = problem
        self.course.refuse(problem)
        self._release()

    def _end(self) -> None:
        assert self._installing is not None
        assert self._installing.reported is not None
        self.course.answer(self._installing.reported)
        self._release()

    def _release(self) -> None:
        self.course.over()
        if not self.released:
            self.course.release()
        self._over(self)


class Entry(Enum):
    """Tasks of an update that write to the ledger."""

    INTENT = auto()
    REPORT = auto()


class Installing:
    """The installs of one update. fence: of its intent. direct: what replicas are installed with that are not installed
    from relays. reported: the report, once every replica has an outcome."""

    def __init__(
        self,
        course: Course,
        recipients: Recipients,
        absences: Absences,
        identity: Version,
        direct: Way,
        relaying: Relaying | None,
        collecting: Collecting,
    ) -> None:
        self._course = course
        self._state = course.state
        self._goal = course.goal
        self._recipients = recipients
        self._absences = absences
        self._identity = identity
        self._direct = direct
        self._relaying = relaying
        self._collecting = collecting
        self._started = 0.0
        self.fence = course.state.next_install()
        self.reported: manager_pb2.UpdateReport | None = None
        course.awaited["installing"] = self._named

    def record(self, now: float) -> None:
        """Has the intent made durable."""
        self._recipients.decided(self.fence, self._identity, self._collecting.replicas)
        self._state.admission.only_reads(self._course.number)
        self._course.begin("recording", self._state.deadlines.ledger, now)
        seconds = self._course.left(now)
        intent = self._state.versions.intent(self.fence.epoch, self._identity, self._goal, seconds)
        self._course.run(Entry.INTENT, intent)

    def begin(self, now: float, cut: str) -> None:
        """The intent is on the disk. cut: why none is to be told to install any more."""
        versions = self._state.versions
        self._state.intent_ended(self.fence)
        versions.take_number(self._identity)
        versions.begin(self._identity, self.fence.epoch, self._goal, self._direct.combined.record)
        self._started = now
        if cut:
            for name in self._recipients.waiting_for():
                self._recipients.leave_out(name, Problem(code=Problem.ABORTED, message=cut))
        self._absences.begin(self._recipients.waiting_for(), now)
        self._collecting.begin(self.fence)
        self._course.begin("installing", self._goal.end - now, now)

    def send(self, now: float) -> None:
        """Tells, again, all that have no outcome."""
        ways, seconds = {} if self._relaying is None else self._relaying.ways, self._course.left(now)
        self._recipients.install(self._identity, ways, self._direct, seconds, self._collecting.install)
        self._collecting.send(self.fence, seconds)

    def waiting_for(self) -> list[str] | list[int]:
        """Replicas without an outcome; once all have one, ranks whose part in a collective goes on."""
        return self._recipients.waiting_for() or self._collecting.waiting_for()

    def _named(self) -> list[str]:
        return [f"{'rank' if isinstance(each, int) else 'replica'} {each}" for each in self.waiting_for()]

    def out_of_time(self, seconds: float) -> None:
        """Waits no more, `seconds` after the update began."""
        self._collecting.out_of_time()
        for name in self._recipients.waiting_for():
            message = f"no outcome within {seconds:.1f} s; its agent goes on by itself{self._recipients.says(name)}"
            self._recipients.leave_out(name, deadline(message, replica=name).problem)

    def finish(self, now: float) -> None:
        """Every replica has an outcome."""
        self._course.phase = "reporting"
        self._course.note("reporting", now)
        self._recipients.look(self._identity)
        self._collecting.over()
        self.reported = self.report(now)
        # Callers wait for this, and the update has kept no more than that back; a disk that hangs changes no outcome.
        self._course.run(Entry.REPORT, RecordOutcome(self.reported, self._state.deadlines.report))

    def report(self, now: float, held: bool = False) -> manager_pb2.UpdateReport:
        """What is to be told now. held: relays hold the version, and installs go on."""
        report = build_report(
            self.fence,
            self._identity,
            self._goal,
            self._recipients.outcomes,
            seconds=now - self._course.started,
            planning=self._started - self._course.started,
            held=held,
        )
        if self._relaying is not None:
            self._relaying.add_to(report)
        tell_not_finite(report, self._course.not_finite)
        report.collective = self._collecting.said()
        report.timeline.CopyFrom(self._course.timeline)
        return report
