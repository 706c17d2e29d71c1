"""The events that go into the machines, and the commands that come out of them.

A machine decides; a shell does. The whole shell is one loop, on one thread::

    for command in machine.handle(event, now):
        perform(command)

`now` is monotonic seconds, data like any other. `handle` never blocks and never raises on what the network brings;
commands are performed in their order, and none of them waits: `Send` queues, `Run` starts. Everything here is frozen;
protobuf messages inside belong to the receiver's side only for reading.

What a shell promises
- Peers: one name (`peer`) for one stream. A stream that ends, for whatever reason, gives one `PeerLost`, except after
  `ClosePeer`, where it may be left out. A name is never used again.
- Timers: `SetTimer` replaces the timer with that key, `CancelTimer` of an unknown key is fine, and a timer that was
  cancelled or replaced never fires.
- Tasks: each `Run` is answered by exactly one `Done` with its key, at the latest `task.seconds` after the command,
  with `problem` DEADLINE_EXCEEDED and `answered=False` if the work has not ended by then. Tasks run beside each other.
- Calls: a call gets any number of `EmitEvent` and then one `FinishCall`; after `CallCancelled` it may get more of
  them, which the shell drops.

A machine that raises all the same has a defect, and gives none of that event's commands (`deciding`). Its state is
unknown then, so it gets no further event: shell/README.md says what follows, for all machines alike.

The tasks, and what each results in, are in tasks.py and *_tasks.py, the calls in calls.py; their names can be imported
from here too.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import NewType, TypeAlias

from google.protobuf.message import Message as ProtobufMessage

from ckpt_engine.machines.ledger_tasks import CorrectOutcome as CorrectOutcome
from ckpt_engine.machines.ledger_tasks import FindReport as FindReport
from ckpt_engine.machines.ledger_tasks import Found as Found
from ckpt_engine.machines.ledger_tasks import OperatorHold as OperatorHold
from ckpt_engine.machines.ledger_tasks import ReadCommits as ReadCommits
from ckpt_engine.machines.ledger_tasks import RecordDeployment as RecordDeployment
from ckpt_engine.machines.ledger_tasks import RecordForgotten as RecordForgotten
from ckpt_engine.machines.ledger_tasks import RecordHold as RecordHold
from ckpt_engine.machines.ledger_tasks import RecordIntent as RecordIntent
from ckpt_engine.machines.ledger_tasks import RecordOutcome as RecordOutcome
from ckpt_engine.machines.ledger_tasks import RecordRelease as RecordRelease
from ckpt_engine.machines.ledger_tasks import SpendEpoch as SpendEpoch
from ckpt_engine.machines.ledger_tasks import StoredSeal as StoredSeal
from ckpt_engine.machines.relay.tasks import ChunksPassed as ChunksPassed
from ckpt_engine.machines.relay.tasks import FillingProgress as FillingProgress
from ckpt_engine.machines.relay.tasks import StopFilling as StopFilling

# isort: off
from ckpt_engine.machines.calls import (
    Call as Call,
    CallCancelled as CallCancelled,
    OperatorCall as OperatorCall,
    OperatorRequest as OperatorRequest,
    OperatorResponse as OperatorResponse,
    RollbackCall as RollbackCall,
    SleepCall as SleepCall,
    UpdateCall as UpdateCall,
    WaitCall as WaitCall,
    WakeCall as WakeCall,
)
from ckpt_engine.machines.tasks import (
    AgentTask as AgentTask,
    Combined as Combined,
    CombineSeals as CombineSeals,
    Compiled as Compiled,
    CompilePlans as CompilePlans,
    DiscardEngine as DiscardEngine,
    EngineTask as EngineTask,
    FetchBlobs as FetchBlobs,
    FindCheck as FindCheck,
    HeldOffer as HeldOffer,
    HoldRequests as HoldRequests,
    InstallEngine as InstallEngine,
    Joined as Joined,
    JoinSources as JoinSources,
    KeepCheck as KeepCheck,
    ManagerTask as ManagerTask,
    MarkEngine as MarkEngine,
    MergeTables as MergeTables,
    PauseEngine as PauseEngine,
    PlanWorker as PlanWorker,
    PrepareEngine as PrepareEngine,
    Published as Published,
    PutBlobs as PutBlobs,
    ReadWords as ReadWords,
    ResumeEngine as ResumeEngine,
    ScoreEngine as ScoreEngine,
    SealDirectory as SealDirectory,
    SealResult as SealResult,
    SealSource as SealSource,
    SleepEngine as SleepEngine,
    SourceOffer as SourceOffer,
    StampEngine as StampEngine,
    Task as Task,
    TrainerTask as TrainerTask,
    WakeEngine as WakeEngine,
    Words as Words,
)
from ckpt_engine.machines.part_tasks import (
    CollectivePlan as CollectivePlan,
    PartTaken as PartTaken,
    RunPart as RunPart,
    WorkerKey as WorkerKey,
)

# isort: on
from ckpt_engine.core.sleeping import AWAKE, Sleeping
from ckpt_engine.v1 import manager_pb2, weights_pb2, worker_pb2

Key: TypeAlias = Hashable
"""Names a timer or a task of one machine; opaque to the shell. Mostly a frozen dataclass that carries what the machine
needs when it comes back; declared beside what sets it."""

Peer = NewType("Peer", str)
"""Names one stream. The manager's shell makes them; an agent's or trainer's machine makes its own (`OpenStream`)."""


# --------------------------------------------------------------------------------------- events of all machines


@dataclass(frozen=True)
class Message:
    """A message came over a stream. `body` is the sub-message that was set in the envelope (see wire.unpack)."""

    peer: Peer
    body: ProtobufMessage


@dataclass(frozen=True)
class PeerLost:
    """A stream ended, could not be opened, or broke."""

    peer: Peer
    reason: str  # for people
    # of the status that it ended with
    code: weights_pb2.Problem.Code = weights_pb2.Problem.CODE_UNAVAILABLE


@dataclass(frozen=True)
class TimerFired:
    key: Key


@dataclass(frozen=True)
class Done:
    """A task ended. Exactly one of `result` and `problem` is set, except for tasks without a result."""

    key: Key
    result: object = None
    problem: weights_pb2.Problem | None = None
    answered: bool = True  # False: it may have been done or still go on (an engine call that timed out)


# -------------------------------------------------------------------------------------- commands of all machines


@dataclass(frozen=True)
class Send:
    """Queue a message on a stream; dropped if the stream is gone. wire.pack puts `body` into its envelope."""

    peer: Peer
    body: ProtobufMessage


@dataclass(frozen=True)
class ClosePeer:
    """End a stream after what was queued on it. The machine has forgotten it already."""

    peer: Peer
    problem: weights_pb2.Problem | None = None  # only at the manager: send it as Refused before the end


@dataclass(frozen=True)
class SetTimer:
    key: Key
    seconds: float


@dataclass(frozen=True)
class CancelTimer:
    key: Key


@dataclass(frozen=True)
class Run:
    """Start a task; its end is a `Done` with the same key."""

    key: Key
    task: Task


# ------------------------------------------------------------------------------------------------- the manager


ManagerEvent: TypeAlias = (
    Message
    | PeerLost
    | TimerFired
    | Done
    | UpdateCall
    | RollbackCall
    | WaitCall
    | SleepCall
    | WakeCall
    | OperatorCall
    | CallCancelled
)


@dataclass(frozen=True)
class EmitEvent:
    """Send one event to a caller of UpdateWeights or Rollback."""

    call: Call
    event: manager_pb2.UpdateEvent


@dataclass(frozen=True)
class FinishCall:
    """End a call."""

    call: Call
    problem: weights_pb2.Problem | None = None  # its status; None: it ends well
    # The answer of a call that ends well and has one answer.
    response: (
        manager_pb2.SleepResponse | manager_pb2.WakeResponse | manager_pb2.UpdateReport | OperatorResponse | None
    ) = None


ManagerCommand: TypeAlias = Send | ClosePeer | SetTimer | CancelTimer | Run | EmitEvent | FinishCall


# ------------------------------------------------------------------------- what agents and trainers have in common


@dataclass(frozen=True)
class Start:
    """The first event: connect to the manager, and stay connected."""


@dataclass(frozen=True)
class Stop:
    """The last event: say goodbye. The shell ends once the commands are performed and queues are empty."""

    reason: str


@dataclass(frozen=True)
class OpenStream:
    """Dial the manager and open a session stream under this name. `Send` may follow at once; failure is `PeerLost`."""

    peer: Peer


@dataclass(frozen=True)
class SessionOpened:
    """The manager welcomed this member (again). For the shell to know that calls make sense now."""

    cluster: str


@dataclass(frozen=True)
class SessionEnded:
    """The session was lost, refused or stopped. For the log, and for calls that wait for it."""

    problem: weights_pb2.Problem
    final: bool  # it is not dialled again: a trainer's waiting calls fail with the problem, an agent's process ends
    evicted: bool = False  # an operator took it out, so it must not be restarted either
    patience: float = 0.0  # seconds for which it waits for its name, which another process has; 0: it does not


MemberCommand: TypeAlias = Send | ClosePeer | SetTimer | CancelTimer | Run | OpenStream | SessionOpened | SessionEnded


# --------------------------------------------------------------------------------------------------- the agent


@dataclass(frozen=True)
class WorkerAsked:
    """A request of a worker; a repeated one may come again (the channel answers most of these by itself)."""

    request: int  # names the request for `Reply`; made by the shell
    body: worker_pb2.WorkerRequest


@dataclass(frozen=True)
class EngineReady:
    """The engine answers and the adapter can drive it. Comes again after each restart."""

    engine: manager_pb2.Engine
    world_size: int  # how many workers must be clean for the engine to serve
    paused: bool | None  # as the engine says; None: it does not say, so it may be
    asleep: bool | None  # as `paused`
    # What its page says. It counts unless the engine says that it is awake: some call a paused engine asleep.
    marked: Sleeping = AWAKE
    holding: bool = False  # its page has requests wait, or refused, because of an update
    sleep_levels: frozenset[int] = frozenset({1, 2})  # that the engine knows
    untested: str = ""  # says that no test has run this version; empty: tests have


@dataclass(frozen=True)
class EngineExited:
    """The engine's process ended, or its health route does not answer any more. Its workers hold nothing."""

    reason: str


AgentEvent: TypeAlias = Message | PeerLost | TimerFired | Done | Start | Stop | WorkerAsked | EngineReady | EngineExited


@dataclass(frozen=True)
class Reply:
    """Answer a worker's request; the channel fills `sequence` in. None: no answer, the worker will ask again."""

    request: int
    reply: worker_pb2.AgentReply | None


@dataclass(frozen=True)
class Say:
    """Tell people one plain line."""

    line: str


AgentCommand: TypeAlias = MemberCommand | Reply | Say


# -------------------------------------------------------------------------- members that offer weights: the trainer


@dataclass(frozen=True)
class PublishTable:
    """The trainer has a (new) table to publish: a serialised SourceTable. Answered by `PublicationDecided`."""

    table: bytes


@dataclass(frozen=True)
class WithdrawTable:
    """The trainer takes back what it published: nothing new may be read from it."""


@dataclass(frozen=True)
class OfferedVersion:
    """Weights that a member offers."""

    table: bytes  # a serialised SourceTable
    record: bytes = b""  # a serialised SealedRecord; empty: the weights are not sealed yet
    identity: weights_pb2.Identity | None = None  # None: the weights are not sealed yet
    bytes: int = 0  # that it has of the version, for people
    wanted_bytes: int = 0  # of all that it is to hold of it, for people; 0: unknown


@dataclass(frozen=True)
class HoldVersions:
    """A holder holds these versions now, and no others. Answered by `PublicationDecided` once all are accepted."""

    versions: tuple[OfferedVersion, ...]


TrainerEvent: TypeAlias = (
    Message
    | PeerLost
    | TimerFired
    | Done
    | Start
    | Stop
    | PublishTable
    | WithdrawTable
    | HoldVersions
    | FillingProgress
    | ChunksPassed
)


@dataclass(frozen=True)
class PublicationDecided:
    """The manager accepted this rank's table (all ranks' tables agree), or refused it. One of the two is set.

    Comes again after each reconnect; a problem may be lifted by a later table of any rank. For a holder the manifest is
    empty, and a problem may still come when what it holds is looked at.
    """

    manifest: manager_pb2.BlobRef | None
    problem: weights_pb2.Problem | None


@dataclass(frozen=True)
class Released:
    """The weights of this epoch are not read any more."""

    epoch: int


TrainerCommand: TypeAlias = MemberCommand | PublicationDecided | Released | StopFilling
