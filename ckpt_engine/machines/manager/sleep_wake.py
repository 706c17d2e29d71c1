"""One Sleep or Wake call: tells every replica that it names, and waits for the answers.

It spends the epoch of its install fence first, of its own: none of an install is spent ahead, so that a manager that no
longer leads can order nothing new.
"""

from __future__ import annotations

from dataclasses import dataclass

from ckpt_engine.core.deadlines import check_seconds
from ckpt_engine.core.names import in_pool
from ckpt_engine.core.problems import deadline, precondition, unavailable
from ckpt_engine.core.version import Fence
from ckpt_engine.machines.events import Call, Done, FinishCall, SleepCall, SpendEpoch, WakeCall
from ckpt_engine.machines.manager.goal import Goal
from ckpt_engine.machines.manager.members import Replica
from ckpt_engine.machines.manager.state import ManagerState
from ckpt_engine.machines.manager.update_options import check_named
from ckpt_engine.v1 import manager_pb2, weights_pb2


@dataclass(frozen=True, slots=True)
class SleepWakeEnd:
    """Key of the timer that ends one call."""

    epoch: int  # of its fence; 0: it is being spent


@dataclass(frozen=True, slots=True)
class SleepWakeResend:
    """Key of the timer after which replicas that have not answered are told again."""

    epoch: int  # of its fence


@dataclass(frozen=True, slots=True)
class SleepWakeSpending:
    """Key of the task that spends the epoch of one call's fence."""

    epoch: int


class SleepWakeCall:
    """Runs one call. Raises at construction: NOT_FOUND for an unknown replica, INVALID_ARGUMENT for one of
    another pool or for an impossible timeout, FAILED_PRECONDITION for a pool without replicas."""

    def __init__(self, state: ManagerState, event: SleepCall | WakeCall, now: float) -> None:
        request = event.request
        check_named(state.members, request.replicas, request.pool)
        if request.timeout_seconds:
            check_seconds("a timeout", request.timeout_seconds)
        self.state = state
        self.call: Call | None = event.call
        self.wake = isinstance(event, WakeCall)
        self.fence = Fence()
        self._next_fence = Fence()  # that is being spent
        self.finished = False
        replicas = state.members.replicas.items()
        self.pool = request.pool
        self._names = sorted(set(request.replicas) or (name for name, each in replicas if each.pool == request.pool))
        if not self._names and state.members.replicas:
            pools = " and ".join(sorted({in_pool(each.pool) for _, each in replicas}))
            raise precondition(
                f"no replica is {in_pool(request.pool)}; there are some {pools}: give the call that pool"
            )
        self._results: dict[str, manager_pb2.SleepWakeResult] = {}
        self._seconds = request.timeout_seconds or state.deadlines.sleep_wake
        self._end = now + self._seconds
        self._level = event.request.level if isinstance(event, SleepCall) else 0
        self._tags = tuple(event.request.tags) if isinstance(event, WakeCall) else ()

    def meets(self, goal: Goal) -> bool:
        """Whether the call and an update wait for each other: they are for one pool, or for one replica."""
        return self.pool == goal.pool or not set(self._names).isdisjoint(goal.replicas)

    def installs(self, name: str) -> int:
        """The highest install epoch that a replica may be welcomed with, as `Updates.installs`."""
        return self.fence.epoch if name in self._names and self.fence.epoch else self.state.installs

    def describe(self) -> str:
        """One line for blocked callers: what runs."""
        return f"{'waking' if self.wake else 'putting to sleep'} {', '.join(self._names)}"

    def start(self, now: float) -> None:
        """Has the epoch of its fence spent, once. Ends if the call was cancelled before that."""
        if self._next_fence.epoch or self.finished:
            return
        if self.call is None:
            self.finished = True
            return
        self._next_fence = self.state.next_install()
        self.state.set_timer(SleepWakeEnd(0), self._end - now)
        epoch = self._next_fence.epoch
        self.state.run(SleepWakeSpending(epoch), SpendEpoch(epoch, self.state.deadlines.ledger))

    def spent(self, done: Done, now: float) -> None:
        """Takes the end of spending: tells all replicas. Ends if that failed, or the call has ended meanwhile."""
        if done.key != SleepWakeSpending(self._next_fence.epoch) or self.finished:
            return
        self.state.cancel_timer(SleepWakeEnd(0))
        if self.call is None:
            self.finished = True
            return
        if done.problem is not None:
            self.finished = True
            message = f"the ledger cannot be written, so no replica was touched: {done.problem.message}"
            self.state.finish(self.call, precondition(message).problem)
            return
        self.fence = self._next_fence
        self.state.intent_ended(self.fence)
        self.state.set_timer(SleepWakeEnd(self.fence.epoch), self._end - now)
        self.state.set_timer(SleepWakeResend(self.fence.epoch), self.state.deadlines.resend)
        for name in self._names:
            replica = self.state.members.replicas.get(name)
            if replica is None or replica.peer is None:
                self._result(name, unavailable("it is not connected", replica=name).problem)
        self.send_missing(now)
        self._when_done()

    def send_missing(self, now: float) -> None:
        """Sends the command, again, to replicas that have not answered."""
        if not self.fence.epoch:
            return
        for name in self._names:
            replica = self.state.members.replicas.get(name)
            if name not in self._results and replica is not None:
                command = manager_pb2.SleepWake(
                    fence=self.fence.message(),
                    wake=self.wake,
                    level=self._level,
                    tags=self._tags,
                    deadline_seconds=max(0.001, self._end - now - self._seconds / 10),
                )
                self.state.send(replica, command)

    def answer(self, replica: Replica, body: manager_pb2.SleepWakeDone) -> None:
        """Takes a replica's answer: it has done it, or cannot. One that sleeps is known to at once, not from its next
        heartbeat on: an attempt for it may wait for the end of this call."""
        if Fence.of(body.fence) == self.fence and replica.name in self._names and replica.name not in self._results:
            replica.asleep |= not self.wake and not body.HasField("problem")
            self._result(replica.name, body.problem if body.HasField("problem") else None)
            self._when_done()

    def lost(self, name: str) -> None:
        """Notes that a replica's agent was lost; its result is unknown."""
        if name in self._names and name not in self._results:
            self._result(name, unavailable("its agent was lost", replica=name).problem)
            self._when_done()

    def timer(self, key: SleepWakeEnd | SleepWakeResend, now: float) -> None:
        """Takes a timer: sends again, or ends the call. A timer of another call is ignored."""
        if key.epoch != self.fence.epoch:
            return
        if isinstance(key, SleepWakeResend):
            self.state.set_timer(key, self.state.deadlines.resend)
            self.send_missing(now)
            return
        for name in self._names:
            if name not in self._results:
                self._result(
                    name, deadline(f"its agent did not answer within {self._seconds:g} s", replica=name).problem
                )
        self._when_done()

    def _result(self, name: str, problem: weights_pb2.Problem | None) -> None:
        self._results[name] = manager_pb2.SleepWakeResult(replica=name, problem=problem)

    def _when_done(self) -> None:
        if self.finished or len(self._results) < len(self._names):
            return
        self.finished = True
        self.state.cancel_timer(SleepWakeEnd(self.fence.epoch))
        self.state.cancel_timer(SleepWakeResend(self.fence.epoch))
        if self.call is not None:
            results = [self._results[name] for name in self._names]
            response = (
                manager_pb2.WakeResponse(results=results) if self.wake else manager_pb2.SleepResponse(results=results)
            )
            self.state.out.append(FinishCall(self.call, response=response))
