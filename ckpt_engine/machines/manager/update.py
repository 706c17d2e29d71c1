"""One update that runs, from its call to its report, as a series of jobs of which one goes on at a time:

- `SealJob` prepares replicas, has plans made and sources digest: then the version's root is known.
- `PlaceJob` (`update_relays.py`) has relays bring the version, if that helps.
- `CandidateJob` waits for the update before it, or until it is known whether a caller that left lives.
- `CommitJob` writes durably which replicas are to serve the version.
- `InstallJob` tells each replica to install, and ends when each has an outcome.

Until the intent is being recorded every failure refuses the update, and no replica has been touched. From then on it
cannot be refused: it ends with an outcome for every replica, at its deadline at the latest. An attempt for one replica,
which no call asked for, has the same jobs. Sources of what was sealed before (`goal.held`) only digest.

An update of which all installs read from relays can release its callers at the intent (`until="held"`). Its installs
then go on beside the next update; the intent of that one waits until every replica of this one has an outcome.

Every message that must be acted on is sent again until it is answered, and at once when its receiver comes back.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from ckpt_engine.core.enums import enum_word
from ckpt_engine.core.problems import CkptEngineError, deadline, unavailable
from ckpt_engine.core.version import Fence, Version
from ckpt_engine.machines.events import Compiled, CompilePlans, Done, Key, RecordOutcome, StoredSeal
from ckpt_engine.machines.manager.absences import Absences, CallerAbsent, MemberAbsent, Ranks
from ckpt_engine.machines.manager.collective import UpdateCollective
from ckpt_engine.machines.manager.course import Course, CourseTimer, Phase, PhaseEnd
from ckpt_engine.machines.manager.deploy import Deployment
from ckpt_engine.machines.manager.dry_run import forecast
from ckpt_engine.machines.manager.goal import Goal
from ckpt_engine.machines.manager.jobs import Entry, Job, Over, Parts, SealedVersion, Started
from ckpt_engine.machines.manager.members import Holder, Member, Replica, TrainerRank
from ckpt_engine.machines.manager.placing import RelayAbsent, RelayRetry
from ckpt_engine.machines.manager.plan_pipeline import Failed, Planned, PlanPipeline, PlanTask, Sealing, Way
from ckpt_engine.machines.manager.recipients import Recipients
from ckpt_engine.machines.manager.relay_facts import led_by_lost_relays, near_relays, relay_hosts
from ckpt_engine.machines.manager.report import build_report, tell_not_finite
from ckpt_engine.machines.manager.staging import check_staged, first_wave, take_first_wave
from ckpt_engine.machines.manager.state import ManagerState
from ckpt_engine.machines.manager.update_relays import UpdateRelays
from ckpt_engine.v1 import manager_pb2, weights_pb2

Problem = weights_pb2.Problem


class SealJob(Job):
    """Prepares, plans and seals, until the version's root is known."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._course, self._recipients, self._pipeline = parts.course, parts.recipients, parts.pipeline
        self._course.awaited[Phase.PREPARING] = lambda: [f"replica {name}" for name in self._recipients.unprepared()]
        self._course.awaited[Phase.SEALING] = lambda: [source.source for source in self._pipeline.missing()]

    def send(self, now: float) -> None:
        """Sends to replicas that are not prepared, then to sources that have not digested."""
        if self._course.phase is Phase.PREPARING:
            self._recipients.prepare(self._course.remaining(now))
        elif self._course.phase is Phase.SEALING:
            self._pipeline.send(self._course.remaining(now))

    def message(self, member: Member, body: object, now: float) -> None:
        """Takes an answer."""
        match body:
            case manager_pb2.Prepared() if isinstance(member, Replica) and self._course.phase is Phase.PREPARING:
                if Fence.of(body.fence) == self._course.fence:
                    self._recipients.take_prepared(member, body)
            case manager_pb2.Sealed() if self._course.phase is Phase.SEALING:
                if Fence.of(body.fence) in (self._course.fence, self._course.relay_fence):
                    self._pipeline.take(body)

    def overdue(self, seconds: float, now: float) -> Job | None:
        """Leaves out unprepared replicas, or ends since sources are silent, `seconds` after the update began."""
        if self._course.phase is Phase.PREPARING:
            self._recipients.overdue(seconds)
        elif isinstance(self._pipeline.stage, Sealing):
            return Over(self._pipeline.stage.overdue(seconds))
        return None

    def advance(self, now: float) -> Job | None:
        """Goes on as far as it can now. Returns the next job, if it is done."""
        if self._course.phase is Phase.PREPARING:
            return None if self._recipients.unprepared() else self._plan(now)
        match self._pipeline.stage:
            case Failed(problem) if self._course.phase is Phase.PLANNING and self._recipients.prepare_again(problem):
                self._course.begin(Phase.PREPARING, self._course.state.deadlines.prepare, now)
                self._recipients.prepare(self._course.remaining(now))
                return self.advance(now)
            case Failed() if self._parts.goal.resumes is not None:
                return self._seal_now(now)
            case Failed(problem):
                return Over(problem)
            case Planned(compiled=compiled):
                return self._seal(compiled, now)
            case Sealing() if not self._pipeline.missing():
                self._course.begin(Phase.COMBINING, self._course.state.deadlines.plan, now)
                self._pipeline.combine(self._course.remaining(now))
            case Way() as way:
                return self._next_job(way, now)
        return None

    def _plan(self, now: float) -> Over | None:
        if (refused := self._refused(now)) is not None:
            return refused
        self._course.begin(Phase.PLANNING, self._course.state.deadlines.plan, now)
        goal, seconds = self._parts.goal, self._course.remaining(now)
        record, root = (None, b"") if goal.known is None else (goal.known.record, goal.known.identity.root)
        workers, members = self._recipients.workers(), self._parts.collective.replicas
        relays = relay_hosts(self._course.state)
        keeps, dry = goal.keeps_draft, goal.dry_run
        self._pipeline.run(CompilePlans(goal.published, workers, seconds, record, root, members, dry, relays, keeps))
        return None

    def _seal(self, compiled: Compiled, now: float) -> Job | None:
        """Has the sources digest, unless plans are to be compiled once more first."""
        goal, near = self._parts.goal, set().union(*near_relays(self._course.state, self._recipients).values())
        chosen = self._parts.collective.choose(compiled, near)
        if goal.resumes is not None and (chosen or compiled.atoms):
            return self._seal_now(now)
        if chosen or self._recipients.try_shut(compiled.unfit, near):
            return self._plan(now)
        unfit = self._parts.collective.explained(compiled.unfit)
        self._recipients.take_unplanned(led_by_lost_relays(self._course, self._recipients, unfit, near), near)
        if (refused := self._refused(now)) is not None:
            return refused
        if goal.dry_run:
            return self._forecast(now, compiled)
        self._course.begin(Phase.SEALING, self._course.state.deadlines.seal, now)
        keep = goal.held is not None
        reader = goal.replicas[0] if keep else ""
        sealing = Sealing(self._course, goal.published, compiled, self._course.fence, keep, reader)
        self._pipeline.seal(sealing, self._course.remaining(now))
        return self.advance(now)

    def _seal_now(self, now: float) -> Over | None:
        """Has ranks seal although the version is committed: for a collective, or since needs cut its record finer."""
        self._parts.goal.resumes = None
        return self._plan(now)

    def _next_job(self, way: Way, now: float) -> Job:
        """The next job, now that the root is known: relays bring it, it waits to be committed, or it is refused."""
        parts, goal = self._parts, self._parts.goal
        identity = Version(goal.lineage, goal.version, way.combined.root)
        if (problem := self._course.refusal(identity, now)) is not None:
            return Over(problem)
        record = way.combined.record or (None if goal.known is None else goal.known.record)
        fill = self._course.fence.epoch if goal.known is None else goal.known.fill
        version = SealedVersion(identity, way, StoredSeal(fill, record))
        if record is not None and (goal.held is None or self._recipients.cut_off):
            relays = UpdateRelays(self._course, self._recipients, identity, record)
            parts.relays = parts.ranks.relays = relays
            before = None if parts.before is None else parts.before.relays
            if relays.start(way.compiled, before, now):
                relays.send(now)
                return PlaceJob(parts, version, relays)
        return CandidateJob(parts, version)

    def _refused(self, now: float) -> Over | None:
        """The end, if too few replicas are left; None: they are enough."""
        problem = self._recipients.refusal()
        if problem is not None and self._parts.goal.dry_run and not problem.kept:
            return self._forecast(now, None, problem)
        return None if problem is None else Over(problem)

    def _forecast(self, now: float, compiled: Compiled | None, refusal: Problem | None = None) -> Over:
        """The end of a dry run: tells what an update would do, or that it would be refused."""
        course, seconds = self._course, now - self._course.started
        return Over(report=forecast(course.fence, course.goal, self._recipients, compiled, seconds, refusal))


@dataclass(frozen=True)
class PlaceJob(Job):
    """Has relays bring a version."""

    parts: Parts
    version: SealedVersion
    relays: UpdateRelays

    def send(self, now: float) -> None:
        """Sends to relays that have not answered."""
        self.relays.send(now)

    def message(self, member: Member, body: object, now: float) -> None:
        """Takes an answer of a relay."""
        match body:
            case manager_pb2.Sealed():
                if Fence.of(body.fence) in (self.parts.course.fence, self.parts.course.relay_fence):
                    self.relays.sealed(body, now)
            case manager_pb2.RelayFilled() | manager_pb2.RelayProgress():
                self.relays.answered(member, body)

    def overdue(self, seconds: float, now: float) -> Job | None:
        """Goes on without silent relays, `seconds` after the update began."""
        self.relays.overdue(seconds, now)
        return None

    def advance(self, now: float) -> Job | None:
        """Goes on as far as it can now. Returns the next job, if it is done."""
        return CandidateJob(self.parts, self.version) if self.relays.advance(now) else None


@dataclass(frozen=True)
class CandidateJob(Job):
    """Waits with a sealed version until it may be committed: until every replica of the update before this one has an
    outcome, and it is known whether ranks that cancelled their calls live."""

    parts: Parts
    version: SealedVersion

    def advance(self, now: float) -> Job | None:
        """Begins the commit, if it may."""
        parts, course, identity = self.parts, self.parts.course, self.version.identity
        if parts.before is not None or parts.ranks.undecided:
            phase = Phase.LEAVING if parts.before is None else Phase.WAITING
            if course.phase is not phase:
                course.begin(phase, course.goal.end - now, now)
            return None
        if parts.relays is not None:
            parts.relays.conclude()
            if (problem := parts.recipients.refusal()) is not None:
                return Over(parts.relays.trainer_gone or parts.relays.late_problem or problem)
        if (problem := course.refusal(identity, now)) is not None:
            return Over(problem)
        try:
            check_staged(course, identity, parts.recipients.prepared())
        except CkptEngineError as error:
            return Over(error.problem)
        fence = course.state.next_install()
        parts.recipients.decide(fence, identity, parts.collective.replicas)
        course.state.claims.only_reads(course.number)
        course.begin(Phase.RECORDING, course.state.deadlines.ledger, now)
        row = first_wave(course, identity, parts.recipients.prepared(), fence)
        selection = tuple(sorted(course.goal.selection)) if row is None else row.waves[0].replicas
        deployment, seal = None if row is None else row.message(), self.version.seal
        versions, seconds = course.state.versions, course.remaining(now)
        course.run(Entry.INTENT, versions.intent(fence.epoch, identity, seconds, selection, deployment, seal))
        return CommitJob(parts, self.version, fence, row)


@dataclass(frozen=True)
class CommitJob(Job):
    """Waits for the intent to be on the disk, where it may be already: only the ledger can still refuse."""

    parts: Parts
    version: SealedVersion
    fence: Fence  # of the intent, and of all installs
    deployment: Deployment | None = None  # that begins with this commit; None: it is for all replicas at once

    def written(self, done: Done, now: float) -> Job:
        """Takes the ledger's answer. Returns the next job: the installs, or the end, and then nothing has changed."""
        if done.problem is not None:
            versions, epoch = self.parts.course.state.versions, self.fence.epoch
            if done.answered:
                versions.refuse(epoch)
            else:
                versions.doubt(epoch, self.version.identity, self.parts.goal.selection)
            return Over(done.problem)
        if self.deployment is not None:
            relays, version = self.parts.relays, self.version
            outcomes = self.parts.recipients.outcomes
            return Over(started=take_first_wave(self.parts.course, self.deployment, version, outcomes, relays, now))
        install = InstallJob(self.parts, self.version, self.fence, now)
        install.begin(now)
        return install


class InstallJob(Job):
    """Commands each prepared replica to install until it has an outcome; then the report is recorded. Stalled installs
    are asked to abandon, so that callers need not wait for the deadline; one that reads the trainer's live memory is
    waited for, unless its agent answers that no worker has an order."""

    def __init__(self, parts: Parts, version: SealedVersion, fence: Fence, now: float) -> None:
        self.parts, self.version = parts, version
        self.fence = fence  # of the intent, and of all installs
        self.reported: manager_pb2.UpdateReport | None = None  # set once every replica has an outcome
        self._course, self._recipients, self._collective = parts.course, parts.recipients, parts.collective
        self._started = now
        self._patience = max(self._course.state.deadlines.stall, self._course.state.deadlines.quiesce)  # seconds
        self._heard = defaultdict[str, manager_pb2.Progress](manager_pb2.Progress)  # by replica, its last
        self._waits = parts.goal.waits
        self._asked_back = ""  # why all were asked to abandon their installs; empty: they were not
        self._course.awaited[Phase.INSTALLING] = self._named

    def begin(self, now: float) -> None:
        """Commits and begins the installs, once the intent is on the disk."""
        course, state, identity = self._course, self._course.state, self.version.identity
        state.intent_ended(self.fence)
        state.versions.take_number(identity)
        state.versions.begin(identity, self.fence.epoch, course.goal, self.version.seal)
        if course.cut:
            for name in self._recipients.waiting_for():
                self._recipients.leave_out(name, Problem(code=Problem.CODE_ABORTED, message=course.cut))
        self.parts.absences.begin(self._recipients.waiting_for(), now)
        self._collective.begin(self.fence)
        course.begin(Phase.INSTALLING, course.goal.end - now, now)
        if course.goal.until == manager_pb2.UNTIL_HELD:
            # All that remains reads from relays.
            course.answer(self._report(now, held=True))
            course.release()
        self._listen()
        self.send(now)

    def send(self, now: float) -> None:
        """Sends the install command, the first time or again, to all replicas without an outcome."""
        if self._course.phase is not Phase.INSTALLING:
            return
        relays, seconds = self.parts.relays, self._course.remaining(now)
        ways = {} if relays is None else relays.ways
        changing = self._changing()
        self._recipients.install(
            self.version.identity, ways, self.version.direct, seconds, self._collective.install, changing, self._waits
        )
        self._collective.send(self.fence, seconds)
        if changing:
            ranks = ", ".join(map(str, sorted(self.parts.ranks.departed)))
            why = f"rank {ranks} left its call, so its weights may change: they are read no more"
            ordered = set(filter(self._recipients.is_ordered, changing))
            self._recipients.abandon(why, ordered)
            for name in sorted(changing - ordered):
                self._recipients.leave_out(name, unavailable(why, replica=name).problem)
        if self._asked_back:
            self._recipients.abandon(self._asked_back, self._apart())

    def message(self, member: Member, body: object, now: float) -> None:
        """Handles an outcome, the end of a rank's part, or a replica's progress."""
        match body:
            case manager_pb2.ReplicaOutcome() if isinstance(member, Replica) and Fence.of(body.fence) == self.fence:
                if self._course.phase is Phase.INSTALLING:
                    self._recipients.take_outcome(body, member.name)
                    self._listen()
            case manager_pb2.TookPart() if isinstance(member, TrainerRank) and Fence.of(body.fence) == self.fence:
                self._collective.answered(member, body)
            case manager_pb2.Progress() if isinstance(member, Replica) and Fence.of(body.fence) == self.fence:
                self._course.progress(member.name, body)
                if self._heard.get(member.name) != body:
                    self._heard[member.name] = body
                    self._listen()

    def advance(self, now: float) -> Job | None:
        """Records the report, once every replica has an outcome and every rank's part has ended."""
        if self._course.phase is not Phase.INSTALLING or self._waiting_for():
            return None
        self._course.phase = Phase.REPORTING
        self._course.note(Phase.REPORTING, now)
        self._recipients.resolve(self.version.identity)
        self._collective.conclude()
        self.reported = self._report(now)
        # Callers wait for this, and the update has reserved no more time; a disk that hangs changes no outcome.
        self._course.run(Entry.REPORT, RecordOutcome(self.reported, self._course.state.deadlines.report))
        return None

    def ask_back(self, reason: str) -> None:
        """Asks replicas to abandon their installs; those that have written a byte go on."""
        if self._course.phase is Phase.INSTALLING:
            self._asked_back = reason
            self._recipients.abandon(reason, self._apart())
            self._listen()

    @property
    def ready(self) -> bool:
        """Whether its replicas have no outcome, and may be told to pause their engines, or were."""
        names = self._recipients.waiting_for()
        return bool(names) and (not self._waits or all(self._heard[name].ready for name in names))

    def session_ended(self, name: str) -> None:
        """Takes a replica for one that is not ready, until it says so again: its install comes to it again then."""
        if self._waits:
            self._heard.pop(name, None)

    def go_on(self, now: float) -> None:
        """Tells replicas that are ready to pause their engines, and to install."""
        if self._waits:
            self._waits = False
            self._listen()
            self.send(now)

    def silence(self) -> None:
        """Handles that no install reported progress for a while: asks all to abandon theirs, then excludes the rest.
        Those that are ready, and wait to be told more, have nothing to report."""
        if self._waits and self.ready and not self._asked_back:
            self._listen()
            return
        if not self._asked_back:
            self.ask_back(f"no install has told anything new for {self._patience:g} s")
            return
        for name in self._settled():
            stage = enum_word(manager_pb2.Stage, self._heard[name].stage)
            message = f"{self._asked_back}, so it was asked to go back, and has given no outcome (stage {stage}); its "
            message += f"agent goes on by itself{self._recipients.says(name)}"
            self._recipients.leave_out(name, deadline(message, replica=name).problem)

    def out_of_time(self, seconds: float) -> None:
        """Ends the wait for outcomes at the deadline. seconds: since the update began."""
        if self._course.phase is not Phase.INSTALLING:
            return
        self._collective.out_of_time()
        for name in self._recipients.waiting_for():
            message = f"no outcome within {seconds:.1f} s; its agent goes on by itself{self._recipients.says(name)}"
            self._recipients.leave_out(name, deadline(message, replica=name).problem)

    def _changing(self) -> set[str]:
        """Those of `_live` that read what may change from now on, since a rank has left its call."""
        return self._live() if self.parts.ranks.departed else set()

    def _live(self) -> set[str]:
        """The replicas without an outcome, and of no collective, that read memory of ranks as it is now."""
        goal, relays = self._course.goal, self.parts.relays
        if goal.held is not None or all(source.stays_sealed for source in goal.published.sources):
            return set()
        return set(self._apart()) - (set() if relays is None else relays.ways.keys())

    def _settled(self) -> list[str]:
        """The replicas without an outcome that read nothing which may change when the callers return."""
        reading = {name for name in self._live() if not self._heard[name].goes_back}
        return sorted(set(self._apart()) - reading)

    def _apart(self) -> list[str]:
        """The replicas without an outcome that are in no collective: that one ends by a vote of its own."""
        return [name for name in self._recipients.waiting_for() if name not in self._collective.replicas]

    def _listen(self) -> None:
        """Begins to count for how long no replica tells anything new."""
        seconds = self._course.state.deadlines.resume if self._asked_back else self._patience
        self._course.timer(CourseTimer.SILENCE, seconds)

    def _waiting_for(self) -> list[str] | list[int]:
        """Replicas without an outcome; once all have one, ranks that still take part in a collective."""
        return self._recipients.waiting_for() or self._collective.waiting_for()

    def _named(self) -> list[str]:
        return [f"{'rank' if isinstance(each, int) else 'replica'} {each}" for each in self._waiting_for()]

    def _report(self, now: float, held: bool = False) -> manager_pb2.UpdateReport:
        """Builds the report as of now. held: relays hold the version, and installs go on."""
        report = build_report(
            self.fence,
            self.version.identity,
            self._course.goal,
            self._recipients.outcomes,
            seconds=now - self._course.started,
            planning=self._started - self._course.started,
            held=held,
        )
        if self.parts.relays is not None:
            self.parts.relays.add_to(report)
        tell_not_finite(report, self._course.not_finite)
        report.collective = self._collective.describe()
        report.timeline.CopyFrom(self._course.timeline)
        return report


class Update:
    """Runs one goal. on_end: called once, when all is done. before: the update with installs that go on."""

    def __init__(
        self, state: ManagerState, goal: Goal, on_end: Callable[[Update], None], before: Update | None = None
    ) -> None:
        self.state, self.goal = state, goal
        self.course = course = Course(state, goal)
        self.fence, self.number = course.fence, course.number
        self._on_end = on_end
        recipients = Recipients(state, goal, self.fence)
        self._parts: Parts = Parts(
            course,
            recipients,
            Absences(state, goal, recipients, course.timer, course.cancel),
            Ranks(course, self._refuse),
            UpdateCollective(course, recipients),
            PlanPipeline(state),
            None if before is None else before._parts,
        )
        self.job: Job = SealJob(self._parts)
        self.report: manager_pb2.UpdateReport | None = None  # once every replica has an outcome
        self.refusal: Problem | None = None  # why it was refused, if it was
        self.started: Started | None = None  # the deployment that goes on without it

    # -- for the manager's machine

    @property
    def phase(self) -> Phase:
        """What it does now."""
        return self.course.phase

    @property
    def released(self) -> bool:
        """Whether its callers have returned, and its installs go on without them."""
        return self.course.released

    @property
    def unresolved(self) -> dict[str, str]:
        """Replicas told to install whose outcome is unknown, with the session of the agent that was told."""
        return self._parts.recipients.unresolved

    @property
    def relays(self) -> UpdateRelays | None:
        """Its relays; None: no relay brings anything."""
        return self._parts.relays

    @property
    def installs(self) -> Fence | None:
        """The fence of its intent; None before that is decided."""
        return self.job.fence if isinstance(self.job, CommitJob | InstallJob) else None

    def describe(self) -> str:
        """One line for blocked callers: what runs."""
        return self.course.describe(self.installs or self.fence)

    def blobs(self) -> list[manager_pb2.BlobRef]:
        """Blobs that members may fetch for it, or that it still needs."""
        parts, held = self._parts, self.goal.held
        refs = [*parts.recipients.blobs(), *parts.pipeline.blobs(), *parts.collective.blobs()]
        refs += [] if parts.relays is None else parts.relays.blobs()
        return refs + [ref for ref in (self.goal.probe, None if held is None else held.record) if ref is not None]

    def under_way(self) -> tuple[list[str], Version | None]:
        """The replicas without an outcome, and the version, from the intent on: it writes to them, or is about to."""
        if isinstance(self.job, CommitJob) and self.job.deployment is not None:
            return list(self.job.deployment.in_waves), self.job.version.identity
        if isinstance(self.job, CommitJob | InstallJob) and self.phase is not Phase.REPORTING:
            return self._parts.recipients.waiting_for(), self.job.version.identity
        return [], None

    def start(self, now: float) -> None:
        """Takes the first step."""
        self.course.start(now)
        self._parts.absences.begin(self.goal.replicas, now)
        self._send_missing(now)

    def cut_short(self, reason: str, now: float) -> None:
        """Ends as soon as that is safe, since something more important waits. Only for attempts."""
        self.course.cut = reason
        if self.course.refusable:
            self._refuse(Problem(code=Problem.CODE_ABORTED, message=reason))
        elif isinstance(self.job, InstallJob):
            self.job.ask_back(reason)

    def outrun(self) -> None:
        """Refuses, since members have seen higher epochs than the ledger had and would not obey this one."""
        if self.course.refusable:
            self._refuse(unavailable("the ledger was rolled back, and epochs are skipped: try again").problem)

    def caller_left(self, rank: int) -> None:
        """Takes the cancellation of a rank's call."""
        self._parts.ranks.caller_left(rank)

    def look(self, now: float) -> None:
        """Goes on if other updates that it waited for have ended."""
        before = self._parts.before
        if before is not None and before.course.phase is Phase.OVER:
            self._parts.before = None
        if isinstance(self.job, CandidateJob) or (self.phase is Phase.QUEUEING and not self.course.waits):
            self._go_on(now)

    # -- members come and go

    def member_lost(self, member: Member, now: float) -> None:
        """Gives a lost member some time to come back."""
        if isinstance(member, Holder) and self.relays is not None:
            self.relays.lost(member)
        if self._parts.absences.concerns(member):
            self._parts.absences.lost(member, now)
        if isinstance(member, Replica):
            self.job.session_ended(member.name)

    def note_return(self, member: Member, now: float) -> None:
        """Takes what a member said when it came back or published (a relay counts as filled once its hello names the
        version), and sends it what it may have missed."""
        relay = isinstance(member, Holder) and self.relays is not None and self.relays.note_return(member)
        if not relay and not self._parts.absences.concerns(member):
            return
        self._parts.absences.note_return(member)
        if isinstance(member, TrainerRank):
            self._parts.ranks.note_return(member)
        elif isinstance(member, Replica):
            self.job.session_ended(member.name)
            if member.last_outcome is not None:
                self.message(member, member.last_outcome, now)
        self._send_missing(now)

    def drop_member(self, member: Member, now: float, alive: bool) -> None:
        """Goes on without a member that said goodbye, was replaced by another process, or did not come back in time.
        alive: its process was connected until now."""
        if isinstance(member, Holder) and self.relays is not None:
            self.relays.drop(member.source, "it left while it was being filled", now)
            self._go_on(now)
        if not self._parts.absences.concerns(member):
            return
        if isinstance(member, Replica):
            if self.phase in (Phase.PREPARING, Phase.INSTALLING):
                self._parts.absences.leave_out(member, now)
                self._go_on(now)
        else:
            self._parts.ranks.drop(member, alive)
            if isinstance(member, TrainerRank):
                self._parts.collective.drop(member)
                if alive:
                    self.job.send(now)
                self._go_on(now)

    # -- messages, results and timers

    def message(self, member: Member, body: object, now: float) -> None:
        """Takes a member's message. The job ignores those with another fence."""
        self.job.message(member, body, now)
        self._go_on(now)

    def planned(self, task: PlanTask, done: Done, now: float) -> None:
        """Takes the end of a pipeline's task, which may be of this update."""
        if not self._parts.pipeline.done(task, done) and self.relays is not None:
            self.relays.planned(task, done, now)
        self._go_on(now)

    def done(self, step: Key, done: Done, now: float) -> None:
        """Takes the ledger's answer."""
        match self.job:
            case CommitJob() if step is Entry.INTENT:
                self._begin(self.job.written(done, now))
                self._go_on(now)
            case InstallJob(reported=report) if step is Entry.REPORT:
                self._begin(Over(report=report))

    def timer(self, step: Key, now: float) -> None:
        """Takes a timer of this update."""
        match step:
            case CourseTimer.RESEND:
                self.course.timer(CourseTimer.RESEND, self.state.deadlines.resend)
                self._send_missing(now)
            case CourseTimer.END:
                self._out_of_time(now)
            case CourseTimer.SILENCE if isinstance(self.job, InstallJob) and self.phase is Phase.INSTALLING:
                self.job.silence()
                self._go_on(now)
            case CourseTimer.HALF if self.phase is Phase.PREPARING and self._parts.recipients.enough:
                self._phase_over(now)
            case PhaseEnd(phase) if phase is self.phase:
                self._phase_over(now)
            case CallerAbsent(rank):
                self._parts.ranks.timer(rank)
                self._send_missing(now)
            case MemberAbsent() if (member := self._parts.absences.overdue(step)) is not None:
                self.drop_member(member, now, alive=False)
            case RelayAbsent() | RelayRetry() if self.relays is not None:
                self.relays.timer(step, now)
                self._go_on(now)

    # -- from job to job

    def _send_missing(self, now: float) -> None:
        """Sends what has not been answered, the first time and again; then goes on."""
        self.job.send(now)
        self._go_on(now)

    def _go_on(self, now: float) -> None:
        """Goes on as far as the answers allow."""
        while (following := self.job.advance(now)) is not None:
            self._begin(following)

    def _begin(self, job: Job) -> None:
        """Begins a job, since the one before has ended; or ends the update."""
        self.job = job
        if not isinstance(job, Over):
            return
        self.refusal, self.report = job.refusal, None if self.goal.dry_run else job.report
        self.started = job.started
        if job.refusal is not None:
            self.course.refuse(job.refusal)
        elif job.report is not None:
            self.course.answer(job.report)
        self.course.end()
        self.course.release()
        self._on_end(self)

    def _refuse(self, problem: Problem) -> None:
        """Refuses the update: nothing was touched, and nothing will be."""
        self._begin(Over(problem))

    def _phase_over(self, now: float) -> None:
        """Has the job go on without silent members, or ends."""
        job = self.job.overdue(now - self.course.started, now)
        if job is not None:
            self._begin(job)
        self._go_on(now)

    def _out_of_time(self, now: float) -> None:
        seconds = now - self.course.started
        if self.course.refusable:
            self._refuse(deadline(f"the update was still {self.course.activity} after {seconds:.1f} s").problem)
        elif isinstance(self.job, InstallJob):
            self.job.out_of_time(seconds)
            self._go_on(now)
