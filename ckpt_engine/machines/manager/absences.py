"""Decides how long an update waits for members that are away, and how it goes on without them.

A rank that is lost during the update gets a lease to come back. So does a replica, counted from when it was last heard,
even if that was before the update began, but never more than half of the time that the update has left. A replica is
back when its agent is connected and has found the engine. One that stays away is left out, with a reason.

When a rank does not come back, leaves its call, or offers other weights before the intent, its weights may change from
then on. Before relays are filled that refuses the update. Afterwards the sealed record and the relays suffice: the
update goes on with what relays hold or are still being filled with, and the trainer is not read any more. Replicas
that were to read it keep what they serve, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ckpt_engine.core.problems import CkptEngineError, unavailable
from ckpt_engine.machines.events import Key
from ckpt_engine.machines.manager.course import Course
from ckpt_engine.machines.manager.goal import Goal
from ckpt_engine.machines.manager.members import Holder, Member, MemberId, Replica, TrainerRank, member_id, speaker
from ckpt_engine.machines.manager.recipients import Recipients
from ckpt_engine.machines.manager.state import ManagerState
from ckpt_engine.machines.manager.update_relays import UpdateRelays
from ckpt_engine.v1 import weights_pb2

LEFT_SECONDS = 0.5
"""Wait after a call was cancelled: a rank that has died has lost its session by then, too."""


@dataclass(frozen=True, slots=True)
class MemberAbsent:
    """The timer of an update that ends waiting for a lost member."""

    member: MemberId


@dataclass(frozen=True, slots=True)
class CallerAbsent:
    """The timer of an update after which it checks whether a rank lives that has cancelled its call."""

    rank: int


class Absences:
    """The absences during one update. timer, cancel: set and cancel a timer of the update, by its step."""

    def __init__(
        self,
        state: ManagerState,
        goal: Goal,
        recipients: Recipients,
        timer: Callable[[Key, float], None],
        cancel: Callable[[Key], None],
    ) -> None:
        self._state = state
        self._goal = goal
        self._recipients = recipients
        self._timer = timer
        self._cancel = cancel
        self._overdue: set[str] = set()  # replicas that it does not wait for any more

    def concerns(self, member: Member) -> bool:
        """Whether a member takes part in the update."""
        if isinstance(member, Replica):
            return member.name in self._goal.replicas
        sources = self._goal.published.sources
        if isinstance(member, Holder):
            return any(source.source == member.source for source in sources)
        is_read = self._goal.sealed is None or any(source.rank == member.rank for source in sources)
        return member.lineage == self._goal.lineage and is_read

    def lost(self, member: Member, now: float) -> None:
        """Gives a member some time to come back, since its stream has just ended."""
        if isinstance(member, Replica):
            self._wait_for(member, self._patience(member, now))
        else:
            self._timer(MemberAbsent(member_id(member)), self._state.deadlines.lease)

    def note_return(self, member: Member) -> None:
        """Notes that a member is connected again."""
        if not isinstance(member, Replica) or member.engine is not None:
            self._cancel(MemberAbsent(member_id(member)))
        if isinstance(member, Replica) and member.engine is not None:
            self._recipients.awaited.discard(member.name)
            self._overdue.discard(member.name)

    def overdue(self, absent: MemberAbsent) -> Member | None:
        """The member that has stayed away until its timer fired; None: it is back, or forgotten."""
        member = self._state.members.get(absent.member)
        if member is None or _is_there(member):
            return None
        if isinstance(member, Replica):
            self._overdue.add(member.name)
        return member

    def begin(self, names: Iterable[str], now: float) -> None:
        """Waits for replicas that may come back, and leaves out those that have been away for too long."""
        for name in names:
            replica = self._state.members.replicas.get(name)
            if replica is None:
                self._recipients.leave_out(name, unavailable("it is not registered any more", replica=name).problem)
            elif replica.peer is None or (name in self._recipients.awaited and replica.engine is None):
                patience = self._patience(replica, now)
                if patience > 0 and name not in self._overdue:
                    self._wait_for(replica, patience)
                else:
                    self._recipients.leave_out(name, not_there(replica, now).problem)

    def leave_out(self, replica: Replica, now: float) -> None:
        """Excludes a replica that did not come back in time or will not come back, unless it already has an outcome."""
        if self._recipients.outcome(replica.name) is None:
            problem = not_there(replica, now).problem
            if self._recipients.is_ordered(replica.name):
                problem.message = f"it was lost while installing: {problem.message}"
            self._recipients.leave_out(replica.name, problem)

    def _wait_for(self, replica: Replica, seconds: float) -> None:
        self._recipients.awaited.add(replica.name)
        self._timer(MemberAbsent(member_id(replica)), seconds)

    def _patience(self, replica: Replica, now: float) -> float:
        """Seconds for which the update still waits for it; 0 or less: it does not wait."""
        return min(replica.heard + self._state.deadlines.lease - now, (self._goal.end - now) / 2)


def _is_there(member: Member) -> bool:
    return member.peer is not None and (not isinstance(member, Replica) or member.engine is not None)


def not_there(replica: Replica, now: float) -> CkptEngineError:
    """The problem of a registered replica without a connected agent, or with one that has not found its engine."""
    if replica.peer is not None:
        return unavailable("its agent is connected, and has not found its engine yet", replica=replica.name)
    identity = replica.identity
    holds = f"its engine may still serve {identity}" if identity is not None else "it held no version then"
    return unavailable(
        f"its agent is not connected and was heard last {now - replica.heard:.1f} s ago; {holds}. Start its agent "
        f"again, or forget it with `ckpt-engine replica evict {replica.name}`",
        replica=replica.name,
    )


class Ranks:
    """Decides how one update goes on when its ranks or other sources cancel, come back or are lost."""

    def __init__(self, course: Course, refuse: Callable[[weights_pb2.Problem], None]) -> None:
        """refuse: ends the update with a problem."""
        self._course = course
        self._goal = course.goal
        self._refuse = refuse
        self.relays: UpdateRelays | None = None
        # Ranks that cancelled their call and may be dead. While there are any, no intent is recorded.
        self.undecided: set[int] = set()
        # Ranks that cancelled their call after the intent, and still run: their weights may change.
        self.departed: set[int] = set()

    def caller_left(self, rank: int) -> None:
        """Handles a cancelled call. Only `timer`, a little later, knows whether the rank died or meant to cancel.

        If the version was sealed before the call, the caller is not a rank, so no source was lost."""
        del self._goal.calls[rank]
        if self._goal.sealed is not None:
            if self._course.refusable:
                self._refuse(unavailable("the call was cancelled").problem)
        elif not self._course.refusable or self._drop_trainer(_cancelled(rank)):
            self.undecided |= {rank} if self._course.refusable else set()
            self._course.timer(CallerAbsent(rank), LEFT_SECONDS)

    def timer(self, rank: int) -> None:
        """Decides about a rank some time after its call was cancelled.

        If its process is connected, it meant to cancel, and its weights may change from now on. The weights of a dead
        rank do not change, and a rank that only lost its connection comes back."""
        self.undecided.discard(rank)
        trainer = self._course.state.members.ranks(self._goal.lineage).get(rank)
        if trainer is None or trainer.peer is None:
            return
        if self._course.refusable:
            self._refuse(_cancelled(rank))
        else:
            self._leaves(trainer)

    def note_return(self, trainer: TrainerRank) -> None:
        """Handles a rank's hello or publication: it may have cancelled its call, or may offer other weights."""
        if not self._course.refusable and trainer.rank not in self._goal.calls:
            self._leaves(trainer)
        tables = {source.rank: source.table for source in self._goal.published.sources}
        if self._goal.sealed is None and trainer.table != tables.get(trainer.rank):
            did = "took back what it had published" if trainer.table is None else "published another table"
            self._drop_trainer(_problem(trainer, f"rank {trainer.rank} {did} while {self._course.phase}"))

    def drop(self, member: TrainerRank | Holder, alive: bool) -> None:
        """Goes on without a source that will not come back, or refuses the update. alive: the source was connected, and
        said goodbye or was evicted."""
        if alive and isinstance(member, TrainerRank) and not self._course.refusable:
            self._leaves(member)
        self._drop_trainer(_problem(member, f"{speaker(member)} is gone while {self._course.phase}"))

    def _leaves(self, trainer: TrainerRank) -> None:
        """Notes that a rank runs and no longer waits for the update, so its weights may change."""
        if self._goal.sealed is None and trainer.session_id == self._course.sessions.get(trainer.rank):
            self.departed.add(trainer.rank)

    def _drop_trainer(self, problem: weights_pb2.Problem) -> bool:
        """Goes on without the trainer if relays suffice, else refuses the update. Returns whether it goes on."""
        if not self._course.refusable:
            return False
        goes_on = self.relays is not None and self.relays.give_up_trainer(problem)
        if not goes_on:
            self._refuse(problem)
        return goes_on


def _cancelled(rank: int) -> weights_pb2.Problem:
    return unavailable(f"the call of rank {rank} was cancelled", ranks=(rank,)).problem


def _problem(member: TrainerRank | Holder, why: str) -> weights_pb2.Problem:
    return unavailable(why, ranks=(member.rank,) if isinstance(member, TrainerRank) else ()).problem
