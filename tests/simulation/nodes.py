"""Engines on several nodes: the shells of leading and following agents, what lies between them, and an engine's parts.

A leading agent's process has two machines, that of an agent and that of a leader. It launches its engine, so the engine
dies with it, and a follower's part with the follower. All nodes are on one host here, as far as memory goes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from ckpt_engine.gate import page
from ckpt_engine.gate.page import WorkerWord
from ckpt_engine.machines import events
from ckpt_engine.machines.agent.machine import AgentMachine
from ckpt_engine.machines.events import Message, Peer, Reply, WorkerAsked
from ckpt_engine.machines.nodes import events as nodes
from ckpt_engine.machines.nodes.follower import FollowerMachine
from ckpt_engine.machines.nodes.leader import LeaderMachine
from ckpt_engine.v1 import manager_pb2, weights_pb2, worker_pb2
from tests.simulation.engine import CLEAN, NONE, Agent, Engine, Worker
from tests.simulation.members import AgentShell, Cluster
from tests.simulation.shell import Shell
from tests.simulation.world import BrokenPromiseError, Signal, Steps

GATHER_SECONDS = 20.0
COMES_UP_SECONDS = 10.0
LOOK_SECONDS = 0.3
"""Between two looks of an agent at what runs."""
BOUND = 2.5
"""Seconds that something may be over a lease: messages travel, a part starts and ends, an agent looks."""
DRIFT = 1.04


class SpreadEngine(Engine):
    """An engine of which each node has a part. Its page is the leader's, where words of far workers are as the leader
    shows them. away: since when nodes have no part, or their agent is cut off."""

    site: Site
    port: int

    def spread(self, site: Site, port: int) -> None:
        """Before anything else: where its nodes are. Only node 0 has its part yet."""
        self.site, self.port, self.begun = site, port, self.world.now
        self.shown: dict[int, nodes.ShowWord] = {}
        self.writes = 0
        self.parts: dict[int, FollowerShell] = {}
        self.started: set[int] = set()
        self.away: dict[int, float] = {}
        for worker in self.workers:
            worker.alive = self.node_of(worker) == 0

    def node_of(self, worker: Worker) -> int:
        """Nodes have equally many workers."""
        return worker.rank * self.site.nodes // len(self.workers)

    def of_node(self, node: int) -> list[Worker]:
        """The workers there."""
        return [worker for worker in self.workers if self.node_of(worker) == node]

    def show(self, word: nodes.ShowWord) -> None:
        """The leader writes it into the page."""
        self.shown[word.rank] = word
        self.writes += 1

    def page(self) -> list[WorkerWord]:
        """See `Engine`."""
        return [self._far_word(each.rank) if self.node_of(each) else each.word() for each in self.workers]

    def _far_word(self, rank: int) -> WorkerWord:
        word = self.shown.get(rank)
        if word is None:
            return WorkerWord(rank, b"", 0, False, NONE, 0, None)
        identity = word.identity if word.state == CLEAN else None
        return WorkerWord(rank, word.boot_id, 1, word.alive, word.state, word.epoch, identity)

    def page_key(self) -> list[object]:
        """See `Engine`."""
        return [*super().page_key(), self.writes]

    def held(self) -> events.Words:
        """What its workers hold, whatever the page says."""
        words = [worker.word() for worker in self.workers]
        judged = page.verdict(words, self.mark.own_weights)
        return events.Words((), judged.open, judged.reason, judged.identity)

    def shown_better(self) -> Worker | None:
        """A far worker that the page shows as better than it is. One that died computes nothing, and is lost within a
        lease (`Site.check`). One that says that it holds nothing is seen when somebody looks, or it is told: until then
        its weights are what they were, or the gate is closed."""
        for word in self.shown.values():
            worker = self.workers[word.rank]
            wrong = word.alive and word.state == CLEAN and worker.word().identity != word.identity
            if wrong and not (worker.state == NONE and (self.mark.sleeping or self._has(worker, word))):
                return worker
        return None

    def _has(self, worker: Worker, word: nodes.ShowWord) -> bool:
        assert word.identity is not None
        return worker.weights == self.truth.content[word.identity.root]

    def page_is_right(self, whole: bool) -> bool:
        """It may be worse than the truth."""
        return whole or not self.words().open or self.shown_better() is None

    def agent_of(self, worker: Worker) -> Agent | None:
        """See `Engine`."""
        node = self.node_of(worker)
        return self.parts.get(node) if node else self.agent


@cache
def spread_kind(kind: type[Engine]) -> type[SpreadEngine]:
    """An engine of this kind, on several nodes."""
    return SpreadEngine if kind is Engine else type(f"Spread{kind.__name__}", (SpreadEngine, kind), {})


class Site:
    """Where one replica's nodes are, and what lies between their agents: messages may be lost, and come to the leader
    late once more; they overtake none of the same process. cut: names of followers that hear nothing of the leader.

    engines: by the port at which their parts meet. leaderless: since when there is no leader.
    """

    def __init__(self, cluster: Cluster, name: str, count: int) -> None:
        self.world, self.faults, self.deadlines = cluster.world, cluster.faults, cluster.deadlines
        self.name, self.nodes = name, count
        self.leader: LeaderShell | None = None
        self.leaderless = self.world.now
        self.cut: set[str] = set()
        self.engines: dict[int, SpreadEngine] = {}
        self._peers: dict[Peer, FollowerShell] = {}
        self._last: dict[tuple[Shell, bool], float] = {}
        self.followers = {node: FollowerShell(self, node) for node in range(1, count)}

    def up(self, follower: FollowerShell, message: worker_pb2.NodeMessage) -> None:
        """To the leader, if there is one."""
        leader, data = self.leader, message.SerializeToString()
        if leader is None or not leader.alive:
            return
        peer = Peer(f"{follower.name} {follower.born}")
        self._peers[peer] = follower

        def hear() -> None:
            leader.feed(nodes.FollowerMessage(peer, worker_pb2.NodeMessage.FromString(data), leader.here()))

        def arrive() -> None:
            if leader.alive:
                leader.unless_stopped(arrive, hear)

        self._carry(follower, True, arrive)

    def down(self, peer: Peer, command: worker_pb2.NodeCommand) -> None:
        """To the follower that said so."""
        follower, data = self._peers[peer], command.SerializeToString()
        told = Message(nodes.LEADER, worker_pb2.NodeCommand.FromString(data))
        self._carry(follower, False, lambda: follower.feed(told))

    def _carry(self, follower: FollowerShell, up: bool, arrive: Callable[[], None]) -> None:
        if follower.name in self.cut or self.world.chance(self.faults.loss):
            return
        way, now = (follower, up), self.world.now
        at = self._last[way] = max(self._last.get(way, 0.0), now + self.world.between(0.0005, self.faults.delay))
        self.world.after(at - now, arrive)
        if up and self.world.chance(self.faults.duplicate):
            self.world.after(at - now + self.world.between(0.0, 3.0), arrive)

    def cut_off(self, node: int, seconds: float) -> None:
        """A cable is pulled, and put back."""
        name = self.followers[node].name
        self.cut.add(name)
        for engine in self.engines.values():
            engine.away.setdefault(node, self.world.now)

        def mend() -> None:
            self.cut.discard(name)
            for engine in self.engines.values():
                if self.followers[node] is engine.parts.get(node) and self.followers[node].part is engine:
                    engine.away.pop(node, None)

        self.world.after(seconds, mend)

    def restart_follower(self, node: int, seconds: float) -> None:
        """Its agent is killed, and its part with it; so much later there is another one."""
        self.followers[node].crash()

        def again() -> None:
            if not self.followers[node].alive:
                self.followers[node] = FollowerShell(self, node)

        self.world.after(seconds, again)

    def check(self, agent: AgentShell) -> None:
        """What must be true after every event."""
        lease = self.deadlines.lease * DRIFT + BOUND
        now, engine = self.world.now, agent.engine
        if isinstance(engine, SpreadEngine) and engine.alive and agent.alive:
            if (worker := engine.shown_better()) is not None:
                told = engine.shown[worker.rank].identity
                raise BrokenPromiseError(f"{self.name} shows worker {worker.rank} with {told}, and it is not so")
            if any(word.boot_id != engine.workers[rank].boot_id for rank, word in engine.shown.items()):
                raise BrokenPromiseError(f"{self.name} shows workers of an engine that is over")
            gone = [node for node, since in engine.away.items() if now > since + lease]
            if gone and not agent.stopped and engine.gate_open:
                raise BrokenPromiseError(f"{self.name} lets requests in, and nobody hears of node {gone[0]}")
            if gone and not agent.stopped and not agent.machine.closed_reason:
                raise BrokenPromiseError(f"{self.name} is closed without a reason")
        for follower in self.followers.values():
            # One that was stopped hears late what was said before.
            left = now > max(self.leaderless, follower.excused) + lease and not (self.leader and self.leader.alive)
            if left and follower.part is not None and not follower.stopped:
                raise BrokenPromiseError(f"{follower.name} still has a part of an engine that nobody leads")


class FollowerShell(Shell):
    """One following agent, and its part of an engine."""

    def __init__(self, site: Site, node: int) -> None:
        machine = FollowerMachine(
            site.world.random.randbytes(16), node, site.nodes, "leader", "simulated", (), site.deadlines
        )
        super().__init__(site.world, site.faults, f"{site.name}/node-{node}", machine)
        self.site, self.node, self.born = site, node, site.world.now
        self.part: SpreadEngine | None = None
        self._asked: dict[int, tuple[object, list[Signal]]] = {}
        self._requests = 0
        self._processes.append(self.world.spawn(self._watch()))
        self.feed(events.Start())

    def worker_asks(self, request: worker_pb2.WorkerRequest, answered: Signal) -> None:
        """A worker's request has arrived; one that is being answered is answered once."""
        key = request.rank, request.boot_id, request.sequence
        for known, waiting in self._asked.values():
            if known == key:
                waiting.append(answered)
                return
        if self.alive:
            self._requests += 1
            self._asked[self._requests] = key, [answered]
            self.feed(WorkerAsked(self._requests, request))

    def perform(self, command: Any) -> None:
        """Carries out one command."""
        match command:
            case events.Send(_, body):
                assert isinstance(body, worker_pb2.NodeMessage)
                if body.running and self.part is not None:
                    body.workers.extend(worker.word().status() for worker in self.part.of_node(self.node))
                self.site.up(self, body)
            case events.SetTimer(key, seconds):
                self.set_timer(key, seconds, lambda: events.TimerFired(key))
            case events.CancelTimer(key):
                self.cancel_timer(key)
            case Reply(number, reply):
                self._reply(self._asked.pop(number)[1], reply)
            case nodes.StartPart(_, port):
                self._processes.append(self.world.spawn(self._start(self._may_start(port))))
            case nodes.EndPart():
                self._processes.append(self.world.spawn(self._stop()))
            case nodes.SayLine(line):
                self.world.note(f"{self.name}: {line}")
            case _:
                raise AssertionError(command)

    def crash(self) -> None:
        """Its part goes with it."""
        super().crash()
        self._drop_part()

    def _reply(self, waiting: list[Signal], reply: worker_pb2.AgentReply | None) -> None:
        if reply is None or self.world.chance(self.faults.loss):
            return
        for answered in waiting:
            self.world.after(self.world.between(0.0001, 0.002), lambda: answered.set(reply))  # noqa: B023

    def _may_start(self, port: int) -> SpreadEngine:
        engine = self.site.engines[port]
        if self.part is not None:
            raise BrokenPromiseError(f"{self.name} starts a part, and has one")
        if self.node in engine.started:
            raise BrokenPromiseError(f"{self.name} starts its part of one engine twice")
        if self.born > engine.begun:
            raise BrokenPromiseError(f"{self.name} came later than the engine of which it starts a part")
        engine.started.add(self.node)
        return engine

    def _start(self, engine: SpreadEngine) -> Steps:
        yield self.world.between(0.05, 1.5)
        if self.world.chance(self.faults.task):
            self.feed(nodes.PartStarted("the simulator made this part fail"))
            return
        self.part, engine.parts[self.node] = engine, self
        for worker in engine.of_node(self.node):
            worker.alive = True
        self.feed(nodes.PartStarted())

    def _stop(self) -> Steps:
        yield self.world.between(0.01, 1.0)
        self._drop_part()
        self.feed(nodes.PartEnded())

    def _drop_part(self) -> None:
        part, self.part = self.part, None
        if part is not None:
            part.away.setdefault(self.node, self.world.now)
            for worker in part.of_node(self.node):
                part.kill_worker(worker)

    def _watch(self) -> Steps:
        before: object = None
        while True:
            yield LOOK_SECONDS
            if self._held is not None or self.part is None:
                continue
            workers = self.part.of_node(self.node)
            words = [(worker.boot_id, worker.alive, worker.state, worker.epoch) for worker in workers]
            if words != before:
                before = words
                self.feed(nodes.WordsChanged())
            if not all(worker.alive for worker in workers):
                self.feed(nodes.PartFailed("a worker is dead"))


class LeaderShell(Shell):
    """The leader in a leading agent's process, whose clock it has."""

    def __init__(self, agent: LeadingAgentShell) -> None:
        site = agent.site
        session = site.world.random.randbytes(16)
        machine = LeaderMachine(session, site.nodes, "leader", "leader", "simulated", (), site.deadlines)
        super().__init__(site.world, site.faults, f"{site.name}/leader", machine)
        self.machine: LeaderMachine
        self._rate, self._began = agent._rate, agent._began
        self.agent, self.site = agent, site
        self.engine: SpreadEngine | None = None
        self._signals: dict[object, Signal] = {}
        self._looks = 0
        self.feed(events.Start())

    def here(self) -> tuple[bytes, ...]:
        """As in FollowerMessage."""
        return () if self.engine is None else tuple(word.boot_id for word in self.engine.page())

    def trouble(self) -> str:
        """Of the engine, because of another node."""
        return self.machine.trouble(self.world.now * self._rate + self._began)

    def gather(self) -> Signal:
        """Set with a new engine, or with None."""
        return self._answered("gather", nodes.GatherNodes(GATHER_SECONDS))

    def look(self, seconds: float) -> Signal:
        """Set when all have looked, or are lost."""
        self._looks += 1
        return self._answered(self._looks, nodes.Look(self._looks, seconds))

    def end(self) -> Signal:
        """Set when all parts have ended, as far as is known."""
        return self._answered("end", nodes.EndParts())

    def _answered(self, key: object, event: object) -> Signal:
        signal = self._signals[key] = Signal()
        self.feed(event)
        return signal

    def perform(self, command: Any) -> None:
        """Carries out one command."""
        match command:
            case events.Send(peer, body):
                assert isinstance(body, worker_pb2.NodeCommand)
                self.site.down(peer, body)
            case events.SetTimer(key, seconds):
                self.set_timer(key, seconds, lambda: events.TimerFired(key))
            case events.CancelTimer(key):
                self.cancel_timer(key)
            case nodes.ShowWord():
                assert self.engine is not None
                self.engine.show(command)
            case WorkerAsked(number, request):
                answered = Signal()
                self.agent.worker_asks(request, answered)
                in_time = self.world.first_of(answered, self.site.deadlines.worker_reply)
                in_time.then(lambda reply: self.feed(Reply(number, reply)))
            case nodes.AllHere():
                self.engine = self.agent.new_engine()
                self.feed(nodes.Begin(self.engine.port))
                self._signals["gather"].set(self.engine)
            case nodes.NodesMissing(reason):
                self.world.note(f"{self.name}: {reason}")
                self._signals["gather"].set(None)
            case nodes.Looked(number):
                self._signals.pop(number).set()
            case nodes.PartsEnded():
                self._signals["end"].set()
            case nodes.SayLine(line):
                self.world.note(f"{self.name}: {line}")
            case _:
                raise AssertionError(command)


class LeadingAgentShell(AgentShell):
    """The agent of node 0: it launches its engine, with the parts of the other nodes, again and again. engine: makes
    one with so many workers."""

    def __init__(
        self,
        cluster: Cluster,
        name: str,
        agent_epoch: int,
        mode: manager_pb2.Mode,
        machine: type[AgentMachine],
        host: weights_pb2.Host,
        pool: str,
        site: Site,
        engine: Callable[[int], Engine],
    ) -> None:
        super().__init__(cluster, name, agent_epoch, mode, machine, host, pool)
        self.site, self._make = site, engine
        self.leader = site.leader = LeaderShell(self)
        self._processes.append(self.world.spawn(self._keep()))

    def new_engine(self) -> SpreadEngine:
        """Of which node 0 has its part already."""
        engine = self._make(self.site.nodes * self.world.random.choice((1, 1, 2)))
        assert isinstance(engine, SpreadEngine)
        engine.spread(self.site, len(self.site.engines) + 1)
        self.site.engines[engine.port] = engine
        return engine

    def stop_for(self, seconds: float) -> None:
        """Both machines stand still."""
        super().stop_for(seconds)
        self.leader.stop_for(seconds)

    def crash(self) -> None:
        """Its engine's part, and so the engine's API, goes with it."""
        super().crash()
        self.leader.crash()
        if self.leader.engine is not None:
            self.leader.engine.kill()
        if self.site.leader is self.leader:
            self.site.leaderless = self.world.now

    def start_task(self, key: events.Key, task: Any) -> None:
        """An operation decides by words that are as they are now."""
        if isinstance(task, events.ReadWords) and key[0] == "operation":
            self.run_task(key, task.seconds, self._look(task.seconds / 2), fallible=False)
        else:
            super().start_task(key, task)

    def _look(self, seconds: float) -> Steps:
        yield self.leader.look(seconds)
        return (yield from self._read_words())

    def _keep(self) -> Steps:
        while True:
            engine: SpreadEngine | None = yield self.leader.gather()
            if engine is not None:
                reason = yield from self._comes_up(engine)
                if not reason:
                    self.attach(engine)
                    reason = yield from self._until_gone(engine)
                self.world.note(f"{self.name}: {reason}; the engine is ended")
                engine.kill()
                if self.engine is engine:
                    self.engine_died(reason)
            yield self.leader.end()
            yield self.world.between(0.1, 1.0)

    def _comes_up(self, engine: SpreadEngine) -> Steps:
        end = self.world.now + COMES_UP_SECONDS
        while self.world.now < end:
            yield LOOK_SECONDS
            if reason := self._trouble(engine):
                return reason
            if len(engine.parts) == self.site.nodes - 1 and self._held is None:
                return ""
        return "the engine was not healthy in time"

    def _until_gone(self, engine: SpreadEngine) -> Steps:
        while not (reason := self._trouble(engine)):
            yield LOOK_SECONDS
        return reason

    def _trouble(self, engine: SpreadEngine) -> str:
        if self._held is not None:
            return ""  # it looks when it goes on
        return self.leader.trouble() if engine.alive else "the engine exited"
