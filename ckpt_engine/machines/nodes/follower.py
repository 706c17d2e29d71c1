"""The machine of a node that follows: its part of the engine, and the words and questions of its workers.

It starts its part when the leader says so, and ends it when the leader says so or is not heard. It carries its
workers' questions to the leader and the answers back. It decides nothing about updates and does not know the manager.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from ckpt_engine.core.deadlines import Deadlines
from ckpt_engine.core.manifest import DIGEST_FORMAT
from ckpt_engine.machines.deciding import commands_of
from ckpt_engine.machines.events import (
    CancelTimer,
    Key,
    Message,
    Reply,
    Send,
    SetTimer,
    Start,
    Stop,
    TimerFired,
    WorkerAsked,
)
from ckpt_engine.machines.nodes.events import (
    LEADER,
    EndPart,
    FollowerCommand,
    FollowerEvent,
    PartEnded,
    PartFailed,
    PartStarted,
    SayLine,
    StartPart,
    WordsChanged,
)
from ckpt_engine.v1 import worker_pb2

BEAT: Key = ("beat",)
LEASE: Key = ("lease",)


class NodeEngineState(Enum):
    """The state of this node's part of the engine."""

    NONE = 0
    STARTS = 1
    RUNS = 2
    ENDS = 3


class FollowerMachine:
    """One following agent.

    session: of this process. rank: of the node, among `nodes` nodes. leader: its address. kind: of the engine.
    transports: that this node can read over.
    """

    def __init__(
        self,
        session: bytes,
        rank: int,
        nodes: int,
        leader: str,
        kind: str,
        transports: Sequence[str],
        deadlines: Deadlines,
    ) -> None:
        self._leader = leader
        self._deadlines = deadlines
        self._out: list[FollowerCommand] = []
        self._report = worker_pb2.NodeMessage(
            session_id=session,
            node_rank=rank,
            nodes=nodes,
            kind=kind,
            transports=transports,
            digest_format=DIGEST_FORMAT,
        )
        self._part = NodeEngineState.NONE
        self._ours = b"", 0  # session and generation of the leader that began the present part, or the last one
        self._command = worker_pb2.NodeCommand()
        self._leads = False  # whether the leader was heard lately
        self._refused = ""
        self._failed = ""
        self._stopped = ""
        self._questions: dict[int, worker_pb2.WorkerRequest] = {}

    def handle(self, event: FollowerEvent, now: float) -> list[FollowerCommand]:
        """Takes one event and says what is to be done. now: monotonic seconds."""
        return commands_of(self._out, lambda: self._take(event))

    def _take(self, event: FollowerEvent) -> None:
        match event:
            case Message(_, worker_pb2.NodeCommand() as command):
                self._heard(command)
            case WorkerAsked(number, request):
                self._questions[number] = request
                self._out.append(SetTimer(("answer", number), self._deadlines.worker_reply))
                self._ask(number)
            case TimerFired(key):
                self._timer(key)
            case PartStarted(problem):
                self._part = NodeEngineState.NONE if problem else NodeEngineState.RUNS
                self._report.reason = problem
                if problem:
                    self._out.append(SayLine(problem))
                self._tell()
            case PartFailed(reason):
                self._failed = reason
            case PartEnded():
                self._part = NodeEngineState.NONE
                self._tell()
            case WordsChanged() | Start():
                self._tell()
            case Stop(reason):
                self._stopped = reason
                self._tell()
        self._bring_about()

    def _timer(self, key: Key) -> None:
        match key:
            case ("beat",):
                self._tell()
            case ("lease",):
                self._leads = False
            case ("ask", int() as number) if number in self._questions:
                self._ask(number)
            case ("answer", int() as number) if number in self._questions:
                self._reply(number, None)

    # -- the engine's part

    def _bring_about(self) -> None:
        """Takes the next step to what the leader wants."""
        if self._part is NodeEngineState.RUNS and (reason := self._end_reason()):
            self._part = NodeEngineState.ENDS
            self._report.reason = reason
            self._out += [SayLine(f"{reason}; this part of the engine is ended"), EndPart()]
        elif self._part is NodeEngineState.NONE and self._is_part_due():
            command = self._command
            self._part, self._ours, self._failed = NodeEngineState.STARTS, (command.session_id, command.generation), ""
            report = self._report
            report.leader_session, report.generation, report.reason = command.session_id, command.generation, ""
            report.looked = 0  # another leader counts its looks from 0
            self._out.append(StartPart(command.master_address, command.master_port))

    def _is_part_due(self) -> bool:
        """Whether the leader wants a part that has not been begun yet."""
        command = self._command
        is_known = (command.session_id, command.generation) == self._ours
        return self._leads and command.run and not is_known and not self._stopped

    def _end_reason(self) -> str:
        """Why the part that runs has to end; empty: it may go on."""
        if self._failed or self._stopped:
            return self._failed or self._stopped
        if not self._leads:
            return f"the leader was not heard for {self._deadlines.lease:g} s"
        if self._command.session_id != self._ours[0]:
            return "the leader was restarted"
        return "" if self._obeys(self._command) else "the leader ends the engine"

    # -- the leader

    def _heard(self, command: worker_pb2.NodeCommand) -> None:
        if command.HasField("refused"):
            if command.refused.message != self._refused:
                self._refused = command.refused.message
                self._out.append(SayLine(f"refused by the leader: {self._refused}"))
            return
        self._refused = ""
        if not self._leads:
            self._out.append(SayLine(f"joined the leader at {self._leader}"))
        self._leads = True
        self._out.append(SetTimer(LEASE, self._deadlines.lease))
        self._command = command
        if not self._obeys(command):
            return
        if command.HasField("reply"):
            question = command.rank, command.boot_id, command.reply.sequence
            for number, request in tuple(self._questions.items()):
                if (request.rank, request.boot_id, request.sequence) == question:
                    self._reply(number, command.reply)
        if command.look > self._report.looked:
            self._report.looked = command.look
            self._tell()

    def _obeys(self, command: worker_pb2.NodeCommand) -> bool:
        """Whether a command is about the part that this node has now."""
        has_part = self._part in (NodeEngineState.RUNS, NodeEngineState.ENDS)
        return has_part and command.run and (command.session_id, command.generation) == self._ours

    def _tell(self, request: worker_pb2.WorkerRequest | None = None) -> None:
        """Sends the whole state, and a request if there is one; the state is sent again after a heartbeat."""
        report = self._report
        report.sequence += 1
        report.running = self._part in (NodeEngineState.RUNS, NodeEngineState.ENDS)
        message = worker_pb2.NodeMessage(request=request)
        message.MergeFrom(report)
        self._out += [Send(LEADER, message), SetTimer(BEAT, self._deadlines.heartbeat)]

    # -- what its workers ask

    def _ask(self, number: int) -> None:
        self._tell(self._questions[number])
        self._out.append(SetTimer(("ask", number), self._deadlines.worker_attempt))

    def _reply(self, number: int, reply: worker_pb2.AgentReply | None) -> None:
        """Answers a question. reply: None: the worker is to ask again."""
        del self._questions[number]
        self._out += [CancelTimer(("ask", number)), CancelTimer(("answer", number)), Reply(number, reply)]
