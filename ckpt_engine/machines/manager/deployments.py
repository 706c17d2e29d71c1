"""Carries staged deployments out: observes replicas, commits the waves that `deploy` decides, and ends their calls.

Decides when a wave is written, which calls an undecided deployment is in the way of, and what its report says. Does not
decide waves (`deploy`), nor bring a replica anywhere: a wave is a commit for some names, the decision is one for the
whole selection, and replicas are brought to their commits one by one (`reconcile.py`).

The ledger has a deployment's row in the transaction of each of its commits, so a manager that was started again goes on
where the last commit left it. Moments are of this manager: a condition of time begins again with another one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from ckpt_engine.core.deadlines import CATCH_UP_ATTEMPTS
from ckpt_engine.core.names import some
from ckpt_engine.core.problems import CkptEngineError, invalid, not_found, precondition, unavailable
from ckpt_engine.core.version import Fence, Version
from ckpt_engine.machines.events import (
    Call,
    Done,
    EmitEvent,
    FinishCall,
    RecordDeployment,
    RecordIntent,
    RecordOutcome,
)
from ckpt_engine.machines.manager import deploy
from ckpt_engine.machines.manager.claims import Claim
from ckpt_engine.machines.manager.deploy import Deployment, Facts, Fleet, Verdict
from ckpt_engine.machines.manager.goal import Goal, QueuedGoal
from ckpt_engine.machines.manager.jobs import Started
from ckpt_engine.machines.manager.recipients import HEALTH
from ckpt_engine.machines.manager.report import judge, presumed_outcome, tell_probe
from ckpt_engine.machines.manager.staging import observed
from ckpt_engine.machines.manager.state import ManagerState
from ckpt_engine.machines.manager.update import InstallJob, Update
from ckpt_engine.machines.manager.versions import Commit
from ckpt_engine.v1 import manager_pb2

Action = manager_pb2.SteerDeploymentRequest

DECIDED_SHOWN = 8
"""Decided deployments that the status goes on to show."""


@dataclass(frozen=True, slots=True)
class DeploymentCommit:
    """Key of the task that writes a commit of a deployment."""

    number: int  # of the deployment
    fence: Fence  # of the commit
    identity: Version  # what the selection is to serve
    selection: frozenset[str]
    row: Deployment  # as it is once that is written


@dataclass(frozen=True, slots=True)
class DeploymentWrite:
    """Key of the task that writes a deployment's row between two commits."""

    number: int
    call: Call | None  # of the person whose decision it is; None: replicas were dropped
    row: Deployment


@dataclass(frozen=True, slots=True)
class ReportWrite:
    """Key of the task that records a report. Its end changes nothing."""

    epoch: int


@dataclass(frozen=True, slots=True)
class DeploymentLook:
    """Key of the timer after which an undecided deployment is looked at again."""

    number: int


@dataclass(frozen=True, slots=True)
class DeploymentCallEnd:
    """Key of the timer that answers the calls of a deployment which is still undecided."""

    number: int


@dataclass
class DeploymentCourse:
    """What this manager knows of a deployment beside its row. Moments are monotonic seconds."""

    began: float  # or when this manager did
    committed: float  # when the last wave was
    report: manager_pb2.UpdateReport  # of the update that sealed it; of a manager that was started since, nearly empty
    calls: dict[int, Call] = field(default_factory=dict)  # by rank, those that wait
    until: manager_pb2.Until = manager_pb2.UNTIL_INSTALLED  # what these wait for
    ended: float | None = None  # when the last wave ended; None: it goes on
    outcomes: dict[str, manager_pb2.ReplicaOutcome] = field(default_factory=dict)  # by replica, of the last attempt
    probes: dict[str, manager_pb2.ProbeAnswer] = field(default_factory=dict)  # by replica, under the target
    failures: dict[str, str] = field(default_factory=dict)  # by replica, why it could not be brought to the target
    tries: dict[str, int] = field(default_factory=dict)  # by replica, attempts that failed
    ready: set[str] = field(default_factory=set)  # replicas that were ready for the target since the last wave began
    counted: dict[str, tuple[int, int]] = field(default_factory=dict)  # by replica, what it told last of its requests
    requests: int = 0  # of replicas of its waves since the wave ended of which the condition was, or is, judged
    failed: int = 0  # of these
    undo: str = ""  # why it is to be undone; empty: it is not
    writing: DeploymentCommit | DeploymentWrite | None = None  # the key of the task that writes its row
    selecting: frozenset[str] = frozenset()  # what the commit that is being written selects
    dropped: bool = False  # replicas were taken out since the row was last written
    retry: float = 0.0  # no write before this moment, since the last one failed
    decision: int = 0  # the epoch of the commit that decided it; 0: it is undecided
    waits_for: str = ""  # for people


@dataclass
class Deployments:
    """The staged deployments that are undecided, and those whose replicas are on the way back."""

    state: ManagerState
    courses: dict[int, DeploymentCourse] = field(default_factory=dict)  # by number
    decided: dict[int, Deployment] = field(default_factory=dict)  # the last, by number

    def connect(
        self,
        attempts: Callable[[], Sequence[Update]],
        cut_short: Callable[[Callable[[Goal], bool], str, float], None],
        ended: Callable[[manager_pb2.UpdateReport], None],
    ) -> None:
        """Connects it with attempts that run, with what cuts these short, and with what answers calls that wait for the
        end of a deployment."""
        self.attempts, self.cut_short, self.ended = attempts, cut_short, ended

    # -- begin

    def take_up(self, rows: Iterable[manager_pb2.Deployment], now: float) -> None:
        """Takes deployments of the ledger: undecided ones, and those of each lineage's highest version. A deployment
        that is undecided here and not there was decided: the unanswered write took effect."""
        stored = {row.number: row for row in map(Deployment.of, rows)}
        found = {number: row for number, row in stored.items() if row.state == deploy.UNDECIDED}
        for number, course in list(self.courses.items()):
            row = self.state.deployments[number]
            if row.state == deploy.UNDECIDED and number not in found and isinstance(course.writing, DeploymentCommit):
                self._committed(course, course.writing, now)
        for number, row in stored.items():
            if number not in found and number not in self.courses:
                self._remember(row)
        for number, row in found.items():
            fence = self.state.fence(number).message()
            report = manager_pb2.UpdateReport(fence=fence, identity=row.target.message())
            course = self.courses.setdefault(number, DeploymentCourse(now, now, report))
            if self.state.deployments.get(number) != row:
                course.committed, course.ended = now, None
            course.writing, course.selecting = None, frozenset()
            course.undo = course.undo or row.reason
            self.state.deployments[number] = self._without_dropped(row)
        rows_now = self.state.deployments.values()
        self.state.versions.stage(*(each for row in rows_now for each in (row.base, row.target)))
        for row in found.values():
            self.state.versions.keep_last(Commit(row.base_epoch, row.base))

    def begin(self, started: Started) -> None:
        """Takes a deployment whose first wave is on the disk. Its calls are answered here."""
        row, now = started.deployment, started.committed
        course = DeploymentCourse(started.began, now, started.report, dict(started.calls), started.until)
        self.courses[row.number] = course
        self._note(course, f"wave {len(row.waves)}", now)
        if course.calls:
            self.state.set_timer(DeploymentCallEnd(row.number), started.end - self.state.deadlines.report - now)
        if course.until == manager_pb2.UNTIL_HELD:
            self._answer_early(course, self._report(row, course, now))

    # -- what others ask

    def lets(self, goal: Goal) -> bool:
        """Whether no undecided deployment is in a goal's way, nor one of the same version that is on the way back."""
        for number, row in self.state.deployments.items():
            if goal.is_attempt:
                if goal.replicas[0] in self.courses[number].selecting:
                    return False
            elif not goal.dry_run and (row.meets(goal.pool, goal.lineage) or row.is_to(goal.lineage, goal.version)):
                return False
        return True

    def join_calls(self, coming: Sequence[QueuedGoal], now: float) -> None:
        """Has calls wait for a deployment whose version their ranks have sealed for a manager that led before."""
        for number, row in self.state.deployments.items():
            content, course = self.state.versions.contents[row.target], self.courses[number]
            for queued in coming:
                goal = queued.goal
                if row.state != deploy.UNDECIDED or not content.was_sealed_for(goal):
                    continue
                queued.dequeue()
                content.probe = content.probe or goal.probe  # the manager before has taken its scores along
                course.calls, course.until = dict(goal.calls), goal.until
                self.state.set_timer(DeploymentCallEnd(number), goal.end - self.state.deadlines.report - now)
                first_ended = len(row.waves) > 1 or course.ended is not None
                if goal.until == manager_pb2.UNTIL_HELD or (goal.until == manager_pb2.UNTIL_FIRST_WAVE and first_ended):
                    self._answer_early(course, self._report(row, course, now))

    def make_way(self, coming: Sequence[QueuedGoal]) -> None:
        """Has deployments undone that something newer supersedes."""
        for number, row in self.state.deployments.items():
            for each in coming:
                waits = row.is_to(each.goal.lineage, each.goal.version) or row.newer == manager_pb2.NEWER_WAIT
                if not waits and not each.goal.dry_run and row.meets(each.goal.pool, each.goal.lineage):
                    self.courses[number].undo = self.courses[number].undo or f"{each.description} superseded it"

    def take_attempt(self, update: Update) -> None:
        """Takes the end of an attempt, which may be for a replica of a wave."""
        goal, report = update.goal, update.report
        for number, row in self.state.deployments.items():
            course, name = self.courses[number], goal.replicas[0]
            version = row.base if row.state == deploy.UNDONE else row.target
            if name not in row.in_waves or goal.sealed != version or update.course.cut:
                continue
            outcome = None if report is None else report.replicas[0]
            if outcome is not None:
                course.outcomes[name] = outcome
                if version == row.target and outcome.HasField("probe"):
                    course.probes[name] = outcome.probe
                course.report.bytes += outcome.bytes
                course.report.relays.extend(report.relays if report is not None else ())
                if outcome.outcome == manager_pb2.OUTCOME_NEW_SERVING:
                    course.failures.pop(name, None)
                    continue
            problem = update.refusal if outcome is None else outcome.problem
            if outcome is None and problem is not None and problem.code in HEALTH:
                continue  # of what it was to read, mostly; `wave_seconds` ends that
            course.tries[name] = course.tries.get(name, 0) + 1
            closed = outcome is not None and outcome.outcome == manager_pb2.OUTCOME_QUARANTINED
            if (closed and name not in update.unresolved) or course.tries[name] >= CATCH_UP_ATTEMPTS:
                course.failures[name] = "it could not be brought to it" if problem is None else problem.message

    def _without_dropped(self, row: Deployment) -> Deployment:
        """A row that was written, without replicas that were taken out meanwhile."""
        now = self.state.deployments.get(row.number, row)
        return replace(row, participants=now.participants, min_replicas=now.min_replicas)

    def drop(self, name: str) -> bool:
        """Takes a replica out that said goodbye or was evicted. Nothing is decided without it before that is on the
        disk. Returns whether it was a participant."""
        rows = [(number, row) for number, row in self.state.deployments.items() if name in row.participants]
        for number, row in rows:
            others = tuple(each for each in row.participants if each != name)
            fewer = max(1, min(row.min_replicas, len(others)))
            self.state.deployments[number] = replace(row, participants=others, min_replicas=fewer)
            self.courses[number].dropped = True
        return bool(rows)

    def cancelled(self, call: Call) -> None:
        """Forgets a call that was cancelled. The deployment goes on."""
        for course in self.courses.values():
            course.calls = {rank: each for rank, each in course.calls.items() if each != call}

    def describe(self) -> str:
        """What goes on, for people; empty: nothing does."""
        return "; ".join(
            f"{row.strategy} of version {row.target.number} of lineage {row.target.lineage!r} (deployment {number}, "
            f"{len(row.in_waves)} of {len(row.participants)} replicas): waits for {self.courses[number].waits_for}"
            for number, row in self.state.deployments.items()
        )

    def messages(self) -> list[manager_pb2.Deployment]:
        """All that are known, for the status."""
        undecided = [self._message(row, self.courses[number]) for number, row in self.state.deployments.items()]
        return [*(row.message() for number, row in self.decided.items() if number not in self.courses), *undecided]

    # -- a person

    def join(self, call: Call, request: manager_pb2.SteerDeploymentRequest) -> None:
        """Takes a person's call in. It is answered when that is on the disk."""
        try:
            row = self._steered(request)
            self.state.check_ledger()
        except CkptEngineError as error:
            self.state.finish(call, error.problem)
            return
        course = self.courses[row.number]
        if row == self.state.deployments[row.number]:
            self.state.out.append(FinishCall(call, response=self._message(row, course)))
        else:
            self._write(course, DeploymentWrite(row.number, call, row))

    def _steered(self, request: manager_pb2.SteerDeploymentRequest) -> Deployment:
        """The row as it is after a call. Raises NOT_FOUND, FAILED_PRECONDITION or INVALID_ARGUMENT."""
        undecided = {number: row for number, row in self.state.deployments.items() if row.state == deploy.UNDECIDED}
        listed = ", ".join(map(str, undecided)) or "none"
        number = request.number or (next(iter(undecided)) if len(undecided) == 1 else 0)
        if number in self.decided:
            raise precondition(f"deployment {number} is decided: {_ended(self.decided[number])}")
        if not number and len(undecided) > 1:
            raise invalid(f"several deployments are undecided: name one of {listed}")
        if number not in undecided:
            raise not_found(f"no deployment {number or ''} is undecided; undecided are: {listed}".replace("  ", " "))
        row, course = undecided[number], self.courses[number]
        if course.writing is not None:
            raise unavailable(f"deployment {number} is being written: try again")
        match request.action:
            case Action.ACTION_APPROVE:
                if course.ended is None:
                    raise precondition(f"deployment {number} has no wave to approve yet: {course.waits_for}")
                return replace(row, approved=len(row.waves))
            case Action.ACTION_PAUSE | Action.ACTION_RESUME:
                return replace(row, paused=request.action == Action.ACTION_PAUSE)
            case Action.ACTION_UNDO:
                return replace(row, reason=": ".join(filter(None, ("a person undid it", request.reason))))
        raise invalid(f"this manager does not know the action {request.action}: bring it and the caller to one version")

    # -- from step to step

    def look(self, settled: bool, now: float) -> None:
        """Goes on with each deployment as far as it can. Called after every event that may change something."""
        for number, row in list(self.state.deployments.items()):
            course = self.courses[number]
            self._pin(row)
            if course.writing is not None or not settled or now < course.retry:
                continue
            if row.state == deploy.UNDECIDED and course.dropped:
                course.dropped = False
                self._write(course, DeploymentWrite(number, None, row))
            elif row.state == deploy.UNDECIDED:
                self._advance(row, course, now)
            elif self._is_back(row, course, now):
                self._end(row, course, now)

    def _advance(self, row: Deployment, course: DeploymentCourse, now: float) -> None:
        if self.state.ledger_problem is not None or not self.state.versions.is_certain(row.in_waves, row.pool):
            course.waits_for = "the ledger"
            return
        course.selecting = frozenset()
        fleet = self._fleet(row, course)
        step: deploy.Step = deploy.Judgement(Verdict.OPEN)
        if course.undo:
            step = deploy.Decide(deploy.UNDONE, course.undo)
        elif course.ended is None:
            step = deploy.judge_wave(row, fleet, now - course.committed)
            if step.verdict is Verdict.BROKEN:
                step = deploy.Decide(deploy.UNDONE, step.reason)
            elif step.verdict is Verdict.MET:
                for name in row.waves[-1].replicas:
                    if name in fleet and not fleet[name].has_target:
                        course.failures.setdefault(name, "it did not serve the version in time")
                self._wave_ended(row, course, now)
        if course.ended is not None and not course.undo:
            serving = [name for name in row.in_waves if name in fleet and fleet[name].has_target]
            probes = {name: self._probe(row, course, name) for name in serving}
            self._count(row, course)
            approved = row.approved >= len(row.waves)
            facts = Facts(now - course.ended, approved, probes, course.requests, course.failed)
            step = deploy.next_step(row, fleet, facts)
        match step:
            case deploy.NextWave(replicas):
                self._commit(row, course, row.target, frozenset(replicas), deploy.UNDECIDED, "", now)
            case deploy.Decide(state, reason):
                identity = row.target if state == deploy.DEPLOYED else row.base
                self._commit(row, course, identity, row.selection | row.in_waves, state, reason, now)
            case deploy.Judgement(reason=reason, seconds=seconds):
                course.waits_for = reason
                if course.ended is None and not deploy.not_ready(fleet):
                    for update in self.attempts():
                        if isinstance(update.job, InstallJob) and update.goal.sealed == row.target:
                            update.job.go_on(now)
                if seconds is not None:
                    self.state.set_timer(DeploymentLook(row.number), seconds)

    def _probe(self, row: Deployment, course: DeploymentCourse, name: str) -> manager_pb2.ProbeAnswer | None:
        """What a replica that serves the target has answered to its probe; None: that is not known."""
        replica = self.state.members.replicas.get(name)
        last = None if replica is None else replica.last_outcome  # of an attempt that another manager may have ordered
        if last is not None and Version.or_none(last.after) == row.target and last.HasField("probe"):
            return last.probe
        return course.probes.get(name)

    def _count(self, row: Deployment, course: DeploymentCourse) -> None:
        """Adds the requests that replicas of its waves have answered since this was called last. What a replica told
        the first time is where its count begins, and so is 0 for another engine. A hello tells of none."""
        for name in row.in_waves & self.state.members.replicas.keys():
            counted = self.state.members.replicas[name].requests
            if counted is None:
                continue
            before = course.counted.get(name, counted)
            before = (0, 0) if counted[0] < before[0] else before
            course.counted[name] = counted
            course.requests += counted[0] - before[0]
            course.failed += counted[1] - before[1]

    def _fleet(self, row: Deployment, course: DeploymentCourse) -> Fleet:
        """The participants. One whose attempt goes on is not at the target yet: its outcome is still to come."""
        attempts = {update.goal.replicas[0]: update for update in self.attempts()}
        jobs = [(name, each.job) for name, each in attempts.items() if each.goal.sealed == row.target]
        ready = {name for name, job in jobs if isinstance(job, InstallJob) and job.ready}
        course.ready |= ready
        replicas, failures = self.state.members.replicas, course.failures
        fleet = {name: observed(replicas.get(name), row.target, failures.get(name, "")) for name in row.participants}
        fleet = {name: each for name, each in fleet.items() if name not in self.state.holds}
        return {
            name: replace(
                each,
                has_target=each.has_target and name not in attempts,
                ready=name in ready,
                was_ready=name in course.ready,
            )
            for name, each in fleet.items()
        }

    def _wave_ended(self, row: Deployment, course: DeploymentCourse, now: float) -> None:
        course.ended = now
        if not row.in_waves.issuperset(row.participants):  # else requests are judged no more, and these are reported
            course.counted, course.requests, course.failed = {}, 0, 0
        self._count(row, course)
        self._note(course, "between waves", now)
        report = self._report(row, course, now)
        self._record(report, row.waves[-1].epoch)
        if course.until == manager_pb2.UNTIL_FIRST_WAVE:
            self._answer_early(course, report)

    def _commit(
        self,
        row: Deployment,
        course: DeploymentCourse,
        identity: Version,
        selection: frozenset[str],
        state: deploy.State,
        reason: str,
        now: float,
    ) -> None:
        """Has a commit written, once no attempt toward an older one goes on for what it selects."""
        names = row.in_waves | selection

        def meets(goal: Goal) -> bool:
            return goal.replicas[0] in names and goal.sealed != identity

        course.selecting = names
        if any(meets(update.goal) for update in self.attempts()):
            course.waits_for = "attempts toward an older commit to end"
            self.cut_short(meets, "a wave of a deployment came", now)
            return
        fence = self.state.next_install()
        if state == deploy.UNDECIDED:
            coming = row.with_wave(fence.epoch, selection)
        else:
            coming = replace(row, state=state, reason=reason)
        key = DeploymentCommit(row.number, fence, identity, selection, coming)
        course.writing, course.selecting, course.waits_for = key, selection, "the ledger"
        seconds = self.state.deadlines.ledger
        self.state.run(key, RecordIntent(fence.epoch, identity, seconds, tuple(sorted(selection)), coming.message()))

    def committed(self, key: DeploymentCommit, done: Done, now: float) -> None:
        """Takes the ledger's answer about a commit."""
        course = self.courses[key.number]
        if done.problem is None:
            self._committed(course, key, now)
        elif done.answered:
            course.writing, course.selecting = None, frozenset()
            self._write_later(course, key.number, now)
        else:
            # The ledger is read again, and then `take_up` is called.
            self.state.versions.doubt(key.fence.epoch, key.identity, key.selection)

    def _committed(self, course: DeploymentCourse, key: DeploymentCommit, now: float) -> None:
        row = self._without_dropped(key.row)
        decided = row.state != deploy.UNDECIDED
        self.state.intent_ended(key.fence)
        self.state.versions.select(Commit(key.fence.epoch, key.identity), key.selection, is_last=decided)
        self.state.deployments[row.number] = row
        course.writing, course.selecting = None, frozenset()
        course.committed, course.ended, course.tries, course.ready = now, None, {}, set()
        if not decided:
            self._note(course, f"wave {len(row.waves)}", now)
            return
        self.decided[row.number], course.decision = row, key.fence.epoch
        if row.state == deploy.UNDONE:
            self._note(course, "going back", now)
            course.failures = {}
            course.waits_for = f"{some(sorted(row.in_waves))} to serve version {row.base.number} again"
            self.state.set_timer(DeploymentLook(row.number), row.wave_seconds)

    def _is_back(self, row: Deployment, course: DeploymentCourse, now: float) -> bool:
        """Whether the report can be made: a deployed version is served already; of one that was undone every replica is
        back, or is not waited for any more."""
        if row.state == deploy.DEPLOYED or now - course.committed >= row.wave_seconds:
            return True
        commits = {name: self.state.versions.commit_of(name) for name in row.in_waves - course.failures.keys()}
        ours = [name for name, commit in commits.items() if commit is not None and commit.epoch == course.decision]
        replicas = (self.state.members.replicas.get(name) for name in ours)
        return all(each is None or each.peer is None or (each.holds(row.base) and each.serving) for each in replicas)

    def _end(self, row: Deployment, course: DeploymentCourse, now: float) -> None:
        """Records the report, answers the calls, and forgets all but the row."""
        report = self._report(row, course, now)
        for epoch in (row.number, course.decision):
            self._record(report, epoch)
        self.ended(report)
        self._answer(course, report)
        self._remember(row)
        del self.courses[row.number], self.state.deployments[row.number]
        self.state.claims.end(row.number)
        self.state.cancel_timer(DeploymentLook(row.number))
        self.state.versions.stage(*(each for row in self.state.deployments.values() for each in (row.base, row.target)))

    def written(self, key: DeploymentWrite, done: Done, now: float) -> None:
        """Takes the ledger's answer about what a person has said, or about replicas that were dropped."""
        course = self.courses.get(key.number)
        if course is not None:
            course.writing = None
        if done.problem is None and course is not None:
            self.state.deployments[key.number] = self._without_dropped(key.row)
            course.undo = course.undo or key.row.reason
        if key.call is not None:
            response = None if done.problem is not None else key.row.message()
            self.state.out.append(FinishCall(key.call, done.problem, response))
        elif done.problem is not None and course is not None:
            course.dropped = True
            self._write_later(course, key.number, now)

    def calls_over(self, number: int, now: float) -> None:
        """Answers the calls of a deployment that is still undecided: it goes on without them."""
        course = self.courses.get(number)
        if course is not None and course.calls:
            report = self._report(self.state.deployments[number], course, now)
            report.warnings.append(
                f"the deployment goes on and waits for {course.waits_for}: see `ckpt-engine deploy status`"
            )
            self._answer(course, report)

    # -- parts

    def _write(self, course: DeploymentCourse, key: DeploymentWrite) -> None:
        course.writing = key
        self.state.run(key, RecordDeployment(key.row.message(), self.state.deadlines.ledger))

    def _write_later(self, course: DeploymentCourse, number: int, now: float) -> None:
        course.retry = now + self.state.deadlines.resend
        self.state.set_timer(DeploymentLook(number), self.state.deadlines.resend)

    def _remember(self, row: Deployment) -> None:
        """Takes a deployment that has come to its end: of one that was undone the number is not to be called again."""
        self.decided[row.number] = row
        while len(self.decided) > DECIDED_SHOWN:
            del self.decided[next(iter(self.decided))]
        if row.state == deploy.UNDONE:
            self.state.versions.undone[row.target.lineage] = row.message()

    def _pin(self, row: Deployment) -> None:
        """Keeps base and target in relays that hold them, until it is decided."""
        pinned = {row.base} if row.state == deploy.UNDONE else {row.base, row.target}
        holders = self.state.members.holders.values()
        names = frozenset(each.source for each in holders if any(held.identity in pinned for held in each.held))
        self.state.claims.granted[row.number] = (
            Claim(reads=row.base, sources=names) if row.state == deploy.UNDONE else Claim(sources=names, doubles=names)
        )

    def _message(self, row: Deployment, course: DeploymentCourse) -> manager_pb2.Deployment:
        counts = (course.requests, course.failed) if any(each.name == "errors" for each in row.conditions) else (0, 0)
        return row.message(course.waits_for if row.state == deploy.UNDECIDED else "", *counts)

    def _note(self, course: DeploymentCourse, phase: str, now: float) -> None:
        course.report.timeline.phases.add(name=phase, after=now - course.began)

    def _record(self, report: manager_pb2.UpdateReport, epoch: int) -> None:
        stored = manager_pb2.UpdateReport()
        stored.CopyFrom(report)
        for fence in (stored.fence, *(outcome.fence for outcome in stored.replicas)):
            fence.CopyFrom(self.state.fence(epoch).message())
        self.state.run(ReportWrite(epoch), RecordOutcome(stored, self.state.deadlines.report))

    def _answer_early(self, course: DeploymentCourse, report: manager_pb2.UpdateReport) -> None:
        """Answers calls that do not wait for the decision."""
        report.held = True
        self._answer(course, report)

    def _answer(self, course: DeploymentCourse, report: manager_pb2.UpdateReport) -> None:
        for call in course.calls.values():
            self.state.out.append(EmitEvent(call, manager_pb2.UpdateEvent(report=report)))
            self.state.finish(call)
        course.calls.clear()

    def _report(self, row: Deployment, course: DeploymentCourse, now: float) -> manager_pb2.UpdateReport:
        """The report as of now. It is judged once the version is deployed."""
        report = manager_pb2.UpdateReport()
        report.CopyFrom(course.report)
        left_out = {each.replica: each for each in course.report.replicas if each.replica not in row.participants}
        outcomes = left_out | {name: self._outcome(row, course, name) for name in row.participants}
        del report.replicas[:]
        report.replicas.extend(outcomes[name] for name in sorted(outcomes))
        for outcome in report.replicas:
            outcome.fence.CopyFrom(report.fence)
            if row.state == deploy.UNDONE and outcome.replica in course.probes:
                outcome.probe.CopyFrom(course.probes[outcome.replica])  # why it went back, mostly
        report.seconds = now - course.began
        report.deployment.CopyFrom(self._message(row, course))
        tell_probe(report)
        report.ok = report.verified = False
        if row.state == deploy.DEPLOYED:
            judge(report, row.min_replicas if row.min_replicas < len(row.participants) else None)
        elif row.state == deploy.UNDONE:
            report.warnings.append(f"it was undone: {row.reason}")
        return report

    def _outcome(self, row: Deployment, course: DeploymentCourse, name: str) -> manager_pb2.ReplicaOutcome:
        """What has become of one participant."""
        replica, fence = self.state.members.replicas.get(name), self.state.fence(row.number)
        in_wave, outcome = name in row.in_waves, course.outcomes.get(name)
        if outcome is None and replica is not None and replica.last_outcome is not None:
            last = replica.last_outcome  # of an attempt that another manager ordered
            serves = last.outcome == manager_pb2.OUTCOME_NEW_SERVING and Version.or_none(last.after) == row.target
            outcome = last if serves else None
        if row.state != deploy.UNDONE and outcome is not None and in_wave:
            return outcome
        if (
            row.state != deploy.UNDONE
            and in_wave
            and replica is not None
            and replica.holds(row.target)
            and replica.serving
        ):
            held = row.target.message()
            return manager_pb2.ReplicaOutcome(
                replica=name, fence=fence.message(), outcome=manager_pb2.OUTCOME_NEW_SERVING, after=held
            )
        why = f"the deployment was undone: {row.reason}" if row.state == deploy.UNDONE else "its wave has not come"
        why = "it has not been brought to the version yet" if in_wave and row.state != deploy.UNDONE else why
        return presumed_outcome(name, replica, fence, unavailable(why, replica=name).problem, is_ordered=False)


def _ended(row: Deployment) -> str:
    version = f"version {row.target.number} of {row.target.lineage!r}"
    return f"{version} was deployed" if row.state == deploy.DEPLOYED else f"{version} was undone: {row.reason}"
