"""Events and commands of the machines of an engine's nodes, in addition to those of all machines (`../events.py`).

Agents on several nodes run one engine. That of node 0 leads: `LeaderMachine`. The others follow: `FollowerMachine`.
Their messages are NodeMessage to the leader and NodeCommand back. A message may be lost or come twice; it never
overtakes an earlier one of the same connection.

The leader hands questions of far workers to the agent's own machine as its event `WorkerAsked`, and takes that
machine's command `Reply` as the answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from ckpt_engine.machines.events import (
    CancelTimer,
    Message,
    Peer,
    Reply,
    Send,
    SetTimer,
    Start,
    Stop,
    TimerFired,
    WorkerAsked,
)
from ckpt_engine.v1 import manager_pb2, weights_pb2, worker_pb2


@dataclass(frozen=True)
class SayLine:
    """One plain line for people."""

    line: str


# ------------------------------------------------------------------------------------------------- of the leader


@dataclass(frozen=True)
class FollowerMessage:
    """An event: a follower's message."""

    peer: Peer
    message: worker_pb2.NodeMessage
    boot_ids: tuple[bytes, ...]  # in this start's page now, by rank, of workers on all nodes; b"" for none yet


@dataclass(frozen=True)
class GatherNodes:
    """An event: the engine is to be started. Answered by `AllHere`, or by `NodesMissing` after `seconds`."""

    seconds: float


@dataclass(frozen=True)
class AllHere:
    """A command: all nodes have an agent, and none has a part of the engine. The shell answers at once with `Begin`, or
    gives up."""


@dataclass(frozen=True)
class NodesMissing:
    """A command: some nodes are not ready."""

    reason: str  # names them, for people


@dataclass(frozen=True)
class Begin:
    """An event: all parts of the engine start. The page is new."""

    port: int  # at which the parts meet, free on node 0


@dataclass(frozen=True)
class Look:
    """An event: bring what the followers' pages say now into ours. Answered by `Looked` within `seconds`; workers of a
    node that does not answer in time read as dead."""

    number: int  # rises
    seconds: float


@dataclass(frozen=True)
class Looked:
    """A command: the answer to the `Look` of this number."""

    number: int


@dataclass(frozen=True)
class EndParts:
    """An event: the engine ends, or has ended, on all nodes. Answered by `PartsEnded`, in time."""


@dataclass(frozen=True)
class PartsEnded:
    """A command: the answer to `EndParts`."""


@dataclass(frozen=True)
class ShowWord:
    """A command: write this word of a worker on another node into the page, before anything else is done."""

    rank: int
    boot_id: bytes
    alive: bool  # False: it reads as dead
    state: manager_pb2.WorkerState
    epoch: int
    identity: weights_pb2.Identity | None = None  # set if state is CLEAN, and then one that a word can hold


LeaderEvent: TypeAlias = Start | FollowerMessage | GatherNodes | Begin | Look | EndParts | Reply | TimerFired
LeaderCommand: TypeAlias = (
    Send
    | SetTimer
    | CancelTimer
    | SayLine
    | AllHere
    | NodesMissing
    | Looked
    | PartsEnded
    | ShowWord
    | WorkerAsked  # answered by Reply, in time
)

# ------------------------------------------------------------------------------------------------ of a follower

LEADER = Peer("leader")
"""The peer to which a follower sends. If a message says that there is a part of the engine, the shell fills its
`workers` with what the page says at that moment."""


@dataclass(frozen=True)
class StartPart:
    """A command: start this node's part of the engine. Answered by `PartStarted`."""

    address: str  # where the parts meet
    port: int


@dataclass(frozen=True)
class PartStarted:
    """An event: the part has started, or could not be started."""

    problem: str = ""  # why it could not; empty: it has started


@dataclass(frozen=True)
class PartFailed:
    """An event: the part, or one of its workers, has ended by itself. It is still to be ended in order."""

    reason: str


@dataclass(frozen=True)
class EndPart:
    """A command: end the part, by force if need be. Answered by `PartEnded`."""


@dataclass(frozen=True)
class PartEnded:
    """An event: nothing of the part is left."""


@dataclass(frozen=True)
class WordsChanged:
    """An event: this node's page says something else than before."""


FollowerEvent: TypeAlias = (
    Start | Stop | Message | WorkerAsked | TimerFired | PartStarted | PartFailed | PartEnded | WordsChanged
)
FollowerCommand: TypeAlias = Send | SetTimer | CancelTimer | SayLine | StartPart | EndPart | Reply
