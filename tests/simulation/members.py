"""The simulated shells of agents and trainer ranks."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from google.protobuf.message import Message as ProtobufMessage

from ckpt_engine.core.deadlines import Deadlines
from ckpt_engine.core.problems import CkptEngineError, ErrorCode, aborted, invalid, precondition, unavailable
from ckpt_engine.gate import page
from ckpt_engine.machines import events
from ckpt_engine.machines.agent.machine import AgentMachine
from ckpt_engine.machines.events import Peer, PeerLost
from ckpt_engine.machines.trainer.machine import TrainerMachine
from ckpt_engine.v1 import manager_pb2, weights_pb2, worker_pb2
from tests.simulation.collective import Booth, Communicator, Part
from tests.simulation.early import check_a_pause_comes_after_what_is_brought_early
from tests.simulation.engine import Engine
from tests.simulation.hosts import HOST, IN_COLLECTIVES
from tests.simulation.manager import ManagerShell
from tests.simulation.mechanism import check_sleep_is_changed_by_fenced_commands_only
from tests.simulation.parts import rank_part
from tests.simulation.shell import Faults, Shell, Stream
from tests.simulation.weights import Source, Truth, ref_of
from tests.simulation.world import BrokenPromiseError, Signal, Steps, World

REDIAL = 0.2
"""Seconds after which a rank looks for the next manager."""


class Cluster:
    """Where everybody finds the manager: None while it is down."""

    def __init__(self, world: World, faults: Faults, truth: Truth, deadlines: Deadlines) -> None:
        self.world, self.faults, self.truth, self.deadlines = world, faults, truth, deadlines
        self.manager: ManagerShell | None = None
        self.several = False  # members know several managers, and ranks ask the next one


class MemberShell(Shell):
    """A member: a stream to the manager, and its blobs."""

    envelopes: tuple[type[ProtobufMessage], type[ProtobufMessage]]

    def __init__(self, cluster: Cluster, name: str, machine: Any) -> None:
        super().__init__(cluster.world, cluster.faults, name, machine)
        self.cluster = cluster
        self.streams: dict[Peer, Stream] = {}
        self._dialled: ManagerShell | None = None
        self.ended: weights_pb2.Problem | None = None
        self.leaves = False  # it has said goodbye
        self.refusal: weights_pb2.Problem | None = None

    def perform(self, command: Any) -> None:
        """What agents and trainers have in common."""
        match command:
            case events.OpenStream(peer):
                manager = self.cluster.manager
                if manager is None or not manager.alive or self._cut_off():
                    delay = self.world.between(0.3, 2.0) if self._cut_off() else 0.05
                    self.world.after(delay, lambda: self.feed(PeerLost(peer, "nobody answers")))
                else:
                    self._dialled = manager
                    self.streams[peer] = manager.accept(self, peer)
            case events.Send(peer, body):
                if peer in self.streams:
                    self.streams[peer].send(True, body)
            case events.ClosePeer(peer):
                if peer in self.streams:
                    self.streams.pop(peer).close(by_manager=False)
            case events.SetTimer(key, seconds):
                self.set_timer(key, seconds, lambda: events.TimerFired(key))
            case events.CancelTimer(key):
                self.cancel_timer(key)
            case events.Run(key, task):
                self.start_task(key, task)
            case events.SessionEnded(problem, final):
                if final:
                    self.ended = problem
                elif problem.code == weights_pb2.Problem.CODE_FAILED_PRECONDITION:
                    self.refusal = problem
            case events.SessionOpened():
                return
            case _:
                self.own(command)

    def own(self, command: Any) -> None:
        """What only this kind of member does."""
        raise NotImplementedError

    def start_task(self, key: events.Key, task: Any) -> None:
        """What only this kind of member runs."""
        raise NotImplementedError

    def put(self, blobs: tuple[bytes, ...]) -> Steps:
        """Stores blobs with the manager."""
        manager = yield from self._reached()
        return tuple(manager.blobs.put(data) for data in blobs)

    def fetch(self, refs: tuple[manager_pb2.BlobRef, ...]) -> Steps:
        """Fetches blobs from the manager."""
        manager = yield from self._reached()
        return tuple(manager.blobs.get(ref) for ref in refs)

    def put_digests(self, source: Source, atoms: manager_pb2.BlobRef) -> Steps:
        """Digests what a source has sealed."""
        (wanted,) = yield from self.fetch((atoms,))
        if json.loads(wanted)["table"] != ref_of(source.table()).digest.hex():
            raise invalid("these atoms are of another table")
        yield self.world.between(0.005, 0.05)
        (ref,) = yield from self.put((json.dumps(source.digests(), sort_keys=True).encode(),))
        return events.SealResult(ref, 0.0, 0.0)

    def _reached(self) -> Steps:
        """The manager, when the way there and back is open."""
        yield self.world.between(0.001, 0.02)
        if self._cut_off():
            yield self.world.between(0.3, 2.0)
        return self._manager()

    def _cut_off(self) -> bool:
        return bool(self.faults.cuts) and not self.faults.cuts.isdisjoint({(self.name, True), (self.name, False)})

    def _manager(self) -> ManagerShell:
        manager = self._dialled  # one connection for streams and calls
        if manager is None or not manager.alive:
            manager = self.cluster.manager
        if manager is None or not manager.alive or self._cut_off():
            raise unavailable("the manager does not answer")
        return manager

    def leave(self) -> None:
        """Ends in good order."""
        self.leaves = True
        self.feed(events.Stop("leaving"))
        self.world.after(1.0, self.crash)

    def crash(self) -> None:
        """Its connections end with it."""
        super().crash()
        self.break_streams()

    def break_streams(self) -> None:
        """Its connection is lost."""
        for stream in self.streams.values():
            stream.break_off("connection lost")


class AgentShell(MemberShell):
    """One agent process with its engine, which may outlive it."""

    envelopes = (manager_pb2.ReplicaMessage, manager_pb2.ReplicaCommand)

    def __init__(
        self,
        cluster: Cluster,
        name: str,
        agent_epoch: int,
        mode: manager_pb2.Mode = manager_pb2.MODE_STANDALONE,
        machine: type[AgentMachine] = AgentMachine,
        host: weights_pb2.Host = HOST,
        pool: str = "",
    ) -> None:
        session = f"{name}-{cluster.world.random.getrandbits(32):08x}"
        super().__init__(
            cluster,
            name,
            machine(name, session, agent_epoch, mode, host, IN_COLLECTIVES, cluster.deadlines, pool=pool),
        )
        self.machine: AgentMachine
        self.pool = pool
        self.agent_epoch, self.mode, self.host = agent_epoch, mode, host
        self.engine: Engine | None = None
        self.attached = 0.0
        self._requests = 0
        self._replies: dict[int, Signal] = {}
        self.feed(events.Start())

    @property
    def cluster_served(self) -> str:
        """That of the manager that welcomed it last; empty if none has."""
        return self.machine._session.cluster

    def outcome(self) -> manager_pb2.Outcome:
        """Of its last install."""
        assert self.machine.replica.last_outcome is not None
        return self.machine.replica.last_outcome.outcome

    def attach(self, engine: Engine) -> None:
        """An engine is there and answers; an agent that finds another one in its directory ends."""
        if engine.held_by_another(self):
            self.crash()
            return
        self.engine, self.attached = engine, self.world.now
        engine.agent = self
        described = manager_pb2.Engine(kind="reference", version="0", url=f"http://127.0.0.1/{engine.name}")
        asleep = bool(engine.asleep) or (engine.in_order and engine.paused)  # vLLM calls a paused engine sleeping
        self.feed(
            events.EngineReady(
                described, len(engine.workers), engine.paused, asleep, engine.mark.sleeping, engine.hold.epoch != 0
            )
        )

    def engine_died(self, reason: str = "the simulated engine was killed") -> None:
        """The agent notices that its engine is gone."""
        if self.engine is not None:
            self.engine.agent = None
            self.engine = None
            self.feed(events.EngineExited(reason))

    def crash(self) -> None:
        """The engine goes on without it."""
        super().crash()
        if self.engine is not None and self.engine.agent is self:
            self.engine.agent = None

    def worker_asks(self, request: worker_pb2.WorkerRequest, answered: Signal) -> None:
        """A worker's request has arrived."""
        if self.alive:
            self._requests += 1
            self._replies[self._requests] = answered
            self.feed(events.WorkerAsked(self._requests, request))

    def own(self, command: Any) -> None:
        """Answers workers."""
        assert isinstance(command, events.Reply), command
        answered, reply = self._replies.pop(command.request), command.reply
        if reply is not None and not self.world.chance(self.faults.loss):
            data = reply.SerializeToString()
            delay = self.world.between(0.0001, 0.002)
            self.world.after(delay, lambda: answered.set(worker_pb2.AgentReply.FromString(data)))

    def start_task(self, key: events.Key, task: Any) -> None:
        """The agent's tasks."""
        match task:
            case events.ReadWords():
                self.run_task(key, task.seconds, self._read_words(), fallible=False)
            case events.MarkEngine():
                self.run_task(key, task.seconds, self._mark(task), fallible=False)
            case events.HoldRequests():
                self.run_task(key, task.seconds, self._hold(task), fallible=False)
            case events.PutBlobs(blobs):
                self.run_task(key, task.seconds, self.put(blobs))
            case events.FetchBlobs(refs):
                self.run_task(key, task.seconds, self.fetch(refs))
            case events.SealDirectory():
                self.run_task(key, task.seconds, self._seal(task))
            case _:
                self.run_task(key, task.seconds, self._call_engine(task), fallible=False)

    def _read_words(self) -> Steps:
        yield 0.0
        return self.engine.words() if self.engine is not None else events.Words((), False, "no engine", None)

    def _mark(self, task: events.MarkEngine) -> Steps:
        if self.engine is not None:
            self.engine.mark = task
        yield 0.0

    def _hold(self, task: events.HoldRequests) -> Steps:
        if self.engine is not None:
            until = self.world.now + task.hold_seconds
            self.engine.hold = page.RequestHold(task.epoch, until, task.closed) if task.epoch else page.RequestHold()
        yield 0.0

    def _call_engine(self, task: events.EngineTask) -> Steps:
        if self.engine is None:
            raise unavailable("there is no engine")
        whole = self.engine.alive and all(worker.alive for worker in self.engine.workers)  # as the agent saw it
        if isinstance(task, events.StampEngine) and whole and self.engine.held().identity != task.identity:
            raise BrokenPromiseError(f"{self.engine.name} is stamped with a version that its workers do not hold")
        operation = self.machine.replica.operation
        installs = operation is not None and operation.kind == "install" and isinstance(task, events.PauseEngine)
        if installs and self.engine.hold.epoch != operation.fence.epoch:
            raise BrokenPromiseError(f"{self.engine.name} is asked to pause before its gate keeps requests")
        check_sleep_is_changed_by_fenced_commands_only(self, task)
        if installs and whole and not operation._going_back:
            self._all_are_ready(operation.install)
        return (yield from self.engine.call(task))

    def _all_are_ready(self, install: manager_pb2.Install) -> None:
        assert self.engine is not None
        plans = {worker.rank: worker.plan.digest for worker in install.workers}
        for worker in self.engine.workers:
            if plans[worker.rank] not in worker.ready:
                raise BrokenPromiseError(f"{self.engine.name} pauses before worker {worker.rank} is ready")
        if not install.HasField("collective"):
            check_a_pause_comes_after_what_is_brought_early(self.engine, install)

    def _seal(self, task: events.SealDirectory) -> Steps:
        source = self.cluster.truth.sources[task.table.digest]
        if source.kind != "directory" or not source.sealed:
            raise precondition("no files to read")
        return (yield from self.put_digests(source, task.atoms))


class TrainerShell(MemberShell):
    """One trainer rank. calling: whether its trainer thread waits in update_weights."""

    envelopes = (manager_pb2.TrainerMessage, manager_pb2.TrainerCommand)

    def __init__(
        self, cluster: Cluster, source: Source, session: str, machine: type[TrainerMachine] = TrainerMachine
    ) -> None:
        super().__init__(
            cluster,
            f"{source.lineage}/{source.rank}",
            machine(source.lineage, source.rank, source.world_size, session, source.host, cluster.deadlines),
        )
        self.source = source
        self.session = session
        self.calling = False
        self.sealed_in_call = 0
        self.part: Part | None = None
        self.communicator: tuple[bytes, Communicator] | None = None
        self.booth = Booth(cluster.truth.collectives, self, source.host.name, source.collective)
        cluster.truth.collectives.booths[source.meeting] = self.booth
        self.accepted = Signal()
        self._called: ManagerShell | None = None
        self._sealed_epoch = self._sealed_version = 0
        cluster.truth.sources[ref_of(source.table()).digest] = source
        self.feed(events.Start())
        self.feed(events.PublishTable(source.table()))

    def withdraw(self) -> None:
        """Takes back what it published: nobody reads it any more."""
        self.source.lent = False
        self.accepted = Signal()
        self.feed(events.WithdrawTable())

    def publish(self) -> None:
        """Offers its weights again."""
        self.source.lent = True
        self.feed(events.PublishTable(self.source.table()))

    def crash(self) -> None:
        """Its memory is gone with it, files are not."""
        super().crash()
        self.source.alive = False

    def own(self, command: Any) -> None:
        """Remembers that the table was accepted."""
        match command:
            case events.PublicationDecided(manifest, _):
                if manifest is not None:
                    self.accepted.set()
            case events.Released():
                return
            case _:
                raise AssertionError(command)

    def start_task(self, key: events.Key, task: Any) -> None:
        """The trainer's tasks."""
        match task:
            case events.PutBlobs(blobs):
                self.run_task(key, task.seconds, self.put(blobs))
            case events.SealSource():
                if task.epoch <= self._sealed_epoch:
                    raise BrokenPromiseError(f"{self.name} seals for epoch {task.epoch} after {self._sealed_epoch}")
                self._sealed_epoch = task.epoch
                self.run_task(key, task.seconds, self._seal(task))
            case events.RunPart():
                self.run_task(key, task.seconds + 1.0, rank_part(self, task), fallible=False)

    @property
    def frozen(self) -> bool:
        """Whether its process is stopped."""
        return self._held is not None

    def _seal(self, task: events.SealSource) -> Steps:
        yield self.world.between(0.001, 0.02)
        if not self.source.lent:
            raise precondition("nothing is published")
        if task.epoch < self._sealed_epoch:
            raise aborted(f"epoch {task.epoch} was overtaken by {self._sealed_epoch}")
        if not task.keep and not self.calling:
            raise precondition("the trainer does not wait in update_weights")
        if task.keep and not (self.source.stays_sealed and self.source.sealed):
            raise precondition("nothing is sealed that stays so")
        self.source.seal(task.keep)
        self.sealed_in_call = 0 if task.keep else task.epoch
        self._sealed_version = task.version
        sealed = yield from self.put_digests(self.source, task.atoms)
        return dataclasses.replace(sealed, broken=self.cluster.truth.collectives.broken)

    def update(self, request: manager_pb2.UpdateWeightsRequest, patience: float) -> Steps:
        """The call of this rank: returns its report, or raises what it was refused with."""
        request.lineage, request.rank, request.session_id = self.source.lineage, self.source.rank, self.session
        self.calling = True
        end, result = self.world.now + patience, None
        while result is None:
            try:
                result = yield from self._call(request, end - self.world.now)
            except CkptEngineError as error:
                is_over = error.code != ErrorCode.UNAVAILABLE or self.world.now + REDIAL >= end or not self.alive
                result = error if is_over or not self._leader_is_lost() else None
            if result is None:  # as Trainer.update_weights does it
                if self.sealed_in_call:
                    request.version, self.sealed_in_call = self._sealed_version, 0
                    request.sealed.CopyFrom(self.machine._sealed_under)
                yield REDIAL
                while not self.machine._session.welcomed and self.world.now + REDIAL < end:
                    yield REDIAL
        while self.part is not None and self.alive:
            yield 0.05  # its thread is in there
        self.calling, self.sealed_in_call = False, 0
        if isinstance(result, CkptEngineError):
            raise result
        return result

    def _leader_is_lost(self) -> bool:
        """Whether the manager that this rank has called leads no more, or its session with it is over."""
        called = self._called
        gone = called is None or not called.alive or called is not self.cluster.manager
        return self.cluster.several and not self.leaves and (gone or not self.machine._session.welcomed)

    def _call(self, request: manager_pb2.UpdateWeightsRequest, patience: float) -> Steps:
        yield self.world.between(0.0005, self.faults.delay)
        manager = self._manager()
        call, over = manager.open_call(request)
        self._called = manager
        end = self.world.now + patience
        while self.cluster.several and not over.ready and not self._leader_is_lost() and self.world.now + REDIAL < end:
            yield self.world.first_of(over, REDIAL)
        lost = self.cluster.several and self._leader_is_lost()
        answer = yield self.world.first_of(over, 0.0 if lost else max(0.0, end - self.world.now))
        if answer is None or self._cut_off():
            self.world.after(self.world.between(0.0, 0.1), lambda: manager.cancel_call(call))
            raise unavailable("gave up waiting")
        if isinstance(answer, weights_pb2.Problem):
            raise CkptEngineError(answer)
        return answer
