"""What the parts of the manager's machine share: members, epochs, the order of versions, and the way out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from google.protobuf.message import Message as ProtobufMessage

from ckpt_engine.core.deadlines import Deadlines
from ckpt_engine.core.machines.events import (
    Call,
    CancelTimer,
    EmitEvent,
    FinishCall,
    Key,
    ManagerCommand,
    ManagerTask,
    Run,
    Send,
    SetTimer,
    SpendEpoch,
)
from ckpt_engine.core.machines.members import Members, Replica, Trainer
from ckpt_engine.core.machines.versions import Intended, Meant, Versions
from ckpt_engine.core.problems import precondition
from ckpt_engine.v1 import manager_pb2, weights_pb2

SPEND: Key = ("spend",)
SPEND_AGAIN: Key = ("spend again",)
SHORTEST_SECONDS = 0.001


@dataclass
class State:
    """Shared by the manager's parts; each changes only what it is about.

    epoch: the last one that was given out. spent: up to which the ledger will never give one out again; one epoch is
    spent ahead, so that an update need not wait for the disk. spending: the one that is being spent, 0 if none is.
    last: each lineage's last identity. versions: who is to hold what.
    ledger_problem: why the ledger could not be written when that was tried last; None if it could.
    """

    members: Members
    deadlines: Deadlines
    out: list[ManagerCommand]
    epoch: int
    spent: int
    last: dict[str, weights_pb2.Identity] = field(default_factory=dict)
    versions: Versions = field(default_factory=Versions)
    spending: int = 0
    ledger_problem: weights_pb2.Problem | None = None

    @classmethod
    def from_ledger(
        cls,
        cluster: str,
        epoch: int,
        intents: Sequence[Intended],
        deadlines: Deadlines,
        meant: Mapping[str, Meant] | None = None,
    ) -> State:
        """As a manager begins."""
        state = cls(Members(cluster), deadlines, [], epoch, epoch)
        state.last = {intent.identity.lineage: intent.identity for intent in intents}
        state.versions = Versions.from_ledger(epoch, intents, meant or {})
        return state

    # -- epochs

    def spend_ahead(self) -> None:
        """Has the next epoch made durable, if that is not done."""
        if self.spent <= self.epoch and not self.spending:
            self.spending = self.epoch + 1
            self.run(SPEND, SpendEpoch(self.spending, self.deadlines.ledger))

    def spend_ended(self, problem: weights_pb2.Problem | None) -> None:
        """The ledger has written, or could not: then it is tried again in a moment."""
        if problem is None:
            self.spent, self.ledger_problem = max(self.spent, self.spending), None
        else:
            self.ledger_problem = problem
            self.set_timer(SPEND_AGAIN, self.deadlines.resend)
        self.spending = 0
        if problem is None:
            self.spend_ahead()  # epochs may have been skipped meanwhile

    def epoch_ready(self) -> bool:
        """Whether `next_fence` may be called."""
        return self.spent > self.epoch

    def check_ledger(self) -> None:
        """Raises FAILED_PRECONDITION while the ledger cannot be written: what is begun now could not be recorded."""
        if self.ledger_problem is not None:
            raise precondition(
                "the ledger cannot be written, so nothing is begun and no replica was touched: "
                + self.ledger_problem.message
            )

    def next_fence(self) -> weights_pb2.Fence:
        """A fence above all before it."""
        assert self.epoch_ready()
        self.epoch += 1
        self.spend_ahead()
        return self.fence()

    def fence(self) -> weights_pb2.Fence:
        """Of what was begun last."""
        return weights_pb2.Fence(cluster=self.members.cluster, epoch=self.epoch)

    # -- the way out

    def send(self, member: Trainer | Replica, body: ProtobufMessage) -> None:
        """Dropped if the member is not connected; what must arrive is sent again by its owner."""
        if member.peer is not None:
            self.out.append(Send(member.peer, body))

    def send_to(self, name: str, body: ProtobufMessage) -> bool:
        """The same for a replica by its name; dropped if nobody knows it. Whether it was connected."""
        replica = self.members.replicas.get(name)
        if replica is None or replica.peer is None:
            return False
        self.send(replica, body)
        return True

    def run(self, key: Key, task: ManagerTask) -> None:
        """Starts a task."""
        self.out.append(Run(key, task))

    def set_timer(self, key: Key, seconds: float) -> None:
        """Sets or replaces a timer. Never for no time: in floats, the moment that it waits for might not have come."""
        self.out.append(SetTimer(key, max(SHORTEST_SECONDS, seconds)))

    def cancel_timer(self, key: Key) -> None:
        """Forgets a timer."""
        self.out.append(CancelTimer(key))

    def emit(self, call: Call, event: manager_pb2.UpdateEvent) -> None:
        """Tells a caller of UpdateWeights something."""
        self.out.append(EmitEvent(call, event))

    def finish(self, call: Call, problem: weights_pb2.Problem | None = None) -> None:
        """Ends a call."""
        self.out.append(FinishCall(call, problem))


def describe(identity: weights_pb2.Identity) -> str:
    """A version for people."""
    return f"version {identity.version} of lineage {identity.lineage!r} (root {identity.root.hex()[:12]})"
