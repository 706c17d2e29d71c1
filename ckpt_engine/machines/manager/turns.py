"""What was called and has not begun, of all kinds that are carried out as updates, and what waits for an update's end.

Decides which comes first: rollbacks, in the order of their calls, then the lineages whose ranks are gathered. What
meets nothing that goes on, and nothing before it in this order, begins.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ckpt_engine.core.problems import CkptEngineError, aborted
from ckpt_engine.machines.events import Call, Done, Key, RollbackCall, UpdateCall, WaitCall
from ckpt_engine.machines.manager.gather import GatherEnd, Gathers, SessionsAbsent
from ckpt_engine.machines.manager.goal import Coming, Goal
from ckpt_engine.machines.manager.holdings import Holdings
from ckpt_engine.machines.manager.publications import Publications
from ckpt_engine.machines.manager.report import Corrections
from ckpt_engine.machines.manager.rollbacks import RollbackEnd, Rollbacks
from ckpt_engine.machines.manager.state import State
from ckpt_engine.machines.manager.update import Update
from ckpt_engine.machines.manager.updates import Updates
from ckpt_engine.machines.manager.waits import ReportSearch, WaitEnd, Waits


@dataclass
class Turns:
    """Takes calls about updates, and decides which update or rollback begins next.

    updates: those that run.
    """

    state: State
    publications: Publications
    holdings: Holdings

    def __post_init__(self) -> None:
        self.updates = Updates(self.state, self._over)
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
        """Forgets a call whose caller has gone."""
        for each in (self.gathers, self.rollbacks, self.waits):
            each.cancelled(call)

    def heard(self, name: str) -> None:
        """A replica has told something of itself: a report that knew less is told anew."""
        replica = self.state.members.replicas.get(name)
        if replica is not None:
            self.corrections.look(replica)

    def look(self, settled: bool, may: Callable[[Goal], bool], now: float) -> None:
        """After every event: refuses what cannot begin, and lets those queue up that lack nothing any more. may: see
        `begin`."""
        self.gathers.look(settled, now)
        self.rollbacks.look(settled, [update.goal for update in self.updates.all()], now)
        claims = {each.call: self.updates.claim(each.goal) for each in self._next(may) if each.call is not None}
        self.state.admission.reserve(claims)

    def coming(self) -> list[Coming]:
        """What lacks nothing and has not begun, in the order of its turns."""
        return [*self.rollbacks.coming(), *self.gathers.coming()]

    def begin(self, may: Callable[[Goal], bool], now: float) -> bool:
        """Begins the next one; whether one could. may: whether one may, for all that this does not know of."""
        for coming in self._next(may):
            if self.updates.lets(coming.goal, coming.call):
                coming.begin()
                self.updates.start(coming.goal, now, coming.call)
                return True
        return False

    def _next(self, may: Callable[[Goal], bool]) -> list[Coming]:
        """Those whose turn it is, but for the holders that they need."""
        passed: list[Goal] = []
        found = []
        for coming in self.coming():
            if not any(map(coming.goal.meets, passed)) and self.updates.passes(coming.goal) and may(coming.goal):
                found.append(coming)
            passed.append(coming.goal)
        return found

    def timer(self, key: Key, now: float) -> None:
        """A timer of one of them fired."""
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
        """A task of one of them ended."""
        match done.key:
            case ReportSearch(number):
                self.waits.found(number, done, self.updates.all())
            case _:
                raise AssertionError(f"a task of nothing that waits: {done.key}")

    def describe(self) -> str:
        """What waits, for people; empty if nothing does."""
        return " | ".join(filter(None, (self.rollbacks.describe(), self.gathers.describe())))

    def _check_alone(self, lineage: str) -> None:
        """Refuses a second call: of an update the ranks are in a call already. While replicas are brought back they may
        gather."""
        for running in self.updates.all():
            if not running.released and running.goal.sealed is None and running.goal.lineage == lineage:
                raise aborted(f"another update runs: {running.describe()}")

    def _over(self, update: Update) -> None:
        """It has ended."""
        self.waits.over(update)
        if update.report is not None and update.goal.is_attempt and not update.guessed:
            for outcome in update.report.replicas:
                self.corrections.brought(outcome)
        elif update.report is not None:
            self.corrections.over(update.report, update.goal.min_replicas, update.guessed)
            for name in update.guessed:
                self.heard(name)
