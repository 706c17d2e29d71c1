"""The machine of an engine's node 0 for the other nodes: which are present, and when all parts start and end.

It decides when a start of the engine (a generation) begins, which followers belong to it, and when it has to end
because of one of them. It also decides which of their workers' questions reach the agent's own machine; `far.py`
decides what stands in the gate's page. It starts nothing itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ckpt_engine.core.deadlines import Deadlines
from ckpt_engine.core.manifest import other_format
from ckpt_engine.machines.deciding import commands_of
from ckpt_engine.machines.events import CancelTimer, Key, Peer, Reply, Send, SetTimer, Start, TimerFired, WorkerAsked
from ckpt_engine.machines.nodes.events import (
    AllHere,
    Begin,
    EndParts,
    FollowerMessage,
    GatherNodes,
    LeaderCommand,
    LeaderEvent,
    Look,
    Looked,
    NodesMissing,
    PartsEnded,
    SayLine,
)
from ckpt_engine.machines.nodes.far import FarWorkers
from ckpt_engine.v1 import manager_pb2, weights_pb2, worker_pb2

BEAT: Key = ("beat",)
NOTICE: Key = ("notice",)
GATHER: Key = ("gather",)
END: Key = ("end",)


@dataclass(eq=False)
class _WorkerQuestion:
    """The last question of one far worker."""

    node: _Node
    generation: int  # in which it was asked
    request: worker_pb2.WorkerRequest
    reply: worker_pb2.AgentReply | None = None  # None: not answered yet


@dataclass(eq=False)
class _Node:
    """One session of a node's agent."""

    peer: Peer  # where commands to it go
    heard: float  # when it was heard last, monotonic seconds
    message: worker_pb2.NodeMessage  # the last one
    looked: int = 0  # the last look that its words answer
    questions: dict[int, _WorkerQuestion] = field(default_factory=dict)  # by its workers' ranks


class LeaderMachine:
    """One leading agent's followers.

    session: of this process. nodes: of the engine. leader: the address at which this agent listens for them; host: of
    the same, where the engine's parts meet. kind: of the engine. transports: that this node can read over.
    """

    def __init__(
        self,
        session: bytes,
        nodes: int,
        leader: str,
        host: str,
        kind: str,
        transports: Sequence[str],
        deadlines: Deadlines,
    ) -> None:
        self._session = session
        self._count = nodes
        self._leader = leader
        self._host = host
        self._kind = kind
        self._transports = frozenset(transports)
        self._deadlines = deadlines
        self._out: list[LeaderCommand] = []
        self._nodes: dict[int, _Node] = {}
        self._members: dict[int, bytes] = {}  # sessions that have a part in this generation
        self._far: FarWorkers | None = None
        self._generation = 0
        self._port = 0
        self._wrong = ""
        self._gathering: GatherNodes | None = None
        self._ending = False
        self._look = 0
        self._looking: set[int] = set()
        self._open_questions: dict[int, _WorkerQuestion] = {}
        self._questions = 0

    def handle(self, event: LeaderEvent, now: float) -> list[LeaderCommand]:
        """Takes one event and says what is to be done. now: monotonic seconds."""
        return commands_of(self._out, lambda: self._take(event, now))

    def trouble(self, now: float) -> str:
        """Why the engine cannot go on because of another node; empty if it can."""
        if self._wrong:
            return self._wrong
        for rank, session in self._members.items():
            node = self._nodes[rank]
            if node.message.session_id != session:
                return f"the agent of node {rank} was restarted"
            if not self._is_heard(node, now):
                return f"the agent of node {rank} was not heard for {self._deadlines.lease:g} s"
            if self._current(node.message) and not node.message.running and node.message.reason:
                return f"node {rank}: {node.message.reason}"
        return ""

    def placed(self, status: manager_pb2.WorkerStatus) -> manager_pb2.WorkerStatus:
        """Adds the node and the process where the worker runs. Returns `status`."""
        place = None if self._far is None else self._far.place(status.rank)
        if place is not None:
            status.node, status.pid = place
        return status

    def _take(self, event: LeaderEvent, now: float) -> None:
        match event:
            case FollowerMessage():
                self._take_message(event, now)
            case Reply(question, reply):
                self._answered(question, reply)
            case GatherNodes(seconds):
                self._end()
                self._gathering = event
                self._out.append(SetTimer(NOTICE, min(seconds, 3 * self._deadlines.heartbeat)))
                self._out.append(SetTimer(GATHER, seconds))
            case Begin(port):
                self._begin(port)
            case Look(number, seconds):
                if self._far is not None:
                    self._look = number
                    self._tell_all()
                self._looking.add(number)
                self._out.append(SetTimer(("look", number), seconds))
            case EndParts():
                self._end()
                self._ending = True
                self._out.append(SetTimer(END, 2 * self._deadlines.engine_grace))
            case TimerFired(key):
                self._timer(key, now)
            case Start():
                self._out.append(SetTimer(BEAT, self._deadlines.heartbeat))
        self._answer_waiting(now)

    def _timer(self, key: Key, now: float) -> None:
        match key:
            case ("beat",):
                for rank, node in self._nodes.items():
                    if self._far is not None and not self._is_heard(node, now):
                        self._far.lose(rank)
                self._tell_all()
                self._out.append(SetTimer(BEAT, self._deadlines.heartbeat))
            case ("notice",) if self._gathering is not None and (missing := self._missing(now)):
                self._out.append(SayLine(f"waiting: {missing} (at {self._leader})"))
            case ("gather",) if self._gathering is not None and (missing := self._missing(now)):
                seconds, self._gathering = self._gathering.seconds, None
                how = f"--nodes {self._count} --node-rank R --leader {self._leader}"
                self._out.append(NodesMissing(f"{missing} after {seconds:g} s: start its agent with {how}"))
            case ("look", int() as number) if number in self._looking:
                for rank in self._lagging_nodes(number):
                    if self._far is not None:
                        self._far.lose(rank)
                self._looked(number)
            case ("end",) if self._ending:
                self._parts_ended()

    def _answer_waiting(self, now: float) -> None:
        if self._gathering is not None and not self._missing(now):
            self._gathering = None
            self._out += [CancelTimer(NOTICE), CancelTimer(GATHER), AllHere()]
        for number in sorted(self._looking):
            if not self._lagging_nodes(number):
                self._looked(number)
        running = [node for node in self._nodes.values() if node.message.running and self._is_heard(node, now)]
        if self._ending and not running:
            self._parts_ended()

    def _looked(self, number: int) -> None:
        self._looking.discard(number)
        self._out += [CancelTimer(("look", number)), Looked(number)]

    def _parts_ended(self) -> None:
        self._ending = False
        self._out += [CancelTimer(END), PartsEnded()]

    # -- generations

    def _begin(self, port: int) -> None:
        self._members = {rank: node.message.session_id for rank, node in self._nodes.items()}
        self._far = FarWorkers(self._out.append)
        self._wrong = ""
        self._generation += 1
        self._port = port
        self._tell_all()

    def _end(self) -> None:
        """Ends the generation: what its nodes hold does not count any more."""
        if self._far is not None:
            for rank in self._nodes:
                self._far.lose(rank)
        self._far, self._members, self._gathering = None, {}, None
        self._tell_all()

    def _missing(self, now: float) -> str:
        """Which nodes are not ready for a new start; empty: all are."""
        heard = {rank for rank, node in self._nodes.items() if self._is_heard(node, now)}
        if absent := [rank for rank in range(1, self._count) if rank not in heard]:
            return f"no agent of node {', '.join(map(str, absent))} has joined"
        ending = [rank for rank, node in sorted(self._nodes.items()) if node.message.running]
        return f"node {', '.join(map(str, ending))} still has a part of the engine before" if ending else ""

    def _lagging_nodes(self, number: int) -> list[int]:
        """The nodes that have not read their words since this look."""
        return [rank for rank in self._members if self._nodes[rank].looked < number]

    # -- what followers tell

    def _take_message(self, event: FollowerMessage, now: float) -> None:
        message, rank = event.message, event.message.node_rank
        if refused := self._refusal(message, now):
            problem = weights_pb2.Problem(code=weights_pb2.Problem.CODE_FAILED_PRECONDITION, message=refused)
            self._out.append(Send(event.peer, worker_pb2.NodeCommand(session_id=self._session, refused=problem)))
            return
        node = self._nodes.get(rank)
        if node is None or node.message.session_id != message.session_id:
            self._out.append(SayLine(f"node {rank} has joined"))
            if self._far is not None:
                self._far.lose(rank)  # the words of the agent before it do not count any more
            node = self._nodes[rank] = _Node(event.peer, now, message)
        elif message.sequence <= node.message.sequence:
            return
        node.peer, node.heard, node.message = event.peer, now, message
        if self._far is not None and self._current(message):
            self._take_words(self._far, node, event.boot_ids)
        self._tell(node)

    def _refusal(self, message: worker_pb2.NodeMessage, now: float) -> str:
        """Why this message is not taken; empty: it is."""
        rank = message.node_rank
        if message.nodes != self._count or not 0 < rank < self._count:
            return f"node {rank} of {message.nodes} cannot follow: node 0 has --nodes {self._count}"
        if message.kind != self._kind:
            return f"node {rank} would start engine {message.kind!r}, node 0 starts {self._kind!r}"
        if other := other_format(f"node {rank}", message.digest_format):
            return other
        if lacking := sorted(self._transports - set(message.transports)):
            return (
                f"node {rank} cannot read over {', '.join(lacking)}, which node 0 can: run `ckpt-engine doctor` there, "
                "or start all nodes with the same --transport"
            )
        node = self._nodes.get(rank)
        if node is not None and node.message.session_id != message.session_id and self._is_heard(node, now):
            return f"node {rank} has an agent already: each node has its own --node-rank"
        return ""

    def _take_words(self, far: FarWorkers, node: _Node, boot_ids: Sequence[bytes]) -> None:
        message, rank = node.message, node.message.node_rank
        request = message.request if message.HasField("request") else None
        if request is not None and request.HasField("installed"):
            far.accounted(request.rank, request.boot_id, request.installed.fence.epoch)
        if wrong := far.take(rank, message.workers, boot_ids):
            self._wrong = wrong
            far.lose(rank)
            return
        node.looked = max(node.looked, message.looked)
        if request is not None and far.has(rank, request.rank, request.boot_id):
            self._ask(node, request)

    def _current(self, message: worker_pb2.NodeMessage) -> bool:
        """Whether a message is about the present generation."""
        return (
            message.leader_session == self._session
            and message.generation == self._generation
            and self._members.get(message.node_rank) == message.session_id
        )

    def _is_heard(self, node: _Node, now: float) -> bool:
        return now - node.heard <= self._deadlines.lease

    # -- what their workers ask

    def _ask(self, node: _Node, request: worker_pb2.WorkerRequest) -> None:
        """Has a far worker's question answered once, and sends the answer again if the question is repeated."""
        last = node.questions.get(request.rank)
        if last is not None and last.request.boot_id == request.boot_id:
            if request.sequence < last.request.sequence:
                return
            if request.sequence == last.request.sequence:
                self._give(last)
                return
        question = node.questions[request.rank] = _WorkerQuestion(node, self._generation, request)
        self._questions += 1
        self._open_questions[self._questions] = question
        self._out.append(WorkerAsked(self._questions, request))

    def _answered(self, number: int, reply: worker_pb2.AgentReply | None) -> None:
        question = self._open_questions.pop(number, None)
        if question is None or self._far is None or question.generation != self._generation:
            return
        node, request = question.node, question.request
        if self._nodes[node.message.node_rank] is not node:
            return  # another agent is there now, and has other workers
        if reply is None:
            if node.questions.get(request.rank) is question:
                del node.questions[request.rank]  # it may ask again
            return
        epoch = reply.install.fence.epoch
        # Before it leaves: from then on the far worker may write, and our gate must not learn it later.
        if reply.HasField("install") and not self._far.ordered(request.rank, request.boot_id, epoch):
            return
        question.reply = worker_pb2.AgentReply()
        question.reply.CopyFrom(reply)
        question.reply.sequence = request.sequence
        self._give(question)

    def _give(self, question: _WorkerQuestion) -> None:
        if question.reply is not None:
            command = self._command(question.node)
            command.rank, command.boot_id = question.request.rank, question.request.boot_id
            command.reply.CopyFrom(question.reply)
            self._out.append(Send(question.node.peer, command))

    # -- what they are told

    def _tell_all(self) -> None:
        for node in self._nodes.values():
            self._tell(node)

    def _tell(self, node: _Node) -> None:
        self._out.append(Send(node.peer, self._command(node)))

    def _command(self, node: _Node) -> worker_pb2.NodeCommand:
        """This machine's whole state for a node. An agent that joined after this start of the engine has no part."""
        return worker_pb2.NodeCommand(
            session_id=self._session,
            generation=self._generation,
            run=self._members.get(node.message.node_rank) == node.message.session_id,
            master_address=self._host,
            master_port=self._port,
            look=self._look,
        )
