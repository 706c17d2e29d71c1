"""Where one update is: its phase and when that ends, its timers and tasks, and what its callers are told meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, StrEnum, auto

from ckpt_engine.core.names import in_pool
from ckpt_engine.core.problems import CkptEngineError, deadline
from ckpt_engine.core.version import Fence, Version
from ckpt_engine.machines.events import Key, ManagerTask
from ckpt_engine.machines.manager.claims import Claim
from ckpt_engine.machines.manager.goal import Goal
from ckpt_engine.machines.manager.state import SHORTEST_SECONDS, ManagerState
from ckpt_engine.v1 import manager_pb2, weights_pb2


class Phase(StrEnum):
    """What an update does, in the order in which that comes; also what a timeline calls it."""

    PREPARING = auto()
    PLANNING = auto()
    SEALING = auto()
    COMBINING = auto()
    QUEUEING = auto()  # for relays
    FILLING = auto()  # of relays
    JOINING = auto()  # of what relays hold, until there are plans that read from them
    WAITING = auto()  # for the update before it
    LEAVING = auto()  # of a caller, which may be dead
    RECORDING = auto()  # the intent
    INSTALLING = auto()
    REPORTING = auto()
    OVER = auto()


REFUSABLE = frozenset(Phase) - {Phase.RECORDING, Phase.INSTALLING, Phase.REPORTING, Phase.OVER}
"""Phases in which nothing was touched. While the intent is being recorded only the ledger can still refuse: the intent
may be on the disk already."""

ACTIVITIES = {
    Phase.QUEUEING: "waiting for relays that an update of another pool uses",
    Phase.WAITING: "waiting for the installs of the update before it",
    Phase.LEAVING: "looking whether a caller that has left is alive",
}
"""Words for phases with names that do not say enough."""

TIMED = frozenset({Phase.PREPARING, Phase.SEALING, Phase.QUEUEING, Phase.FILLING, Phase.JOINING})
"""Phases that wait for members, so that a timer ends them."""


class CourseTimer(Enum):
    """Timers of an update as a whole."""

    END = auto()  # of its time
    HALF = auto()  # of its time for preparing
    RESEND = auto()  # of what was not answered
    SILENCE = auto()  # of installs; set again by each message that tells something new


@dataclass(frozen=True, slots=True)
class PhaseEnd:
    """The timer that ends one of the TIMED phases."""

    phase: Phase


@dataclass(frozen=True, slots=True)
class UpdateTimer:
    """Key of a timer of one update."""

    number: int  # of the update
    step: Key  # which of its timers: a value of the part that set it


@dataclass(frozen=True, slots=True)
class UpdateTask:
    """Key of a task of one update."""

    number: int  # of the update
    step: Key  # which of its tasks: a value of the part that runs it


class Course:
    """The course of one update: its phase and that one's end, its timers and tasks, and what its callers are told."""

    def __init__(self, state: ManagerState, goal: Goal) -> None:
        self.state = state
        self.goal = goal
        self.fence = state.next_fill()  # for preparing and sealing
        self.number = self.fence.epoch
        ranks = state.members.ranks(goal.lineage)
        self.sessions = {rank: trainer.session_id for rank, trainer in ranks.items()}  # of the processes that seal
        self.relay_fence = self.fence  # for filling relays; a later one if they were told a higher one meanwhile
        self.phase = Phase.PREPARING
        self.started = 0.0  # monotonic seconds
        self.cut = ""  # why it was cut short, for people; empty: it was not
        self.released = False  # its callers have returned, and its installs go on without them
        self.awaited: dict[Phase, Callable[[], list[str]]] = {}  # the names of what a phase waits for, for people
        self.timeline = manager_pb2.Timeline()  # of what has happened until now
        self.not_finite: dict[str, manager_pb2.Sealed] = {}  # by source, answers that named NaN or infinity
        self._phase_end = 0.0

    @property
    def refusable(self) -> bool:
        """Whether nothing was touched yet."""
        return self.phase in REFUSABLE

    @property
    def activity(self) -> str:
        """What it does now, for people."""
        return ACTIVITIES.get(self.phase, self.phase)

    def waiting_for(self) -> list[str]:
        """The members that it waits for now, named for people; empty: none, or only a task of the manager's own."""
        return self.awaited[self.phase]() if self.phase in self.awaited else []

    def describe(self, fence: Fence) -> str:
        """One line for blocked callers: what runs, and what it does now. fence: under which people know it."""
        goal = self.goal
        what = "rollback" if goal.is_rollback else "update"
        what = f"dry run of {what}" if goal.dry_run else what
        what = f"bringing up {goal.replicas[0]}: update" if goal.is_attempt else what
        where = f", {in_pool(goal.pool)}" if goal.pool else ""
        return f"{what} {fence.epoch} (version {goal.version} of lineage {goal.lineage!r}{where}): {self.activity}"

    def refusal(self, identity: Version, now: float) -> weights_pb2.Problem | None:
        """Why the weights cannot be installed as this version: it cannot be that one, or no time is left."""
        try:
            self.state.versions.check_number(identity, self.goal.sealed)
        except CkptEngineError as error:
            return error.problem
        if self.goal.end - self.state.deadlines.report <= now:
            return deadline("no time was left to install when the weights were sealed").problem
        return None

    def start(self, now: float) -> None:
        """Begins the first phase, and sets the timers of the whole update."""
        self.started = self.timeline.began = now
        if self.goal.called is not None:
            self.note("gathering", self.goal.called)
        self.timer(CourseTimer.END, self.goal.end - self.state.deadlines.report / 2 - now)
        self.timer(CourseTimer.RESEND, self.state.deadlines.resend)
        self.begin(Phase.PREPARING, self.state.deadlines.prepare, now)

    def begin(self, phase: Phase, seconds: float, now: float) -> None:
        """Begins the next phase, which may take `seconds`, and no longer than the goal."""
        self.phase = phase
        self.note(phase, now)
        end = self.goal.end - self.state.deadlines.report
        self._phase_end = max(now + SHORTEST_SECONDS, min(now + seconds, end))
        if phase in TIMED:
            self.timer(PhaseEnd(phase), self._phase_end - now)
        if phase is Phase.PREPARING:
            self.timer(CourseTimer.HALF, (self.goal.end - now) / 2)
        self.tell(manager_pb2.UpdateProgress(stage=manager_pb2.STAGE_PLAN, message=self.activity))

    def claim(self, claim: Claim) -> bool:
        """Claims holders, to give them orders under `relay_fence`. False: others have them; it asks again later."""
        claims = self.state.claims
        if not claims.ask(self.number, claim):
            return False
        if claims.obeyed(claim.orders) > self.relay_fence.epoch:
            if not self.state.epoch_ready():
                return False
            self.relay_fence = self.state.next_fill()
        claims.fences |= dict.fromkeys(claim.orders, self.relay_fence.epoch)
        return True

    @property
    def waits(self) -> bool:
        """Whether it waits for holders that other jobs have."""
        return bool(self.state.claims.in_the_way(self.number))

    def extend_claim(self, relays: frozenset[str]) -> None:
        """Extends the claim to these relays, of which none is `blocked`."""
        self.state.claims.extend(self.number, relays, self.relay_fence.epoch)

    def blocked(self, keeps: Version | None) -> set[str]:
        """Relays that it cannot fill in addition: another job has them, or they obey a higher fence by now."""
        claims = self.state.claims
        higher = {name for name, fence in claims.fences.items() if fence > self.relay_fence.epoch}
        return claims.blocked(self.number, keeps) | higher

    def note(self, phase: str, now: float) -> None:
        """Adds a phase to the timeline: it began at `now`, and the phase before it has ended."""
        self.timeline.phases.add(name=phase, after=now - self.started)

    def remaining(self, now: float) -> float:
        """Seconds left for a task of this phase."""
        return max(SHORTEST_SECONDS, self._phase_end - now)

    def end(self) -> None:
        """Ends the course: nothing is left to do."""
        self.phase = Phase.OVER
        for step in (*CourseTimer, *map(PhaseEnd, TIMED)):
            self.cancel(step)

    def answer(self, report: manager_pb2.UpdateReport) -> None:
        """Ends all calls with the report."""
        for call in self.goal.calls.values():
            self.state.emit(call, manager_pb2.UpdateEvent(report=report))
            self.state.finish(call)
        self.goal.calls.clear()

    def refuse(self, problem: weights_pb2.Problem) -> None:
        """Ends all calls with a problem."""
        for call in self.goal.calls.values():
            if self.goal.adapts and problem.kept:
                self.state.emit(call, manager_pb2.UpdateEvent(refusal=problem))
            self.state.finish(call, problem)
        self.goal.calls.clear()

    def release(self) -> None:
        """Tells trainers that they may change their weights, once; what was sealed before held none of them up."""
        ranks = self.state.members.ranks(self.goal.lineage).values() if self.goal.held is None else ()
        for trainer in () if self.released else ranks:
            self.state.send(trainer, manager_pb2.Release(fence=self.fence.message()))
        self.released = True

    def progress(self, name: str, progress: manager_pb2.Progress) -> None:
        """Tells all callers how far a replica is."""
        self.tell(
            manager_pb2.UpdateProgress(
                replica=name, stage=progress.stage, bytes_done=progress.bytes_done, bytes_total=progress.bytes_total
            )
        )

    def tell(self, progress: manager_pb2.UpdateProgress) -> None:
        """Sends progress to all callers."""
        for call in self.goal.calls.values():
            self.state.emit(call, manager_pb2.UpdateEvent(progress=progress))

    def run(self, step: Key, task: ManagerTask) -> None:
        """Starts a task of this update."""
        self.state.run(UpdateTask(self.number, step), task)

    def timer(self, step: Key, seconds: float) -> None:
        """Sets or replaces a timer of this update."""
        self.state.set_timer(UpdateTimer(self.number, step), seconds)

    def cancel(self, step: Key) -> None:
        """Cancels a timer of this update."""
        self.state.cancel_timer(UpdateTimer(self.number, step))
