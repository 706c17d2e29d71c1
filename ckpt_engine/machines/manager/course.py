"""Where one update is: its phase and when that ends, its timers and tasks, and what its callers are told meanwhile."""

from __future__ import annotations

from ckpt_engine.core.problems import deadline
from ckpt_engine.machines.events import Key, ManagerTask
from ckpt_engine.machines.manager.order import Order
from ckpt_engine.machines.manager.state import SHORTEST_SECONDS, State
from ckpt_engine.v1 import manager_pb2, weights_pb2

REFUSABLE = frozenset({"preparing", "planning", "sealing", "combining", "filling", "joining", "waiting", "leaving"})
"""Phases in which nothing was touched. While the intent is being recorded only the ledger can still refuse: the intent
may be on the disk already."""

SAID = {
    "waiting": "waiting for the installs of the update before it",
    "leaving": "looking whether a caller that has left is alive",
}
"""What phases are called whose names do not say it."""

TIMED = frozenset({"preparing", "sealing", "filling", "joining"})
"""Phases in which others are waited for, so that a timer of that name ends them."""


class Course:
    """Of one order. phase: one of REFUSABLE, then "recording", "installing", "reporting", "over". fence: for filling.
    started: when it began."""

    def __init__(self, state: State, order: Order) -> None:
        self.state = state
        self.order = order
        self.fence: weights_pb2.Fence = state.next_fill()
        self.phase = "preparing"
        self.started = 0.0
        self._phase_end = 0.0

    @property
    def refusable(self) -> bool:
        """Whether nothing was touched yet."""
        return self.phase in REFUSABLE

    @property
    def said(self) -> str:
        """What it does, for people."""
        return SAID.get(self.phase, self.phase)

    def describe(self, fence: weights_pb2.Fence) -> str:
        """What runs, for who must wait for it."""
        order = self.order
        what = "rollback" if order.back is not None else "update"
        what = what if order.late is None else f"bringing up {order.replicas[0]}: update"
        return f"{what} {fence.epoch} (version {order.version} of lineage {order.lineage!r}): {self.said}"

    def check(self, identity: weights_pb2.Identity, now: float) -> None:
        """Raises FAILED_PRECONDITION if the weights cannot be this version, DEADLINE_EXCEEDED if no time is left."""
        self.state.versions.check_number(identity, self.order.sealed)
        if self.order.end - self.state.deadlines.report <= now:
            raise deadline("no time was left to install when the weights were sealed")

    def start(self, now: float) -> None:
        """The first phase, and the timers of the whole."""
        self.started = now
        self.timer("end", self.order.end - self.state.deadlines.report / 2 - now)
        self.timer("resend", self.state.deadlines.resend)
        self.begin("preparing", self.state.deadlines.prepare, now)

    def begin(self, phase: str, seconds: float, now: float) -> None:
        """The next phase, which may take so long, and no longer than the order."""
        self.phase = phase
        end = self.order.end - self.state.deadlines.report
        self._phase_end = max(now + SHORTEST_SECONDS, min(now + seconds, end))
        if phase in TIMED:
            self.timer(phase, self._phase_end - now)
        self.tell(manager_pb2.UpdateProgress(stage=manager_pb2.PLAN, message=self.said))

    def left(self, now: float) -> float:
        """Seconds for a task of this phase."""
        return max(SHORTEST_SECONDS, self._phase_end - now)

    def over(self) -> None:
        """Nothing is left to do."""
        self.phase = "over"
        for step in ("end", "resend", *TIMED):
            self.cancel(step)

    def answer(self, report: manager_pb2.UpdateReport) -> None:
        """Gives all callers their report; nobody calls any more."""
        for call in self.order.calls.values():
            self.state.emit(call, manager_pb2.UpdateEvent(report=report))
            self.state.finish(call)
        self.order.calls.clear()

    def refuse(self, problem: weights_pb2.Problem) -> None:
        """Ends all calls with a problem."""
        for call in self.order.calls.values():
            self.state.finish(call, problem)
        self.order.calls.clear()

    def release(self) -> None:
        """Trainers may change their weights; what was sealed before held up nobody."""
        if self.order.sealed is None:
            for trainer in self.state.members.ranks(self.order.lineage).values():
                self.state.send(trainer, manager_pb2.Release(fence=self.fence))

    def progress(self, name: str, said: manager_pb2.Progress) -> None:
        """Tells all callers how far a replica is."""
        self.tell(
            manager_pb2.UpdateProgress(
                replica=name, stage=said.stage, bytes_done=said.bytes_done, bytes_total=said.bytes_total
            )
        )

    def tell(self, progress: manager_pb2.UpdateProgress) -> None:
        """Tells all callers."""
        for call in self.order.calls.values():
            self.state.emit(call, manager_pb2.UpdateEvent(progress=progress))

    def run(self, step: str, task: ManagerTask) -> None:
        """Starts a task of this update."""
        self.state.run(self._key(step), task)

    def timer(self, step: str, seconds: float) -> None:
        """Sets or replaces a timer of this update."""
        self.state.set_timer(self._key(step), seconds)

    def cancel(self, step: str) -> None:
        """Forgets it."""
        self.state.cancel_timer(self._key(step))

    def _key(self, step: str) -> Key:
        return ("update", self.fence.epoch, step)
