"""One install in one replica: pause, let the workers install, look at their state words, resume, say what became of it.

It needs nothing of the manager once the plans are fetched. Up to the moment in which a worker may have written
(fetching an order counts as that), every failure leads back: resume, old version, OLD_SERVING. After it only the
state words count: all workers clean with the new version is NEW_SERVING; anything else stays closed, QUARANTINED.
Every step has a deadline, and a part of the whole is kept back for resuming.
"""

from __future__ import annotations

from typing import ClassVar, cast

from ckpt_engine.core.machines.agent_state import CLEAN, Operation, Order, Replica, acknowledged, refusal
from ckpt_engine.core.machines.events import (
    Done,
    FetchBlobs,
    InstallEngine,
    PauseEngine,
    ReadWords,
    ResumeEngine,
    StampEngine,
    Words,
)
from ckpt_engine.v1 import manager_pb2, weights_pb2, worker_pb2

Problem = weights_pb2.Problem

RETRY_SECONDS = 0.2
"""Before an engine that refused to resume is asked again."""


class Installing(Operation):
    """Ends with a ReplicaOutcome in `replica.last_outcome`."""

    kind: ClassVar[str] = "install"

    def __init__(self, replica: Replica, install: manager_pb2.Install) -> None:
        super().__init__(replica, install.fence)
        self.install = install
        self._stage: manager_pb2.Stage = manager_pb2.PLAN
        self._shown: manager_pb2.Stage = manager_pb2.PLAN
        self._blobs: dict[bytes, bytes] = {}
        self._reports: dict[int, worker_pb2.WorkerInstalled] = {}
        self._progress: dict[int, worker_pb2.WorkerProgress] = {}
        self._problem: Problem | None = None
        self._going_back = False
        self._giving_orders = False
        self._pause_started: float | None = None
        self._pause_ended: float | None = None
        self._before = replica.words
        self._started = self._end = self._reserve = self._stage_started = 0.0
        self._seconds: dict[manager_pb2.Stage, float] = {}

    # -- steps

    def start(self, now: float) -> None:
        """Looks at the workers first: what they hold now is what going back means."""
        self._started = now
        self._stage_started = now
        self._end = now + self.install.deadline_seconds
        self._reserve = min(self.replica.deadlines.resume, self.install.deadline_seconds / 4)
        self.run("before", ReadWords())

    def done(self, step: str, done: Done, now: float) -> None:
        """Takes the step after the one that ended."""
        if step in ("before", "judge", "after"):
            self.replica.take_words(
                cast(Words, done.result)
                if done.problem is None
                else Words((), False, f"the page of state words cannot be read: {done.problem.message}", None)
            )
        match step:
            case "before":
                self._before = self.replica.words
                self._fetch(now)
            case "fetch":
                self._fetched(done, now)
            case "pause":
                self._paused(done, now)
            case "install":
                self._installed(done, now)
            case "judge":
                self._judge(now)
            case "stamp":
                self._resume(now)
            case "resume":
                self._resumed(done, now)
            case "after":
                self._conclude_serving(now)

    def timer(self, step: str, now: float) -> None:
        """The engine refused to resume a moment ago."""
        self._resume(now)

    def _fetch(self, now: float) -> None:
        problem = self._cannot_begin()
        if problem is not None:
            self._fail(problem)
        if self._going_back:
            self._conclude_untouched(now)
            return
        refs = {ref.digest: ref for worker in self.install.workers for ref in (worker.plan, worker.expected)}
        self._refs = list(refs.values())
        seconds = min(self.replica.deadlines.blobs, self._left(now))
        self.run("fetch", FetchBlobs(tuple(self._refs), seconds))

    def _cannot_begin(self) -> Problem | None:
        engine = self.replica.engine
        if engine is None:
            return self._issue(Problem.UNAVAILABLE, f"no engine to install into: {self.replica.engine_reason}")
        if self.replica.asleep:
            return self._issue(
                Problem.FAILED_PRECONDITION, "the replica is asleep: wake it, then update again; its weights stay"
            )
        ranks = sorted(worker.rank for worker in self.install.workers)
        if ranks != list(range(engine.world_size)):
            return self._issue(
                Problem.FAILED_PRECONDITION,
                f"the plan is for workers {ranks}, but the engine has workers 0 to {engine.world_size - 1}",
            )
        return None

    def _fetched(self, done: Done, now: float) -> None:
        if done.problem is not None:
            self._fail(done.problem)
        elif self._left(now) <= 0:
            self._fail(self._issue(Problem.DEADLINE_EXCEEDED, "fetching the plan took all the time there was"))
        if self._going_back:
            self._conclude_untouched(now)
            return
        contents = cast(tuple[bytes, ...], done.result)
        self._blobs = {ref.digest: data for ref, data in zip(self._refs, contents, strict=True)}
        self._enter(manager_pb2.QUIESCE, now)
        self._pause_started = now
        self.replica.paused = None
        seconds = min(self.replica.deadlines.quiesce, self._left(now))
        self.run("pause", PauseEngine(self.install.pause_mode, seconds))

    def _paused(self, done: Done, now: float) -> None:
        if done.problem is not None:
            self._fail(done.problem)
        else:
            self.replica.paused = True
            if self._left(now) <= 0:
                self._fail(self._issue(Problem.DEADLINE_EXCEEDED, "pausing the engine took all the time there was"))
        if self._going_back:
            self.run("judge", ReadWords())
            return
        self._enter(manager_pb2.TRANSFER, now)
        self._giving_orders = True
        self.run("install", InstallEngine(self.fence.epoch, self._left(now)))

    def _installed(self, done: Done, now: float) -> None:
        self._giving_orders = False
        if done.problem is None:
            self.replica.settled = True  # every worker has come back from whatever it did before
        for rank in sorted(self._reports):
            report = self._reports[rank].report
            if report.HasField("problem"):
                self._fail(report.problem)
        if done.problem is not None:
            self._fail(done.problem)
        self._enter(manager_pb2.VERIFY, now)
        self.run("judge", ReadWords())

    def _judge(self, now: float) -> None:
        """The state words decide, whatever engine and workers said."""
        if self._all_new():
            self._enter(manager_pb2.RESUME, now)
            self.run("stamp", StampEngine(self.install.identity, self._reserve / 4))
        elif self.replica.untouched() and self.replica.words.open:
            self._fail(self._issue(Problem.INTERNAL, "the engine ended its install, but no worker has installed"))
            self._enter(manager_pb2.RESUME, now)
            self._resume(now)
        else:
            self._quarantine(self.replica.closed_reason(), now)

    def _all_new(self) -> bool:
        statuses, engine = self.replica.words.workers, self.replica.engine
        return (
            self.replica.words.open
            and engine is not None
            and len(statuses) == engine.world_size
            and all(
                status.state == CLEAN and status.epoch == self.fence.epoch and status.identity == self.install.identity
                for status in statuses
            )
        )

    def _resume(self, now: float) -> None:
        left = self._end - now
        if left <= 0:
            self._quarantine("the engine could not be resumed in time; it is asked again", now)
            return
        self.run("resume", ResumeEngine(min(self.replica.deadlines.resume, left)))

    def _resumed(self, done: Done, now: float) -> None:
        if done.problem is not None:
            if self._end - now > RETRY_SECONDS:
                self.set_timer("retry", RETRY_SECONDS)
            else:
                self._quarantine(f"the engine does not resume: {done.problem.message}; it is asked again", now)
            return
        self.replica.paused = False
        self._pause_ended = now
        self.run("after", ReadWords())

    # -- what comes from outside

    def repeated(self, now: float) -> None:
        """Tells that the command has arrived."""
        self._tell_progress()

    def overtaken(self, reason: str, now: float) -> None:
        """Goes back if no worker has fetched its order yet; the running step still ends by itself."""
        ordered = any(order.epoch == self.fence.epoch for order in self.replica.orders.values())
        if not ordered and not self._reports and not self._going_back:
            self._fail(self._issue(Problem.ABORTED, f"abandoned: {reason}"))
            self._giving_orders = False

    def asked(self, request: worker_pb2.WorkerRequest, now: float) -> worker_pb2.AgentReply | None:
        """Orders go out only while the engine installs, so a worker that comes late does nothing."""
        match request.WhichOneof("body"):
            case "want_install":
                return self._order(request, now)
            case "progress" if request.progress.fence == self.fence:
                self._progress[request.rank] = request.progress
                self._shown = max(self._shown, request.progress.stage)
                self._tell_progress()
                return acknowledged()
            case "installed" if request.installed.fence == self.fence:
                self._reports[request.rank] = request.installed
                return acknowledged()
        return None

    def _order(self, request: worker_pb2.WorkerRequest, now: float) -> worker_pb2.AgentReply | None:
        worker = next((worker for worker in self.install.workers if worker.rank == request.rank), None)
        if worker is None or not self._giving_orders or request.rank in self._reports or self._left(now) <= 0:
            return None
        self.replica.orders[request.rank] = Order(request.boot_id, self.fence.epoch)
        return worker_pb2.AgentReply(
            install=worker_pb2.InstallOrder(
                fence=self.fence,
                identity=self.install.identity,
                plan=self._blobs[worker.plan.digest],
                expected=self._blobs[worker.expected.digest],
                deadline_seconds=self._left(now),
            )
        )

    def engine_exited(self, reason: str, now: float) -> None:
        """Workers and weights are gone with it."""
        self._fail(self._issue(Problem.UNAVAILABLE, f"the engine ended during the install: {reason}"))
        self._quarantine(reason, now)

    # -- the end

    def _conclude_untouched(self, now: float) -> None:
        """Nothing was paused and nothing touched."""
        if self.replica.words.open and self.replica.untouched() and self.replica.engine is not None:
            self._conclude(manager_pb2.OLD_SERVING, now)
        else:
            self._quarantine(self.replica.closed_reason(), now)

    def _conclude_serving(self, now: float) -> None:
        """The engine was resumed; its workers have been looked at once more."""
        if self._all_new():
            self._conclude(manager_pb2.NEW_SERVING, now)
        elif self.replica.words.open and self.replica.untouched():
            self._fail(self._issue(Problem.INTERNAL, "the workers hold another version than the one installed"))
            self._conclude(manager_pb2.OLD_SERVING, now)
        else:
            self._quarantine(self.replica.closed_reason(), now)

    def _quarantine(self, reason: str, now: float) -> None:
        self._fail(self._issue(Problem.INTERNAL, f"closed: {reason}"))
        self._conclude(manager_pb2.QUARANTINED, now)

    def _conclude(self, outcome: manager_pb2.Outcome, now: float) -> None:
        new = outcome == manager_pb2.NEW_SERVING
        self._account(now)
        workers = [self._reports[rank].report for rank in sorted(self._reports)]
        answer = manager_pb2.ReplicaOutcome(
            replica=self.replica.name,
            fence=self.fence,
            outcome=outcome,
            problem=None if new else self._problem,
            before=self._before.identity,
            after=self.replica.words.identity,
            bytes=sum(report.bytes for report in workers),
            edges=[edge for rank in sorted(self._reports) for edge in self._reports[rank].edges],
            stages=self._stage_seconds(workers),
            sync_seconds=now - self._started,
            workers=workers,
        )
        if self._pause_started is not None:
            answer.pause_seconds = (now if self._pause_ended is None else self._pause_ended) - self._pause_started
        self.replica.last_outcome = answer
        self.replica.end()

    def _stage_seconds(self, workers: list[manager_pb2.WorkerReport]) -> list[manager_pb2.StageSeconds]:
        """The agent's own steps, and of what workers do side by side the slowest."""
        seconds = dict(self._seconds)
        if workers:
            seconds[manager_pb2.TRANSFER] = max(report.transfer_seconds for report in workers)
            seconds[manager_pb2.INSTALL] = max(report.install_seconds for report in workers)
            seconds[manager_pb2.VERIFY] = max(report.verify_seconds for report in workers)
        return [manager_pb2.StageSeconds(stage=stage, seconds=seconds[stage]) for stage in sorted(seconds)]

    # -- small things

    def _left(self, now: float) -> float:
        """Seconds for steps that may write; what is kept back for resuming is not among them."""
        return self._end - self._reserve - now

    def _fail(self, problem: Problem) -> None:
        """From now on there is no way to the new version but through the state words. The first reason is kept."""
        self._going_back = True
        if self._problem is None:
            self._problem = problem

    def _issue(self, code: weights_pb2.Problem.Code, message: str) -> Problem:
        return self.replica.problem(code, message)

    def _enter(self, stage: manager_pb2.Stage, now: float) -> None:
        self._account(now)
        self._stage = stage
        self._shown = max(self._shown, stage)
        self._tell_progress()

    def _account(self, now: float) -> None:
        """Counts the time since the last call to the stage that goes on."""
        self._seconds[self._stage] = self._seconds.get(self._stage, 0.0) + now - self._stage_started
        self._stage_started = now

    def _tell_progress(self) -> None:
        self.replica.session.send(
            manager_pb2.Progress(
                fence=self.fence,
                stage=self._shown,
                bytes_done=sum(progress.bytes_done for progress in self._progress.values()),
                bytes_total=sum(progress.bytes_total for progress in self._progress.values()),
            )
        )


def no_order(replica: Replica) -> worker_pb2.AgentReply:
    """For a worker that asks for an order when there is none."""
    return refusal(replica.problem(Problem.ABORTED, "no such order now: its update is over, or none was asked for"))
