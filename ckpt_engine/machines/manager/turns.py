"""What was called and has not begun, of all kinds that are carried out as updates, and who waits for an update's end.

Decides which comes first: rollbacks, in the order of their calls, then the lineages whose ranks are gathered.
"""

from __future__ import annotations

from dataclasses import dataclass

from ckpt_engine.core.problems import CkptEngineError, aborted
from ckpt_engine.machines.events import Call, Done, Key, RollbackCall, UpdateCall, WaitCall
from ckpt_engine.machines.manager.gathers import Gathers
from ckpt_engine.machines.manager.order import Order
from ckpt_engine.machines.manager.publications import Publications
from ckpt_engine.machines.manager.rollbacks import Rollbacks
from ckpt_engine.machines.manager.state import State
from ckpt_engine.machines.manager.update import Update
from ckpt_engine.machines.manager.updates import Updates
from ckpt_engine.machines.manager.waits import Waits
from ckpt_engine.v1 import manager_pb2


@dataclass
class Turns:
    """updates: those that run."""

    state: State
    publications: Publications

    def __post_init__(self) -> None:
        self.updates = Updates(self.state, self._over)
        self.gathers = Gathers(self.state, self.publications)
        self.rollbacks = Rollbacks(self.state)
        self.waits = Waits(self.state)

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
        """Its caller has gone."""
        for each in (self.gathers, self.rollbacks, self.waits):
            each.cancelled(call)

    def look(self, settled: bool, now: float) -> None:
        """After every event: refuses what cannot begin, and lets those queue up that lack nothing any more."""
        self.gathers.look(settled, now)
        self.rollbacks.look(settled, [update.order for update in self.updates.all()], now)

    def next(self) -> str:
        """What begins next, for people; empty: nothing can. A rollback has nothing go on beside it."""
        lineage = self.gathers.next()
        return self.rollbacks.next() or ("" if lineage is None else f"update of lineage {lineage!r}")

    def may_begin(self) -> bool:
        """Whether what runs lets what is next begin."""
        return self.updates.running is None and (self.updates.before is None or not self.rollbacks.next())

    def begin(self) -> Order:
        """The turn of what `next` names has come."""
        if self.rollbacks.next():
            return self.rollbacks.begin()
        lineage = self.gathers.next()
        assert lineage is not None
        return self.gathers.begin(lineage)

    def timer(self, key: Key, now: float) -> None:
        """A timer of one of them fired."""
        match key:
            case ("gather", str() as step, str() as lineage):
                self.gathers.timer(step, lineage, now)
            case ("wait", int() as number):
                self.waits.timer(number, self.updates.all())
            case _:
                self.rollbacks.timer(key)

    def done(self, done: Done) -> None:
        """A task of one of them ended."""
        match done.key:
            case ("wait", int() as number):
                self.waits.found(number, done, self.updates.all())
            case _:
                self.rollbacks.done(done)

    def describe(self) -> str:
        """What waits, for people; empty if nothing does."""
        return " | ".join(filter(None, (self.rollbacks.describe(), self.gathers.describe())))

    def blobs(self) -> list[manager_pb2.BlobRef]:
        """Those that must stay for them."""
        return self.rollbacks.blobs()

    def _check_alone(self, lineage: str) -> None:
        """Of an update the ranks are in a call already; while replicas are brought back they may gather."""
        running = self.updates.running
        if running is not None and running.order.sealed is None and running.order.lineage == lineage:
            raise aborted(f"another update runs: {running.describe()}")

    def _over(self, update: Update) -> None:
        """It has ended."""
        self.waits.over(update)
