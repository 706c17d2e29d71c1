"""What goes into the machines of an engine's nodes and what comes out, beside what all machines know (`../events.py`).

Agents on several nodes run one engine. That of node 0 leads: `LeaderMachine`. The others follow: `FollowerMachine`.
Their messages are NodeMessage to the leader and NodeCommand back. A message may be lost or come twice; it never
overtakes an earlier one of the same connection.

The leader's question to the agent's own machine is that machine's event, `WorkerAsked`, and its answer that machine's
command, `Reply`.
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
    """An event: a follower's message. boot_ids: those in the page of this start of the engine now, by rank, of
    workers on all nodes; b"" where there is none yet."""

    peer: Peer
    message: worker_pb2.NodeMessage
    boot_ids: tuple[bytes, ...]


@dataclass(frozen=True)
class GatherNodes:
    """An event: the engine is to be started. Answered by `AllHere`, or by `NodesMissing` after so many `seconds`."""

    seconds: float


@dataclass(frozen=True)
class AllHere:
    """A command: all nodes have an agent, and none has a part of the engine. The shell answers at once with `Begin`, or
    gives up."""


@dataclass(frozen=True)
class NodesMissing:
    """A command: in words, which nodes are not ready."""

    reason: str


@dataclass(frozen=True)
class Begin:
    """An event: all parts of the engine start. port: at which they meet, free on node 0. The page is new."""

    port: int


@dataclass(frozen=True)
class Look:
    """An event: bring what the followers' pages say now into ours. number: rises. Answered by `Looked` within so many
    `seconds`; the workers of who does not tell in time read as dead."""

    number: int
    seconds: float


@dataclass(frozen=True)
class Looked:
    """A command: the answer to `Look`, or to that with a lower number."""

    number: int


@dataclass(frozen=True)
class EndParts:
    """An event: the engine ends, or has ended, everywhere. Answered by `PartsEnded`, in time."""


@dataclass(frozen=True)
class PartsEnded:
    """A command: the answer to `EndParts`."""


@dataclass(frozen=True)
class ShowWord:
    """A command: write this word of a worker on another node into the page, before anything else is done.

    alive: False: it reads as dead. identity: set if state is CLEAN, and then one that a word can hold.
    """

    rank: int
    boot_id: bytes
    alive: bool
    state: manager_pb2.WorkerState
    epoch: int
    identity: weights_pb2.Identity | None = None


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
"""Where a follower sends to. Its shell puts what its page says at that moment into `workers` of what it sends, if the
message says that there is a part of the engine."""


@dataclass(frozen=True)
class StartPart:
    """A command: start this node's part of the engine. Answered by `PartStarted`. address, port: where parts meet."""

    address: str
    port: int


@dataclass(frozen=True)
class PartStarted:
    """An event. problem: why there is none; empty: there is one."""

    problem: str = ""


@dataclass(frozen=True)
class PartFailed:
    """An event: the part has ended by itself, or one of its workers has, and why. It is still to be ended in order."""

    reason: str


@dataclass(frozen=True)
class EndPart:
    """A command: end it, whatever it takes. Answered by `PartEnded`."""


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
