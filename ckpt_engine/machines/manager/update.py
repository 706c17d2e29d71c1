"""One update that runs: prepare, plan, seal, combine, record the intent, install, report.

Until the intent is being recorded every failure refuses it, and no replica has been touched. From then on it always
ends with an outcome for every replica, at its deadline at the latest. The same steps bring a late replica to the latest
version (`order.late`); then there is no caller. Whatever was sealed before (`order.sealed`) its sources only digest.

Every message that somebody must act on is sent again until it is answered, and at once when its receiver comes back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from ckpt_engine.core.problems import CkptEngineError, deadline, unavailable
from ckpt_engine.machines.events import Combined, CombineSeals, Compiled, CompilePlans, Done, ManagerTask, RecordOutcome
from ckpt_engine.machines.manager.absences import Absences
from ckpt_engine.machines.manager.members import Member, Replica, Trainer, speaker
from ckpt_engine.machines.manager.order import Order
from ckpt_engine.machines.manager.report import build_report
from ckpt_engine.machines.manager.sealing import Sealing
from ckpt_engine.machines.manager.state import SHORTEST_SECONDS, State
from ckpt_engine.machines.manager.targets import Targets
from ckpt_engine.v1 import manager_pb2, weights_pb2

Problem = weights_pb2.Problem

REFUSABLE = frozenset({"preparing", "planning", "sealing", "combining"})
"""Phases in which nothing was touched. While the intent is being recorded only the ledger can still refuse: the intent
may be on the disk already."""


class Update:
    """Runs one order. over: called once, when nothing is left to do.

    phase: one of REFUSABLE, then "recording", "installing", "reporting", "over". cut: why it was cut short, if it was.
    fence: for filling. installs: the fence of its intent; None before that is decided. report, refusal: how it ended.
    """

    def __init__(self, state: State, order: Order, over: Callable[[], None]) -> None:
        self.state = state
        self.order = order
        self.fence = state.next_fill()
        self.installs: weights_pb2.Fence | None = None
        self.phase = "preparing"
        self.cut = ""
        self._over = over
        self._targets = Targets(state, order, self.fence)
        self._absences = Absences(state, order, self._targets, self._timer, self._cancel)
        self._compiled: Compiled | None = None
        self._sealing: Sealing | None = None
        self._combined: Combined | None = None
        self._identity: weights_pb2.Identity | None = None
        self.report: manager_pb2.UpdateReport | None = None
        self.refusal: Problem | None = None
        self._prepared_again = False
        self._started = self._install_started = 0.0

    # -- for the manager's machine

    def describe(self) -> str:
        """What runs, for who must wait for it."""
        what = "update" if self.order.back is None else "rollback"
        what = what if self.order.late is None else f"bringing up {self.order.replicas[0]}: update"
        version = f"version {self.order.version} of lineage {self.order.lineage!r}"
        return f"{what} {(self.installs or self.fence).epoch} ({version}): {self.phase}"

    def blobs(self) -> list[manager_pb2.BlobRef]:
        """Blobs that members may fetch for it, or that it still needs."""
        refs = self._targets.blobs()
        if self._compiled is not None:
            refs += [*self._compiled.plans.values(), *self._compiled.atoms.values()]
        if self._sealing is not None:
            refs += self._sealing.digests().values()
        if self._combined is not None:
            refs += self._combined.expected.values()
            refs += [self._combined.record] if self._combined.record is not None else []
        return refs + ([self.order.record] if self.order.record is not None else [])

    def under_way(self) -> tuple[list[str], weights_pb2.Identity | None]:
        """Whom it writes to or is about to, and what: from the intent on, until each has an outcome."""
        return (self._targets.waiting_for() if self.phase in ("recording", "installing") else []), self._identity

    def start(self, now: float) -> None:
        """Takes the first step."""
        self._started = now
        self._timer("end", self.order.end - self.state.deadlines.report / 2 - now)
        self._timer("resend", self.state.deadlines.resend)
        self._begin_phase("preparing", self.state.deadlines.prepare, now)
        self._absences.begin(self.order.replicas, now)
        self._send_missing(now)

    def cut_short(self, reason: str, now: float) -> None:
        """Ends as soon as that is safe: something more important waits. Only for late replicas."""
        self.cut = reason
        if self.phase in REFUSABLE:
            self._refuse(Problem(code=Problem.ABORTED, message=reason))
        elif self.phase == "installing":
            self._targets.abandon(reason)

    def outrun(self) -> None:
        """Members have seen higher epochs than the ledger had: they would not obey this one."""
        if self.phase in REFUSABLE:
            self._refuse(unavailable("the ledger was rolled back, and epochs are skipped: try again").problem)

    def caller_left(self, rank: int) -> None:
        """A rank's call was cancelled: before the intent its weights may change now, after it that will be noticed."""
        del self.order.calls[rank]
        if self.phase in REFUSABLE:
            self._refuse(unavailable(f"the call of rank {rank} was cancelled", ranks=(rank,)).problem)

    # -- members come and go

    def member_lost(self, member: Member, now: float) -> None:
        """It gets some time to come back."""
        if self._absences.concern(member):
            self._absences.lost(member, now)

    def member_back(self, member: Member, now: float) -> None:
        """It said hello again, or published: it gets what it may have missed."""
        if not self._absences.concern(member):
            return
        self._absences.back(member)
        if isinstance(member, Trainer):
            tables = {source.rank: source.table for source in self.order.published.sources}
            if self.order.sealed is None and self.phase in REFUSABLE and member.table != tables.get(member.rank):
                message = f"rank {member.rank} published another table while {self.phase}"
                self._refuse(unavailable(message, ranks=(member.rank,)).problem)
        elif isinstance(member, Replica) and member.last_outcome is not None:
            self.message(member, member.last_outcome, now)
        self._send_missing(now)

    def member_gone(self, member: Member, now: float) -> None:
        """It said goodbye, was replaced by another process, or did not come back in time."""
        if not self._absences.concern(member):
            return
        if isinstance(member, Replica):
            self._lose_replica(member, now)
        elif self.phase in REFUSABLE:
            ranks = (member.rank,) if isinstance(member, Trainer) else ()
            self._refuse(unavailable(f"{speaker(member)} is gone while {self.phase}", ranks=ranks).problem)

    def _not_back(self, step: str, now: float) -> None:
        """A lost member had its time to come back."""
        member = self._absences.not_back(step)
        if isinstance(member, Replica):
            self._lose_replica(member, now)
        elif member is not None:
            self.member_gone(member, now)

    def _lose_replica(self, replica: Replica, now: float) -> None:
        if self.phase in ("preparing", "installing"):
            self._absences.leave_out(replica, now)
            self._go_on(now)

    # -- messages, results and timers

    def message(self, member: Member, body: object, now: float) -> None:
        """Something of a member that carries a fence; other fences than this one's are of the past."""
        problem = None
        match body:
            case manager_pb2.Prepared() if isinstance(member, Replica) and body.fence == self.fence:
                if self.phase == "preparing":
                    self._targets.take_prepared(member, body)
            case manager_pb2.Sealed() if body.fence == self.fence:
                if self.phase == "sealing" and self._sealing is not None:
                    problem = self._sealing.take(body)
            case manager_pb2.ReplicaOutcome() if isinstance(member, Replica) and body.fence == self.installs:
                if self.phase == "installing":
                    self._targets.take_outcome(body, member.name)
            case manager_pb2.Progress() if isinstance(member, Replica) and body.fence == self.installs:
                progress = manager_pb2.UpdateProgress(
                    replica=member.name, stage=body.stage, bytes_done=body.bytes_done, bytes_total=body.bytes_total
                )
                self._tell(progress)
        if problem is not None:
            self._refuse(problem)
        else:
            self._go_on(now)

    def done(self, step: str, done: Done, now: float) -> None:
        """A task of this update ended."""
        if step == "report":
            self._end()
        elif step == "plan" and done.problem is not None and self._prepare_again(done.problem, now):
            return
        elif done.problem is not None:
            if step == "intent" and not done.answered and self._identity is not None:
                # It may be on the disk all the same, and what is there counts after a restart: its number is taken.
                self.state.versions.take_number(self._identity)
            self._refuse(done.problem)
        elif step == "plan":
            self._compiled = cast(Compiled, done.result)
            self._targets.take_unplanned(self._compiled.unfit)
            if self._too_few():
                return
            self._begin_phase("sealing", self.state.deadlines.seal, now)
            self._sealing = Sealing(self.state, self.order, self.fence, self._compiled)
            self._send_missing(now)
        elif step == "combine":
            self._combined = cast(Combined, done.result)
            self._decide_identity(self._combined.root, now)
        elif step == "intent" and self.installs is not None:
            self.state.intent_ended(self.installs)
            self._install(now)

    def _prepare_again(self, problem: Problem, now: float) -> bool:
        """Once: a hello may name blobs that its sender stored with a manager which died in that moment."""
        if problem.code != Problem.NOT_FOUND or self._prepared_again:
            return False
        self._prepared_again = True
        self._targets.prepare_again()
        self._begin_phase("preparing", self.state.deadlines.prepare, now)
        self._send_missing(now)
        return True

    def timer(self, step: str, now: float) -> None:
        """A timer of this update fired."""
        if step == "resend":
            self._timer("resend", self.state.deadlines.resend)
            self._send_missing(now)
        elif step == "end":
            self._out_of_time(now)
        elif step == self.phase:
            self._phase_over(now)
        elif step.startswith("lost "):
            self._not_back(step, now)

    # -- from phase to phase

    def _send_missing(self, now: float) -> None:
        """Sends again what has not been answered."""
        left = max(SHORTEST_SECONDS, self._phase_end - now)
        if self.phase == "preparing":
            self._targets.prepare(left)
        elif self.phase == "sealing" and self._sealing is not None:
            self._sealing.send(left)
        elif self.phase == "installing":
            assert self._identity is not None
            assert self._compiled is not None
            assert self._combined is not None
            self._targets.install(self._identity, self._compiled, self._combined, left)
            if self.cut:
                self._targets.abandon(self.cut)
        self._go_on(now)

    def _go_on(self, now: float) -> None:
        """To the next phase, if all answers of this one are there."""
        if self.phase == "preparing" and not self._targets.unprepared():
            self._plan(now)
        elif self.phase == "sealing" and self._sealing is not None and not self._sealing.missing():
            assert self._compiled is not None
            self._begin_phase("combining", self.state.deadlines.plan, now)
            digests = self._sealing.digests()
            self._run("combine", CombineSeals(self.order.published, self._compiled, digests, self._left(now)))
        elif self.phase == "installing" and not self._targets.waiting_for():
            self._finish(now)

    def _plan(self, now: float) -> None:
        if self._too_few():
            return
        self._begin_phase("planning", self.state.deadlines.plan, now)
        sealed, workers = self.order.sealed, self._targets.workers()
        root = b"" if sealed is None else sealed.root
        self._run("plan", CompilePlans(self.order.published, workers, self._left(now), self.order.record, root))

    def _too_few(self) -> bool:
        """Whether the update is refused since those that are left are not enough."""
        problem = self._targets.too_few()
        if problem is None or self.order.late is not None:
            self._targets.remember_unfit()
        if problem is not None:
            self._refuse(problem)
        return problem is not None

    def _decide_identity(self, root: bytes, now: float) -> None:
        """The root is known: is this the version that it says it is, and who lacks it?"""
        order = self.order
        identity = weights_pb2.Identity(lineage=order.lineage, version=order.version, root=root)
        try:
            self.state.versions.check_number(identity, order.sealed)
        except CkptEngineError as error:
            self._refuse(error.problem)
            return
        if order.end - self.state.deadlines.report <= now:
            self._refuse(deadline("no time was left to install when the weights were sealed").problem)
        else:
            self._identity, self.installs = identity, self.state.next_install()
            self._targets.decided(self.installs, identity)
            self._begin_phase("recording", self.state.deadlines.ledger, now)
            self._run("intent", self.state.versions.intent(self.installs.epoch, identity, order, self._left(now)))

    def _install(self, now: float) -> None:
        """The intent is on the disk: from here on there is no refusing."""
        assert self._identity is not None
        assert self.installs is not None
        self.state.versions.take_number(self._identity)
        record = None if self._combined is None else self._combined.record
        self.state.versions.begin(self._identity, self.installs.epoch, self.order, record)
        self._install_started = now
        if self.cut:
            for name in self._targets.waiting_for():
                self._targets.leave_out(name, Problem(code=Problem.ABORTED, message=self.cut))
        self._absences.begin(self._targets.waiting_for(), now)
        self._begin_phase("installing", self.order.end - now, now)
        self._send_missing(now)

    def _finish(self, now: float) -> None:
        assert self._identity is not None
        assert self.installs is not None
        self.phase = "reporting"
        self.report = build_report(
            self.installs,
            self._identity,
            self.order,
            self._targets.outcomes,
            seconds=now - self._started,
            planning=self._install_started - self._started,
        )
        # Callers wait for this, and the update has kept no more than that back; a disk that hangs changes no outcome.
        self._run("report", RecordOutcome(self.report, self.state.deadlines.report))

    # -- time

    def _begin_phase(self, phase: str, seconds: float, now: float) -> None:
        self.phase = phase
        end = self.order.end - self.state.deadlines.report
        self._phase_end = max(now + SHORTEST_SECONDS, min(now + seconds, end))
        if phase in ("preparing", "sealing"):
            self._timer(phase, self._phase_end - now)
        self._tell(manager_pb2.UpdateProgress(stage=manager_pb2.PLAN, message=phase))

    def _left(self, now: float) -> float:
        """Seconds for a task of this phase."""
        return max(SHORTEST_SECONDS, self._phase_end - now)

    def _phase_over(self, now: float) -> None:
        """Somebody was silent too long."""
        if self.phase == "preparing":
            for name in self._targets.unprepared():
                message = f"its engine's loader was not recorded within {now - self._started:.1f} s"
                self._targets.leave_out(name, deadline(message, replica=name).problem)
            self._go_on(now)
        elif self.phase == "sealing" and self._sealing is not None:
            self._refuse(self._sealing.overdue(now - self._started))

    def _out_of_time(self, now: float) -> None:
        seconds = now - self._started
        if self.phase in REFUSABLE:
            self._refuse(deadline(f"the update was still {self.phase} after {seconds:.1f} s").problem)
        elif self.phase == "installing":
            for name in self._targets.waiting_for():
                message = f"no outcome within {seconds:.1f} s; its agent goes on by itself"
                self._targets.leave_out(name, deadline(message, replica=name).problem)
            self._go_on(now)

    # -- the end

    def _refuse(self, problem: Problem) -> None:
        self.refusal = problem
        for call in self.order.calls.values():
            self.state.finish(call, problem)
        self._release()

    def _end(self) -> None:
        assert self.report is not None
        for call in self.order.calls.values():
            self.state.emit(call, manager_pb2.UpdateEvent(report=self.report))
            self.state.finish(call)
        self._release()

    def _release(self) -> None:
        """Trainers may change their weights; of a late replica's sources nothing was held up."""
        self.phase = "over"
        for step in ("end", "resend", "preparing", "sealing"):
            self._cancel(step)
        if self.order.sealed is None:
            for trainer in self.state.members.ranks(self.order.lineage).values():
                self.state.send(trainer, manager_pb2.Release(fence=self.fence))
        self._over()

    # -- small things

    def _tell(self, progress: manager_pb2.UpdateProgress) -> None:
        for call in self.order.calls.values():
            self.state.emit(call, manager_pb2.UpdateEvent(progress=progress))

    def _run(self, step: str, task: ManagerTask) -> None:
        self.state.run(self._key(step), task)

    def _timer(self, step: str, seconds: float) -> None:
        self.state.set_timer(self._key(step), seconds)

    def _cancel(self, step: str) -> None:
        self.state.cancel_timer(self._key(step))

    def _key(self, step: str) -> tuple[str, int, str]:
        return ("update", self.fence.epoch, step)
