"""One install in one replica: pause, let the workers install, read their state words, resume, report the outcome.

It needs nothing of the manager once the plans are fetched. Every worker is ready before its engine pauses, or wakes
for the install (ready.py). Until a worker may have written (fetching an order counts as that), every failure leads
back: resume, old version, OLD_SERVING. After that only the state words count. All workers clean with the new version is
NEW_SERVING; anything else stays closed, QUARANTINED. Every step has a deadline, and a part of the install's time is
reserved for resuming.

The gate holds requests from before the engine is asked to pause (some engines take new requests in while they pause)
until it has resumed, or until the deadline of the install. After a quarantine the held requests are refused.

An install may have to wait for others: then it tells that its workers are ready, and goes on when the command comes
again without `waits`, or back at its deadline, and nothing was paused.

If the version has a probe, its questions follow once the engine serves (probe.py); the outcome waits for them.

Around an engine that sleeps (core/sleeping.py, `update_steps`) its weights are woken first, and its caches once the
words are whole, on every way out. What cannot be woken stays marked, so the gate stays closed, QUARANTINED; what was
woken is not put to sleep again. Once weights are awake the mark says that the rest is to follow. This agent, or the one
after it, wakes the rest as soon as some install has brought whole weights.
"""

from __future__ import annotations

from typing import ClassVar, cast

from ckpt_engine.core.probe import accepted_share
from ckpt_engine.core.sleeping import AWAKE, KV_CACHE, WEIGHTS, Sleeping, SleepStep
from ckpt_engine.core.version import Fence
from ckpt_engine.machines.agent.account import Account
from ckpt_engine.machines.agent.label import RETRY_SECONDS, LabellingOperation
from ckpt_engine.machines.agent.probe import STEPS, Probing
from ckpt_engine.machines.agent.ready import Readying, blobs_of, part_of, steps_around
from ckpt_engine.machines.agent.state import AgentReplica, FetchedOrder, acknowledged
from ckpt_engine.machines.events import (
    Done,
    FetchBlobs,
    InstallEngine,
    PauseEngine,
    ReadWords,
    ResumeEngine,
    WakeEngine,
    Words,
)
from ckpt_engine.v1 import manager_pb2, weights_pb2, worker_pb2

Problem = weights_pb2.Problem

LOOK_SECONDS = 1.0
"""Seconds between two looks whether a worker that brings into stage memory has been silent for too long, or no time is
left to wait for others."""


class Installing(LabellingOperation):
    """The install. It ends with a ReplicaOutcome in `replica.last_outcome`."""

    kind: ClassVar[str] = "install"

    def __init__(self, replica: AgentReplica, install: manager_pb2.Install) -> None:
        super().__init__(replica, install.fence)
        self.install = install
        self._account = Account(replica.session.clock)
        self._readying = Readying(replica, install, self._account.unopened)
        self._blobs: dict[bytes, bytes] = {}
        self._problem: Problem | None = None
        self._before = replica.words
        self._differences: list[manager_pb2.ScrubDifference] = []
        self._steps: tuple[SleepStep, ...] = ()
        self._marking = replica.sleeping
        self._going_back = self._giving_orders = self._holding = self._pending = False
        self._waits = install.waits  # for the word that it may pause its engine
        self._end = self._reserve = 0.0
        self._accepted = accepted_share(replica.guesses)  # under the version before
        self._scores: bytes | Problem = b""  # of the version's probe, or why there are none
        self._probing: Probing | None = None
        self._probe_began: float | None = None  # when the install itself had ended

    # -- steps

    def start(self, now: float) -> None:
        """Reads the workers' words first: what they hold now is what a failure goes back to."""
        self._account.begin(now)
        self._end = now + self.install.deadline_seconds
        self._reserve = min(self.replica.deadlines.resume, self.install.deadline_seconds / 4)
        self.run("before", ReadWords())

    def done(self, step: str, done: Done, now: float) -> None:
        """Takes the step after the one that ended."""
        if step in ("before", "not ready", "judge", "after", "probe words"):
            self.replica.take_words(
                cast(Words, done.result)
                if done.problem is None
                else Words((), False, f"the page of state words cannot be read: {done.problem.message}", None)
            )
        if self._probing is not None and step in STEPS:
            if self._probing.done(step, done, now):
                self._conclude_serving(now)
            else:
                self._account.steps += 1
                self._tell_progress()
            return
        match step:
            case "before":
                self._before, self._differences = self.replica.words, self.replica.differences
                self._fetch(now)
            case "fetch":
                self._fetched(done, now)
            case "fetch scores":
                self._scores = done.problem or cast(tuple[bytes, ...], done.result)[0]
                self._get_ready(now)
            case "ready" if self._readying.asks:
                self._all_ready(self._readying.ended(done, now, self._remaining(now)), now)
            case "not ready":
                self._conclude_untouched(now)
            case "hold":
                self._held(now)
            case "wake":
                self._woken(done, now)
            case "wake marked":
                self._wake_marked(done, now)
            case "pause":
                self._paused(done, now)
            case "install":
                self._installed(done, now)
            case "judge":
                self._judge(now)
            case "stamp":
                if self.labelled(done, now):
                    self._resume(now)
                else:
                    self.set_timer("retry", RETRY_SECONDS)
            case "rouse":
                self._roused(done, now)
            case "rouse marked":
                self._rouse_marked(done, now)
            case "resume":
                self._resumed(done, now)
            case "let in":
                # If it could not be written, the next look finds that requests wait for nothing.
                self._holding, self.replica.holding = False, done.problem is not None
                self.run("after", ReadWords())
            case "after":
                self._conclude_serving(now)
            case "close":
                self._conclude(manager_pb2.OUTCOME_QUARANTINED, now)

    def timer(self, step: str, now: float) -> None:
        """Looks whether the engine may be paused by now, or tries again what it refused a moment ago: its label, to
        wake its caches, or to resume."""
        if step == "pending":
            self._await_all_ready(now)
        else:
            self._resume(now)

    def _fetch(self, now: float) -> None:
        steps = steps_around(self.replica, self.install, self._remaining(now))
        if isinstance(steps, Problem):
            self._fail(steps)
        if self._going_back or isinstance(steps, Problem):
            self._conclude_untouched(now)
            return
        self._steps = steps
        self._refs = blobs_of(self.install)
        self.run("fetch", FetchBlobs(tuple(self._refs), min(self.replica.deadlines.blobs, self._remaining(now))))

    def _fetched(self, done: Done, now: float) -> None:
        if done.problem is not None:
            self._fail(done.problem)
        if self._going_back:
            self._get_ready(now)
            return
        self._blobs = dict(zip((ref.digest for ref in self._refs), cast(tuple[bytes, ...], done.result), strict=True))
        if self.install.HasField("probe"):  # now, since what comes needs nothing of the manager any more
            seconds = min(self.replica.deadlines.blobs, self._remaining(now))
            self.run("fetch scores", FetchBlobs((self.install.probe,), seconds))
        else:
            self._get_ready(now)

    def _get_ready(self, now: float) -> None:
        if self._remaining(now) <= 0:
            self._fail(self._issue(Problem.CODE_DEADLINE_EXCEEDED, "fetching the plan took all the time there was"))
        if self._going_back:
            self.run("not ready", ReadWords())  # a worker may have died meanwhile
        elif self._readying.unready():
            self._enter(manager_pb2.STAGE_READY, now)
            self.run("ready", self._readying.begin(self._remaining(now)))
        else:
            self._all_ready(None, now)

    def _all_ready(self, problem: Problem | None, now: float) -> None:
        """Has requests held if all workers are ready. If not, goes back: nothing was paused, and no worker has begun to
        write."""
        if problem is not None:
            self._fail(problem)
        if self._going_back:
            self.run("not ready", ReadWords())
        elif self._readying.bringing or self._waits:
            self._pending = True
            self._tell_progress()
            self.set_timer("pending", LOOK_SECONDS)
        else:
            self._hold(now)

    def _await_all_ready(self, now: float) -> None:
        """Goes on once every worker has brought what it can into its stage memory, and nothing else is waited for; or
        back if a worker cannot, or no time is left."""
        if not self._pending:
            return
        problem = self._readying.problem(now, self._remaining(now))
        if problem is None and (self._readying.bringing or self._waits):
            self.set_timer("pending", LOOK_SECONDS)
            return
        if problem is not None and self._is_ready and self._remaining(now) <= 0:
            message = "it was ready, and replicas that it is installed together with were not in time"
            problem = self._issue(Problem.CODE_DEADLINE_EXCEEDED, message)
        self._pending = False
        self._all_ready(problem, now)

    def go_on(self, now: float) -> None:
        """Takes the word that the engine may be paused as soon as its workers are ready."""
        self._waits = False
        self._await_all_ready(now)

    def _hold(self, now: float) -> None:
        self._holding = True
        self.run("hold", self.replica.hold(self.fence.epoch, self._end - now))

    def _held(self, now: float) -> None:
        """Goes on to wake or pause the engine, even if the hold was not written: the gate then refuses requests."""
        self._enter(manager_pb2.STAGE_QUIESCE, now)
        if self._calls_back(now):
            self._pause(now)
        elif self._going_back:
            self.run("judge", ReadWords())
        elif SleepStep.WAKE_WEIGHTS in self._steps:
            self.run("wake", WakeEngine((WEIGHTS,), self._remaining(now)))
        else:
            self._pause(now)

    def _woken(self, done: Done, now: float) -> None:
        if done.problem is not None:
            self._fail(done.problem)
            self._quarantine(f"the memory of its weights cannot be taken back: {done.problem.message}", now)
            return
        sleeping = self.replica.sleeping
        self._mark("wake marked", Sleeping(sleeping.level, sleeping.tags - {WEIGHTS}, rousing=True))

    def _wake_marked(self, done: Done, now: float) -> None:
        self._take_mark(done)
        if self._remaining(now) <= 0:
            self._fail(self._issue(Problem.CODE_DEADLINE_EXCEEDED, "waking the engine took all the time there was"))
        if self._going_back:
            self.run("judge", ReadWords())
        else:
            self._pause(now)

    def _pause(self, now: float) -> None:
        """Pauses the engine, also one that slept: some compute again as soon as they are awake. The caches of one that
        slept are lost in any mode."""
        mode = manager_pb2.PAUSE_MODE_UNSPECIFIED if self.replica.sleeping else self._pause_mode()
        self._account.pause_started = now
        self.replica.paused = None
        self.run("pause", PauseEngine(mode, min(self.replica.deadlines.quiesce, self._remaining(now))))

    def _pause_mode(self) -> manager_pb2.PauseMode:
        """The mode that the command names. Where a scrub has found a difference, requests that run have caches of
        weights that were not what they seemed, so they are ended if the engine can do that."""
        engine = self.replica.engine
        ends = engine is not None and manager_pb2.PAUSE_MODE_ABORT in engine.engine.pause_modes
        return manager_pb2.PAUSE_MODE_ABORT if self._differences and ends else self.install.pause_mode

    def _paused(self, done: Done, now: float) -> None:
        if done.problem is not None:
            self._fail(done.problem)
        else:
            self.replica.paused = True
            if self._remaining(now) <= 0:
                self._fail(
                    self._issue(Problem.CODE_DEADLINE_EXCEEDED, "pausing the engine took all the time there was")
                )
        if self._calls_back(now):
            self.run("install", InstallEngine(0, self._remaining(now)))
            return
        if self._going_back:
            self.run("judge", ReadWords())
            return
        self._enter(manager_pb2.STAGE_TRANSFER, now)
        self._giving_orders = True
        self.run("install", InstallEngine(self.fence.epoch, self._remaining(now)))

    def _installed(self, done: Done, now: float) -> None:
        self._giving_orders = False
        if done.problem is None:
            self.replica.accounted = True  # every worker has come back from whatever it did before
        for _, installed in sorted(self._account.reports.items()):
            if installed.report.HasField("problem"):
                self._fail(installed.report.problem)
        if done.problem is not None:
            self._fail(done.problem)
        self._enter(manager_pb2.STAGE_VERIFY, now)
        self.run("judge", ReadWords())

    def _judge(self, now: float) -> None:
        """Decides by the state words, whatever engine and workers said."""
        if self._all_new():
            self._enter(manager_pb2.STAGE_RESUME, now)
            self._resume(now)
        elif self.replica.untouched() and self.replica.words.open:
            self._fail(self._issue(Problem.CODE_INTERNAL, "the engine ended its install, but no worker has installed"))
            self._enter(manager_pb2.STAGE_RESUME, now)
            self._resume(now)
        else:
            self._quarantine(self.replica.closed_reason(), now)

    def _all_new(self) -> bool:
        return self.replica.all_hold(self.install.identity, self.fence.epoch)

    def _resume(self, now: float) -> None:
        """Sets the label, wakes the caches, resumes; called again until each is done or no time is left.

        The label comes first, since some engines compute as soon as they are awake. An engine that does not take it is
        resumed all the same, and the outcome says so.
        """
        remaining = self._end - now
        if remaining <= 0:
            self._quarantine("the engine could not be resumed in time; it is asked again", now)
        elif self.label(self._reserve, remaining):
            return
        elif self.replica.sleeping:
            self.replica.paused = None  # some engines resume by being woken
            self.run("rouse", WakeEngine((KV_CACHE,), remaining))
        else:
            self.run("resume", ResumeEngine(min(self.replica.deadlines.resume, remaining)))

    def _roused(self, done: Done, now: float) -> None:
        if done.problem is None:
            self._mark("rouse marked", AWAKE)
        else:
            self._retry_later(f"the engine does not wake its caches: {done.problem.message}", now)

    def _rouse_marked(self, done: Done, now: float) -> None:
        self._take_mark(done)
        if done.problem is None:
            self._resume(now)
        else:
            self._quarantine(self.replica.closed_reason(), now)

    def _resumed(self, done: Done, now: float) -> None:
        if done.problem is not None:
            self._retry_later(f"the engine does not resume: {done.problem.message}", now)
            return
        self.replica.paused = False
        self._account.pause_ended = now
        self.run("let in", self.replica.hold(0, 0.0))

    def _retry_later(self, reason: str, now: float) -> None:
        if self._end - now > RETRY_SECONDS:
            self.set_timer("retry", RETRY_SECONDS)
        else:
            self._quarantine(f"{reason}; it is asked again", now)

    # -- what comes from outside

    def repeated(self, now: float) -> None:
        """Answers a repeated command with the progress, so that the manager knows that the command arrived."""
        self._tell_progress()

    def overtaken(self, reason: str, now: float) -> None:
        """Abandons the install if no worker has fetched its order yet, and returns the engine to what it served.

        The running step ends first. The step that makes workers ready is stopped at once: it writes nothing, and a
        stopped worker would never answer."""
        if self._probing is not None:
            self._probing.fail(self._issue(Problem.CODE_ABORTED, f"the probe was cut short: {reason}"), now)
            self._conclude_serving(now)
        elif not self.replica.ordered(self.fence.epoch) and not self._account.reports and not self._going_back:
            self._fail(self._issue(Problem.CODE_ABORTED, f"abandoned: {reason}"))
            self._giving_orders = False
            if self._readying.stop() or self._pending:
                self._pending = False
                self.run("not ready", ReadWords())

    def reply_to(self, request: worker_pb2.WorkerRequest, now: float) -> worker_pb2.AgentReply | None:
        """Answers a worker. Orders are given only while the engine installs, so a worker that asks later gets none."""
        match request.WhichOneof("body"):
            case "want_prepare" | "ready":
                return self._readying.reply_to(request, self._blobs, now, self._remaining(now))
            case "early" if not self._going_back:
                reply = self._readying.reply_to(request, self._blobs, now, self._remaining(now))
                if reply is not None:
                    self._account.take_early(request.rank, request.early)
                    self._tell_progress()
                    if request.early.verified or request.early.HasField("problem"):
                        self._await_all_ready(now)
                return reply
            case "want_install":
                return self._order(request, now)
            case "progress" if Fence.of(request.progress.fence) == self.fence:
                self._account.take_progress(request.rank, request.progress)
                self._tell_progress()
                return acknowledged()
            case "installed" if Fence.of(request.installed.fence) == self.fence:
                self._account.installed(request.rank, request.installed, now)
                return acknowledged()
        return None

    def _order(self, request: worker_pb2.WorkerRequest, now: float) -> worker_pb2.AgentReply | None:
        worker = next((worker for worker in self.install.workers if worker.rank == request.rank), None)
        if (
            worker is None
            or not self._giving_orders
            or request.rank in self._account.reports
            or self._remaining(now) <= 0
        ):
            return None
        self.replica.orders[request.rank] = FetchedOrder(request.boot_id, self.fence.epoch)
        self._account.ordered(request.rank, now)
        return worker_pb2.AgentReply(
            install=worker_pb2.InstallOrder(
                fence=self.install.fence,
                identity=self.install.identity,
                plan=self._blobs[worker.plan.digest],
                expected=self._blobs[worker.expected.digest],
                deadline_seconds=self._remaining(now),
                collective=part_of(self.install, worker, self._blobs),
            )
        )

    def engine_exited(self, reason: str, now: float) -> None:
        """Quarantines: workers, weights and page ended with the engine."""
        self._holding = False
        self._fail(self._issue(Problem.CODE_UNAVAILABLE, f"the engine ended during the install: {reason}"))
        self._quarantine(reason, now)

    # -- the end

    def _conclude_untouched(self, now: float) -> None:
        """Ends an install that has touched nothing. A replica that was closed before is closed again."""
        replica = self.replica
        if self._calls_back(now) and replica.engine is not None and not replica.sleeping:
            self._hold(now)
            return
        whole = replica.engine is not None and replica.words.open and replica.untouched()
        if whole and not replica.sleeping and not replica.holding:
            self._conclude(manager_pb2.OUTCOME_OLD_SERVING, now)
        else:
            self._quarantine(replica.closed_reason() or "it has not resumed since an update before this one", now)

    def _conclude_serving(self, now: float) -> None:
        """Ends after the engine was resumed, by the words that were read since."""
        if self._all_new():
            self._conclude(manager_pb2.OUTCOME_NEW_SERVING, now)
        elif self.replica.words.open and self.replica.untouched():
            self._fail(self._issue(Problem.CODE_INTERNAL, "the workers hold another version than the one installed"))
            self._conclude(manager_pb2.OUTCOME_OLD_SERVING, now)
        else:
            self._quarantine(self.replica.closed_reason(), now)

    def _quarantine(self, reason: str, now: float) -> None:
        self._fail(self._issue(Problem.CODE_INTERNAL, f"closed: {reason}"))
        if self._holding:
            self.run("close", self.replica.hold(self.fence.epoch, 0.0, closed=self.replica.words.open))
        else:
            self._conclude(manager_pb2.OUTCOME_QUARANTINED, now)

    def _conclude(self, outcome: manager_pb2.Outcome, now: float) -> None:
        replica = self.replica
        if outcome == manager_pb2.OUTCOME_NEW_SERVING and self.install.HasField("probe") and self._probing is None:
            self._probe_began = now
            self._probing = Probing(replica, self._scores, self._accepted, self._end, self.run)
            if not self._probing.start(now):
                return
        problem = None if outcome == manager_pb2.OUTCOME_NEW_SERVING else self._problem
        held = self._before.identity, replica.words.identity
        served = now if self._probe_began is None else self._probe_began  # the probe's seconds are its own
        answer = self._account.outcome(replica.name, self.install.fence, outcome, problem, held, served)
        if self._probing is not None:
            answer.probe.CopyFrom(self._probing.answer)
        answer.label_problem = "" if outcome == manager_pb2.OUTCOME_QUARANTINED else replica.label_problem()
        answer.differences.extend(self._differences)
        replica.last_outcome = answer
        replica.end()

    # -- small things

    def _remaining(self, now: float) -> float:
        """Seconds left for steps that may write; the reserve for resuming is not among them."""
        return self._end - self._reserve - now

    def _calls_back(self, now: float) -> bool:
        """Whether this install goes back while a worker may still carry out an order of an earlier agent. Then the
        workers are called to an install without orders, since they come to it only when they are done."""
        return self._going_back and not self.replica.accounted and self._remaining(now) > 0

    def _fail(self, problem: Problem) -> None:
        """Notes a failure: from now on only the state words lead to the new version. The first reason stays."""
        self._going_back = True
        if self._problem is None:
            self._problem = problem

    def _mark(self, step: str, sleeping: Sleeping) -> None:
        self._marking = sleeping
        self.run(step, self.replica.mark(sleeping))

    def _take_mark(self, done: Done) -> None:
        if done.problem is None:
            self.replica.sleeping = self._marking
        else:
            self._fail(done.problem)

    def _issue(self, code: weights_pb2.Problem.Code, message: str) -> Problem:
        return self.replica.problem(code, message)

    def _enter(self, stage: manager_pb2.Stage, now: float) -> None:
        self._account.enter(stage, now)
        self._tell_progress()

    def _tell_progress(self) -> None:
        # Orders of an earlier agent are in no table of this one.
        ordered = not self.replica.accounted or self.replica.ordered(self.fence.epoch)
        goes_back = self._going_back and not self._giving_orders and not ordered
        self.replica.session.send(self._account.progress(self.install.fence, goes_back, self._is_ready))

    @property
    def _is_ready(self) -> bool:
        """Whether it waits for nothing but the word that the engine may be paused."""
        return self._pending and self._waits and not self._readying.bringing
