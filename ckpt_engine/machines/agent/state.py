"""What an agent knows of its replica, and the base of operations on the engine.

The engine is asked one thing at a time, so there is at most one operation: preparing, installing, resuming, or going
to sleep and waking. Sealing a directory for readers asks nothing of the engine and runs beside any of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar

from ckpt_engine.core.deadlines import Deadlines
from ckpt_engine.core.probe import EngineScores
from ckpt_engine.core.scrub import difference_words, present_differences
from ckpt_engine.core.sleeping import AWAKE, Sleeping
from ckpt_engine.core.version import Fence
from ckpt_engine.machines.events import (
    AgentCommand,
    AgentTask,
    Done,
    EngineReady,
    HoldRequests,
    MarkEngine,
    Run,
    SetTimer,
    Words,
)
from ckpt_engine.machines.session import Session
from ckpt_engine.v1 import manager_pb2, weights_pb2, worker_pb2

CLEAN = manager_pb2.WORKER_STATE_CLEAN
DIRTY = manager_pb2.WORKER_STATE_DIRTY
NO_WORDS = Words((), False, "no worker has started", None)


@dataclass
class FetchedOrder:
    """An install order that a worker has fetched and not yet accounted for. It may begin to write at any time."""

    boot_id: bytes
    epoch: int


@dataclass(frozen=True)
class ReadyWorker:
    """What a worker says that it has ready."""

    boot_id: bytes
    plans: frozenset[bytes]  # their digests
    stages: bool = False  # it brings what it can into stage memory before each install, and so is asked again


@dataclass
class AgentReplica:
    """One replica as its agent sees it. Dictionaries are by worker rank."""

    name: str
    mode: manager_pb2.Mode
    deadlines: Deadlines
    out: list[AgentCommand]  # commands of the event that is being taken
    session: Session = field(init=False)
    engine: EngineReady | None = None
    engine_reason: str = "the engine has not started"  # why there is no engine
    words: Words = NO_WORDS  # the workers' state, as last read
    guessed_before: manager_pb2.Guesses = field(default_factory=manager_pb2.Guesses)  # when the version came
    paused: bool | None = None  # None: unknown, since the call that would tell had no answer
    sleeping: Sleeping = AWAKE  # as marked in the engine's page, which the gate reads
    holding: bool = False  # its page has requests wait for an update, or refused since the engine has not resumed
    orders: dict[int, FetchedOrder] = field(default_factory=dict)
    accounted: bool = False  # False: an agent before this one may have given out orders that still count
    prepared: dict[int, manager_pb2.PreparedWorker] = field(default_factory=dict)  # what workers recorded last
    needs: dict[int, bytes] = field(default_factory=dict)  # the blobs of `prepared`
    ready: dict[int, ReadyWorker] = field(default_factory=dict)
    stage_memory: dict[int, str] = field(default_factory=dict)  # what workers say of it, if they have any
    scrubs: dict[int, manager_pb2.WorkerScrub] = field(default_factory=dict)  # as workers told them last
    models: dict[int, str] = field(default_factory=dict)  # what workers say of their models, as a part of a check's key
    last_outcome: manager_pb2.ReplicaOutcome | None = None
    probed: EngineScores | None = None  # what its engine answered to the last probe
    labelled: weights_pb2.Identity | None = None  # the version that the engine agreed to name; None: unknown
    label_reason: str = ""  # why it did not agree when it was told last
    label_again: float = 0.0  # when it is told again, if no operation goes on; monotonic seconds
    check_engine: str = "auto"  # --check-engine: "auto", "always" or "never"
    checked: bool = False  # whether this start of the engine has passed
    engine_check: str = ""  # the check's state, for people
    operation: Operation | None = None
    operations: int = 0  # how many were begun
    ended: list[Operation] = field(default_factory=list)  # of the event that is being taken

    def begin(self, operation: Operation, now: float) -> None:
        """Starts an operation; there must be none."""
        assert self.operation is None
        self.operations += 1
        operation.number = self.operations
        self.operation = operation
        operation.start(now)

    def end(self) -> None:
        """Ends the operation. What its tasks and timers still bring is ignored."""
        if self.operation is not None:
            self.ended.append(self.operation)
        self.operation = None

    def take_words(self, words: Words) -> None:
        """Stores what the page says, and drops orders that can no longer begin to write."""
        if words.identity != self.words.identity or words.guesses is None or self.words.guesses is None:
            self.guessed_before = words.guesses or manager_pb2.Guesses()
        self.words = words
        by_rank = {status.rank: status for status in words.workers}
        for rank, order in list(self.orders.items()):
            status = by_rank.get(rank)
            departed = status is None or status.boot_id != order.boot_id
            if departed or (status is not None and status.state == CLEAN and status.epoch == order.epoch):
                del self.orders[rank]

    def take_scrub(self, scrub: manager_pb2.WorkerScrub) -> bool:
        """Stores what a worker says of its scrub. Returns whether it has found a difference since."""
        before = self.scrubs.get(scrub.rank)
        count = before.differences if before is not None and before.boot_id == scrub.boot_id else 0
        self.scrubs[scrub.rank] = scrub
        return scrub.differences > count

    @property
    def scrubbing(self) -> list[manager_pb2.WorkerScrub]:
        """What the present workers say of their scrubs, by rank."""
        boots = {status.boot_id for status in self.words.workers}
        return [self.scrubs[rank] for rank in sorted(self.scrubs) if self.scrubs[rank].boot_id in boots]

    @property
    def differences(self) -> list[manager_pb2.ScrubDifference]:
        """What scrubs have found in what the workers hold, and because of which these are DIRTY."""
        return present_differences(self.scrubbing, self.words.workers)

    def account_for(self, rank: int, boot_id: bytes, epoch: int) -> None:
        """Drops an order that a worker has reported on: it will not act on it any more."""
        order = self.orders.get(rank)
        if order is not None and order.boot_id == boot_id and order.epoch <= epoch:
            del self.orders[rank]

    def ordered(self, epoch: int) -> bool:
        """Whether a worker may still act on an order of this epoch."""
        return any(order.epoch == epoch for order in self.orders.values())

    def all_hold(self, identity: weights_pb2.Identity, epoch: int) -> bool:
        """Whether every worker of the engine says that it holds this version since this epoch."""
        statuses, engine = self.words.workers, self.engine
        return (
            self.words.open
            and engine is not None
            and len(statuses) == engine.world_size
            and all(
                status.state == CLEAN and status.epoch == epoch and status.identity == identity for status in statuses
            )
        )

    def untouched(self) -> bool:
        """Whether no worker holds half of a version or may begin to write."""
        return self.accounted and not self.orders and all(status.state != DIRTY for status in self.words.workers)

    @property
    def asleep(self) -> bool:
        """Whether it sleeps on purpose, so that the manager does not bring it up unasked."""
        return self.sleeping.resting

    @property
    def staging(self) -> str:
        """What workers say of their stage memory, in one line; empty: they have none, or have said nothing yet."""
        words = sorted({text for text in self.stage_memory.values() if text})
        return "; ".join(words)

    @property
    def guesses(self) -> manager_pb2.Guesses | None:
        """What the engine's draft has guessed of the present version; None: it has none, or it is not counted."""
        counted, before = self.words.guesses, self.guessed_before
        if counted is None:
            return None
        return manager_pb2.Guesses(
            guessed=counted.guessed - before.guessed, accepted=counted.accepted - before.accepted
        )

    def mark(self, sleeping: Sleeping) -> MarkEngine:
        """The task that writes a mark. Callers set `sleeping` once it is done, or before if that is the safe side."""
        return MarkEngine(self.mode == manager_pb2.MODE_COLOCATED, sleeping)

    def hold(self, epoch: int, hold_seconds: float, closed: bool = False) -> HoldRequests:
        """The task that has requests wait `hold_seconds`, or lets them in; callers clear `holding` once they are in."""
        self.holding = True
        return HoldRequests(epoch, hold_seconds, closed)

    def serving(self) -> bool:
        """Whether requests are answered now."""
        return self.engine is not None and self.words.open and self.paused is False and not self.sleeping

    def closed_reason(self) -> str:
        """Why it is not serving; empty if it is."""
        if self.engine is None:
            return self.engine_reason
        if self.sleeping and (self.asleep or self.words.open):
            return self.sleeping.describe()
        if not self.words.open:
            return "; ".join(map(difference_words, self.differences)) or self.words.reason
        if self.orders:
            return f"worker {min(self.orders)} has not told what became of its install order"
        if not self.accounted:
            return "an install that an earlier agent began may still go on"
        if self.paused is not False:
            return "paused"
        return ""

    @property
    def mislabelled(self) -> bool:
        """Whether the engine would, or may, call its tokens by another version than its workers hold."""
        return self.engine is not None and self.words.identity not in (None, self.labelled)

    def label_problem(self) -> str:
        """Why tokens made now may be attributed to another version than that of their weights; empty: they are not."""
        held = self.words.identity
        if held is None or not self.mislabelled or not self.serving():
            return ""
        reason = self.label_reason or "it has not been told yet"
        return (
            f"do not trust the version that the engine itself names: it holds version {held.version} of "
            f"{held.lineage}, and whether it calls its tokens so is unknown ({reason})"
        )

    def problem(self, code: weights_pb2.Problem.Code, message: str) -> weights_pb2.Problem:
        """A problem of this replica."""
        return weights_pb2.Problem(code=code, message=message, replica=self.name)


class Operation(ABC):
    """Base of what takes several steps with the engine."""

    kind: ClassVar[str] = ""

    def __init__(self, replica: AgentReplica, fence: weights_pb2.Fence) -> None:
        self.replica = replica
        self.fence = Fence.of(fence)
        self.number = 0

    def run(self, step: str, task: AgentTask) -> None:
        """Starts a task; `done` is called with this step when it ends."""
        self.replica.out.append(Run(("operation", self.number, step), task))

    def set_timer(self, step: str, seconds: float) -> None:
        """Sets a timer; `timer` is called with this step when it fires, if the operation still goes on."""
        self.replica.out.append(SetTimer(("operation", self.number, step), seconds))

    @abstractmethod
    def start(self, now: float) -> None:
        """Takes the first step."""

    @abstractmethod
    def done(self, step: str, done: Done, now: float) -> None:
        """Goes on after a task of this operation has ended."""

    @abstractmethod
    def engine_exited(self, reason: str, now: float) -> None:
        """Ends, since there is no engine any more."""

    def timer(self, step: str, now: float) -> None:
        """Goes on after a timer of this operation has fired."""
        return

    def repeated(self, now: float) -> None:
        """Takes a repetition of the command that began it; the answer comes at the end."""
        return

    def overtaken(self, reason: str, now: float) -> None:
        """Goes back if that is possible, since the manager wants something else by now."""
        return

    def reply_to(self, request: worker_pb2.WorkerRequest, now: float) -> worker_pb2.AgentReply | None:
        """The answer to a worker. None: this operation has nothing for it."""
        return None


def acknowledged() -> worker_pb2.AgentReply:
    """The answer that a worker's message has arrived."""
    return worker_pb2.AgentReply(acknowledged=worker_pb2.Acknowledged())


def no_order(replica: AgentReplica) -> worker_pb2.AgentReply:
    """The answer to a worker that asks for an order when there is none."""
    message = "no such order now: its update is over, or none was asked for"
    return refusal(replica.problem(weights_pb2.Problem.CODE_ABORTED, message))


def refusal(problem: weights_pb2.Problem) -> worker_pb2.AgentReply:
    """The answer that tells the worker to do nothing."""
    return worker_pb2.AgentReply(refused=problem)
