"""What the parts of the manager's machine share: members, epochs, the order of versions, and the commands to emit.

There are two kinds of fences, and no command carries both. A *fill* fence is for preparing and sealing: it is given out
when an update begins, from epochs that are spent ahead. An *install* fence is for installing and sleeping: that of an
update is given out with its intent, the durable decision, and not before. None is spent ahead: a manager that does not
lead any more may still have epochs, and must not order an install with one. So sealing the next version may overlap the
installs of this one, and neither invalidates the other. Both kinds take their epochs from one count, so an epoch names
one fence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from google.protobuf.message import Message as ProtobufMessage

from ckpt_engine.core.deadlines import Deadlines
from ckpt_engine.core.problems import precondition
from ckpt_engine.core.version import Fence, Version
from ckpt_engine.machines.events import (
    Call,
    CancelTimer,
    EmitEvent,
    FinishCall,
    Key,
    ManagerCommand,
    ManagerTask,
    OperatorHold,
    Run,
    Send,
    SetTimer,
    SpendEpoch,
)
from ckpt_engine.machines.manager.claims import Claims
from ckpt_engine.machines.manager.deploy import Deployment
from ckpt_engine.machines.manager.members import Member, Members
from ckpt_engine.machines.manager.versions import Commits, Versions
from ckpt_engine.v1 import manager_pb2, weights_pb2

SHORTEST_SECONDS = 0.001
SPENT_AHEAD = 2
"""Epochs that are made durable at once: those of an update's two fences."""


@dataclass(frozen=True, slots=True)
class EpochSpending:
    """Key of the task that makes epochs durable."""


@dataclass(frozen=True, slots=True)
class EpochRetry:
    """Key of the timer after which a ledger that could not be written is tried again."""


@dataclass
class ManagerState:
    """Shared by the manager's parts; each changes only what it is about."""

    members: Members
    deadlines: Deadlines
    out: list[ManagerCommand]  # commands of the event that is being taken
    epoch: int  # the last one that was given out, of either kind of fence
    installs: int  # the last epoch of an install that may have begun
    spent: int  # up to here the ledger never gives out an epoch again; some are spent ahead, to not wait for the disk
    versions: Versions = field(default_factory=Versions)  # and what each replica is to hold
    spending: int = 0  # up to here epochs are being spent; 0: none are
    ledger_problem: weights_pb2.Problem | None = None  # why the last write to the ledger failed; None: it did not
    # By lineage, the makeup of a collective that ended well, and the communicator that its members keep.
    communicators: dict[str, tuple[object, bytes]] = field(default_factory=dict)
    claims: Claims = field(default_factory=Claims)  # of jobs on holders
    blames: dict[str, int] = field(default_factory=dict)  # by replica, failed collectives in a row that are its fault
    pipelines: int = 0  # how many were made
    holds: dict[str, OperatorHold] = field(default_factory=dict)  # by replica; `operators` changes them
    # By number, those whose replicas are on the way to their target, or back; `deployments` changes them.
    deployments: dict[int, Deployment] = field(default_factory=dict)

    @classmethod
    def from_ledger(
        cls,
        cluster: str,
        epoch: int,
        deadlines: Deadlines,
        commits: Commits | None = None,
        highest: Sequence[Version] = (),
        identities: Sequence[Version] = (),
    ) -> ManagerState:
        """The state with which a manager begins."""
        state = cls(Members(cluster), deadlines, [], epoch, epoch, epoch)
        state.versions = Versions.from_ledger(commits or Commits(), highest, identities)
        return state

    # -- epochs

    def spend_ahead(self) -> None:
        """Has the next epochs made durable, unless some are left or are being written."""
        if self.spent <= self.epoch and not self.spending:
            self.spending = self.epoch + SPENT_AHEAD
            self.run(EpochSpending(), SpendEpoch(self.spending, self.deadlines.ledger))

    def spend_ended(self, problem: weights_pb2.Problem | None) -> None:
        """Takes the result of making epochs durable; a failure is tried again in a moment."""
        if problem is None:
            self.spent, self.ledger_problem = max(self.spent, self.spending), None
        else:
            self.ledger_problem = problem
            self.set_timer(EpochRetry(), self.deadlines.resend)
        self.spending = 0
        if problem is None:
            self.spend_ahead()  # epochs may have been skipped meanwhile

    def epoch_ready(self) -> bool:
        """Whether `next_fill` may be called."""
        return self.spent > self.epoch

    def check_ledger(self) -> None:
        """Raises FAILED_PRECONDITION while the ledger cannot be written: what begins now could not be recorded."""
        if self.ledger_problem is not None:
            raise precondition(
                "the ledger cannot be written, so nothing is begun and no replica was touched: "
                + self.ledger_problem.message
            )

    def next_fill(self) -> Fence:
        """A fill fence above all fences before it."""
        assert self.epoch_ready()
        self.epoch += 1
        self.spend_ahead()
        return self.fence(self.epoch)

    def next_install(self) -> Fence:
        """The install fence of the intent, the sleep or the wake that comes next, above all fences before it. Nothing
        is ordered with it before it is spent: recording an intent does that."""
        self.epoch += 1
        return self.fence(self.epoch)

    def intent_ended(self, fence: Fence) -> None:
        """Notes that an install fence's epoch is spent on the disk, and its intent, if it has one, with it."""
        self.spent, self.installs = max(self.spent, fence.epoch), max(self.installs, fence.epoch)

    def fence(self, epoch: int) -> Fence:
        """The fence of this cluster and epoch."""
        return Fence(self.members.cluster, epoch)

    def deployment_of(self, name: str) -> Deployment | None:
        """The deployment of which a replica is in a wave; None: there is none."""
        return next((row for row in self.deployments.values() if name in row.in_waves), None)

    def undecided(self, pool: str, lineage: str) -> str:
        """The undecided deployment that calls for this pool or lineage wait for, for people; empty: there is none."""
        rows = (row for row in self.deployments.values() if row.meets(pool, lineage))
        return next((f"deployment {row.number} to be decided (`ckpt-engine deploy status`)" for row in rows), "")

    # -- commands

    def send(self, member: Member, body: ProtobufMessage) -> None:
        """Sends a message, or drops it if the member is not connected. The caller repeats what must arrive."""
        if member.peer is not None:
            self.out.append(Send(member.peer, body))

    def send_to(self, name: str, body: ProtobufMessage) -> bool:
        """Sends a message to the replica of this name. Returns whether it is connected; if not, drops the message."""
        replica = self.members.replicas.get(name)
        if replica is None or replica.peer is None:
            return False
        self.send(replica, body)
        return True

    def run(self, key: Key, task: ManagerTask) -> None:
        """Starts a task."""
        self.out.append(Run(key, task))

    def set_timer(self, key: Key, seconds: float) -> None:
        """Sets or replaces a timer, for SHORTEST_SECONDS at least: after no time, in floats, its moment might not have
        come."""
        self.out.append(SetTimer(key, max(SHORTEST_SECONDS, seconds)))

    def cancel_timer(self, key: Key) -> None:
        """Cancels a timer."""
        self.out.append(CancelTimer(key))

    def emit(self, call: Call, event: manager_pb2.UpdateEvent) -> None:
        """Sends an event to a caller of UpdateWeights."""
        self.out.append(EmitEvent(call, event))

    def finish(self, call: Call, problem: weights_pb2.Problem | None = None) -> None:
        """Ends a call."""
        self.out.append(FinishCall(call, problem))
