"""The update that runs, and beside it the one before it, of which only the installs go on.

The callers of that one have returned, since relays hold its version. There are never more than these two: the intent of
the one waits for the end of the other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ckpt_engine.machines.events import Call, Done
from ckpt_engine.machines.manager.members import Member
from ckpt_engine.machines.manager.order import Order
from ckpt_engine.machines.manager.state import State
from ckpt_engine.machines.manager.update import Update
from ckpt_engine.v1 import manager_pb2


@dataclass
class Updates:
    """running: may still be refused, or has callers, or brings up a late replica. before: released, and not over.
    ended: called with each that is over."""

    state: State
    ended: Callable[[Update], None]
    running: Update | None = None
    before: Update | None = None

    def all(self) -> list[Update]:
        """Those that there are, in their order."""
        return [update for update in (self.before, self.running) if update is not None]

    def start(self, order: Order, now: float) -> None:
        """Begins one; there must be none that runs."""
        self.running = Update(self.state, order, self._over, self.before)
        self.running.start(now)

    def next(self, now: float) -> None:
        """After every event: lets the next one begin beside one that was released, and go on when that is over."""
        if self.running is not None and self.running.released and self.before is None:
            self.before, self.running = self.running, None
        if self.running is not None and self.before is None:
            self.running.before_over(now)

    def late(self) -> Update | None:
        """The one that brings up a late replica, if that is what goes on."""
        return self.running if self.running is not None and self.running.order.late is not None else None

    # -- what happens is told to both

    def message(self, member: Member, body: object, now: float) -> None:
        """Something that may carry a fence of theirs."""
        for update in self.all():
            update.message(member, body, now)

    def back(self, member: Member, now: float) -> None:
        """It said hello, or published."""
        for update in self.all():
            update.member_back(member, now)

    def lost(self, member: Member, now: float) -> None:
        """Its session ended without a goodbye."""
        for update in self.all():
            update.member_lost(member, now)

    def gone(self, member: Member, now: float) -> None:
        """It will not come back."""
        for update in self.all():
            update.member_gone(member, now)

    def outrun(self) -> None:
        """Members have seen higher epochs."""
        for update in self.all():
            update.outrun()

    def cancelled(self, call: Call) -> None:
        """A caller has gone."""
        for update in self.all():
            for rank in [rank for rank, other in update.order.calls.items() if other == call]:
                update.caller_left(rank)

    def timer(self, epoch: int, step: str, now: float) -> None:
        """A timer of the one with this fill fence."""
        for update in self.all():
            if update.fence.epoch == epoch:
                update.timer(step, now)

    def done(self, epoch: int, step: str, done: Done, now: float) -> bool:
        """A task of the one with this fill fence ended; whether there is one."""
        found = [update for update in self.all() if update.fence.epoch == epoch]
        for update in found:
            update.done(step, done, now)
        return bool(found)

    def _over(self, update: Update) -> None:
        if update is self.before:
            self.before = None
        else:
            self.running = None
        late, refusal = update.order.late, update.refusal
        if late is not None and refusal is not None and not update.cut:
            told = manager_pb2.NotBrought(identity=late, reason=refusal.message)
            self.state.send_to(update.order.replicas[0], told)
        self.ended(update)
