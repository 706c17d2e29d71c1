"""A simulated inference engine: workers with weights and state words, and an API that pauses and resumes.

Calls to its workers (prepare, install) are carried out in their order, one after the other, also those whose caller
gave up: a hung call takes effect late. Engines differ in pausing and resuming: half of them do that in the same order
too (the engine's core does it), half of them at once, beside a running install (the API process does it). Workers ask
their agent over a channel that may lose requests and replies, and repeat themselves.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from ckpt_engine.core.check_verdict import Score
from ckpt_engine.core.manifest import DIGEST_FORMAT
from ckpt_engine.core.problems import CkptEngineError, aborted, data_loss, internal, invalid, precondition, unavailable
from ckpt_engine.core.sleeping import AWAKE, TAGS
from ckpt_engine.gate import page
from ckpt_engine.gate.holding import DecisionKind, GateDecision, decide
from ckpt_engine.gate.page import WorkerWord
from ckpt_engine.machines import events
from ckpt_engine.v1 import manager_pb2, weights_pb2, worker_pb2
from tests.simulation.collective import Communicator
from tests.simulation.early import Stage, bring_early, key_of
from tests.simulation.hosts import HOST, WORKERS_READ, locator_of, ways
from tests.simulation.parts import worker_joins, worker_part
from tests.simulation.shell import Faults
from tests.simulation.weights import SLICES, SourceGoneError, Truth
from tests.simulation.world import BrokenPromiseError, Process, Signal, Steps, World

NONE, DIRTY, CLEAN = manager_pb2.WORKER_STATE_NONE, manager_pb2.WORKER_STATE_DIRTY, manager_pb2.WORKER_STATE_CLEAN


FOREVER = 1e6
"""Seconds, longer than any story."""


class Agent(Protocol):
    """Where workers ask."""

    alive: bool

    def worker_asks(self, request: worker_pb2.WorkerRequest, answered: Signal) -> None: ...


@dataclass
class Worker:
    """One engine rank. weights: a tag for each slice; "" is what a fresh engine has."""

    rank: int
    boot_id: bytes
    state: manager_pb2.WorkerState = NONE
    epoch: int = 0
    identity: weights_pb2.Identity | None = None
    weights: list[str] = field(default_factory=lambda: [""] * SLICES)
    alive: bool = True
    fence: weights_pb2.Fence = field(default_factory=weights_pb2.Fence)
    process: Process | None = None
    ready: frozenset[bytes] = frozenset()  # digests of the plans that it has ready
    communicator: tuple[bytes, Communicator] | None = None
    frozen: bool = False  # its process is stopped
    asked: int = 0
    order: tuple[int, float] = (0, 0.0)  # epoch and end of the install order that it carries out
    stage: Stage = field(default_factory=Stage)
    asking: Signal | None = None  # set when the question before has its answer

    def word(self) -> WorkerWord:
        """Its state word, as it stays in the page when the worker dies."""
        identity = self.identity if self.state == CLEAN else None
        return WorkerWord(self.rank, self.boot_id, 100 + self.rank, self.alive, self.state, self.epoch, identity)

    def carries_out(self, epoch: int, now: float) -> bool:
        """Whether it has an order of this epoch, and time to read for it."""
        return self.alive and self.order[0] == epoch and now < self.order[1]

    def check_fence(self, fence: weights_pb2.Fence) -> None:
        """Raises ABORTED: the rule is that of install/installer.py."""
        if fence.epoch <= max(self.fence.epoch, self.epoch):
            raise aborted(f"epoch {fence.epoch} was overtaken by {self.fence.epoch}")
        self.fence = fence


class Engine:
    """One process tree. agent: who answers its workers now; None while there is none."""

    def __init__(
        self,
        world: World,
        faults: Faults,
        truth: Truth,
        name: str,
        workers: int,
        models: set[str],
        host: weights_pb2.Host = HOST,
    ) -> None:
        self.world, self.faults, self.truth, self.name, self.models = world, faults, truth, name, models
        self.host = host
        self.prepares = 0  # how often it was asked to record its loader
        self.workers = [Worker(rank, world.random.randbytes(16)) for rank in range(workers)]
        self.agent: Agent | None = None
        self.paused = False
        self.asleep: set[str] = set()
        self.mark = events.MarkEngine(False, AWAKE)  # what its page says, and so its gate
        self.label: weights_pb2.Identity | None = None  # what it calls its tokens by
        self.hold = page.RequestHold()
        self.requests = self.failed_requests = 0  # as its gate counts them
        self.inside = self.discarded = False  # requests that may be there; weights that are not
        self.alive = True
        self.in_order = world.chance(0.5)
        self.offset = 0.0  # of all log-probabilities that it tells
        self.mute = False  # questions for log-probabilities get no answer
        self._shut: dict[tuple[bytes, bytes], bool] = {}
        self._judged: tuple[object, events.Words] | None = None
        self._decided: tuple[object, GateDecision] | None = None
        self._last = Signal()
        self._last.set()
        self._processes: list[Process] = []

    def kill(self) -> None:
        """All its processes are gone."""
        self.alive = False
        for process in self._processes:
            process.kill()

    def kill_worker(self, worker: Worker) -> None:
        """One of its workers is gone: calls to the workers never end from now on."""
        worker.alive = False
        if worker.process is not None:
            worker.process.kill()
        worker.stage.kill()

    def held_by_another(self, agent: Agent | None) -> bool:
        """Whether another agent that lives holds the lock in the engine's directory."""
        return self.agent is not None and self.agent is not agent and self.agent.alive

    def words(self) -> events.Words:
        """The page and the gate's own verdict."""
        if not self.alive:
            return events.Words((), False, "the engine is dead", None)
        own = self.mark.own_weights
        key = (own, self.page_key())
        if self._judged is None or self._judged[0] != key:
            words = self.page()
            judged = page.verdict(words, own)
            statuses = tuple(word.status() for word in words)
            self._judged = key, events.Words(statuses, judged.open, judged.reason, judged.identity, None, 0, 0)
        if not self.requests:
            return self._judged[1]
        return replace(self._judged[1], requests=self.requests, failed_requests=self.failed_requests)

    def page(self) -> list[WorkerWord]:
        """What stands in the page that the gate reads."""
        return [worker.word() for worker in self.workers]

    def page_key(self) -> list[object]:
        """Differs when the page does."""
        return [(worker.alive, worker.state, worker.epoch, id(worker.identity)) for worker in self.workers]

    def held(self) -> events.Words:
        """What its workers hold."""
        return self.words()

    def page_is_right(self, whole: bool) -> bool:
        """Whether the page may say what it says. whole: whether all workers live and hold one version."""
        return self.words().open == whole

    def agent_of(self, worker: Worker) -> Agent | None:
        """Whom a worker asks."""
        return self.agent

    def gate(self) -> GateDecision:
        """What the gate does with a request now; the rule is that of gate/holding.py, which looks at no other time."""
        now = self.world.now
        key = (self.mark, self.hold, now < self.hold.until, self.page_key())
        if self._decided is None or self._decided[0] != key:
            mark = page.EngineMark(self.mark.own_weights, self.mark.sleeping)
            self._decided = key, decide(self.page(), mark, self.hold, now)
        return self._decided[1]

    @property
    def computing(self) -> weights_pb2.Identity | None:
        """The version that its tokens are of, if it may be making any and they are of a version."""
        may = self.alive and not self.paused and not self.asleep and (self.inside or self.gate_open)
        return self.words().identity if may else None

    @property
    def gate_open(self) -> bool:
        """Whether requests are let in."""
        return self.alive and self.gate().kind is DecisionKind.ADMIT

    def call(self, task: events.EngineTask) -> Steps:
        """The caller's side of an HTTP call; raises CkptEngineError."""
        if not self.alive:
            raise unavailable("the engine does not answer")
        if isinstance(task, events.ScoreEngine):
            yield FOREVER if self.mute else self.world.between(0.001, 0.05)
            values = () if task.cached else (self.offset,) * (len(task.tokens) - 1)
            return Score(values, (1,) * task.more, (0.0,) * task.more)
        stamp_no = self.faults.stamp_no if isinstance(task, events.StampEngine) else 0.0
        if self.world.chance(self.faults.engine_no) or self.world.chance(stamp_no):
            yield self.world.between(0.0, 0.05)
            raise internal("the simulated engine says no")
        if self.in_order or not isinstance(task, events.PauseEngine | events.ResumeEngine | events.StampEngine):
            before, self._last = self._last, Signal()
            process = self.world.spawn(self._queued(task, before, self._last))
        else:
            process = self.world.spawn(self._work(task))
        self._processes.append(process)
        yield process.over

    def _queued(self, task: events.EngineTask, before: Signal, after: Signal) -> Steps:
        yield before
        if self.world.chance(self.faults.engine_hang):
            yield self.world.between(1.0, 12.0)
        yield from self._work(task)
        after.set()

    def _work(self, task: events.EngineTask) -> Steps:
        yield self.world.between(0.001, 0.05)
        match task:
            case events.PauseEngine(mode):
                self.paused = True
                if mode == manager_pb2.PAUSE_MODE_ABORT:
                    self.inside = False
            case events.ResumeEngine():
                self.paused = False
            case events.StampEngine(identity):
                self.label = identity
            case events.DiscardEngine():
                self._discard()
            case events.SleepEngine(level):
                self._sleep(level)
            case events.WakeEngine(tags):
                if "kv_cache" in tags and "weights" in self.asleep - set(tags):
                    raise BrokenPromiseError(f"{self.name}: caches are woken before weights")
                self.asleep -= set(tags or TAGS)
                if self.in_order and not self.asleep:
                    self.paused = False  # as vLLM does
            case events.PrepareEngine():
                self.prepares += 1
                yield from self._all(self._prepare)
            case events.InstallEngine():
                if "weights" in self.asleep:
                    raise BrokenPromiseError(f"{self.name}: weights are installed into memory that is given up")
                if not self.world.chance(self.faults.engine_lies):
                    yield from self._all(self._install)

    def _discard(self) -> None:
        """As in EngineWorker.discard: the word says that there is nothing."""
        for worker in self.workers:
            worker.state, worker.identity, worker.ready = NONE, None, frozenset()
            worker.stage.empty()

    def _sleep(self, level: int) -> None:
        """At level 2 a worker says that it holds nothing before that is so. A request may still come a moment later."""
        self.asleep = set(TAGS)
        self.paused = self.paused or self.in_order
        for worker in self.workers:
            worker.stage.empty()
        if level == 2:
            self._discard()
            self.discarded = True
            for worker in self.workers:
                worker.weights = [""] * SLICES

    def _all(self, hook: object) -> Steps:
        for worker in self.workers:
            worker.process = self.world.spawn(hook(worker))  # type: ignore[operator]
            self._processes.append(worker.process)
            if not worker.alive:
                worker.process.kill()
        for process in [worker.process for worker in self.workers]:
            assert process is not None
            yield process.over

    # -- what workers do

    def ask(self, worker: Worker, request: worker_pb2.WorkerRequest, patience: float) -> Steps:
        """Asks until there is an answer, or for so many seconds. One question follows the other."""
        if not worker.stage.there:
            return (yield from self._ask(worker, request, patience))
        before, worker.asking = worker.asking, Signal()
        mine = worker.asking
        if before is not None:
            yield before
        reply = yield from self._ask(worker, request, patience)
        mine.set()
        return reply

    def _ask(self, worker: Worker, request: worker_pb2.WorkerRequest, patience: float) -> Steps:
        worker.asked += 1
        request.rank, request.boot_id, request.sequence = worker.rank, worker.boot_id, worker.asked
        end = self.world.now + patience
        while self.world.now < end:
            answered = Signal()
            agent = self.agent_of(worker)
            if agent is not None and not self.world.chance(self.faults.loss):
                copy = worker_pb2.WorkerRequest.FromString(request.SerializeToString())
                self.world.after(self.world.between(0.0001, 0.002), lambda: agent.worker_asks(copy, answered))  # type: ignore[union-attr]  # noqa: B023
            reply = yield self.world.first_of(answered, 0.5)
            if reply is not None:
                return reply
        return None

    def _prepare(self, worker: Worker) -> Steps:
        reply = yield from self.ask(worker, _request(want_prepare=worker_pb2.WantOrder()), 3.0)
        yield from worker.stage.stop()
        if reply is not None and reply.HasField("ready"):
            yield from self._get_ready(worker, reply.ready)
            return
        if reply is None or not reply.HasField("prepare"):
            return
        yield self.world.between(0.01, 0.1)
        prepared = worker_pb2.WorkerPrepared(digest_format=DIGEST_FORMAT, fence=reply.prepare.fence, host=self.host)
        model = reply.prepare.manifest.decode()
        if model in self.models:
            # Where there are several hosts workers are alike, and so are their needs; on one host each has its own.
            own = [self.name, worker.rank, worker.boot_id.hex()] if self.host == HOST else []
            prepared.needs = json.dumps([*own, model]).encode()
        else:
            prepared.problem.CopyFrom(invalid(f"this engine cannot load {model}").problem)
        yield from self.ask(worker, _request(prepared=prepared), 3.0)

    def _get_ready(self, worker: Worker, order: worker_pb2.ReadyOrder) -> Steps:
        """It keeps two plans: the one that it was ready for last, and this one."""
        yield self.world.between(0.001, 0.1)
        ready = worker_pb2.WorkerReady(fence=order.fence)
        if self.world.chance(self.faults.worker_early):
            ready.problem.CopyFrom(unavailable("the simulator made this worker fail to get ready").problem)
        elif not order.HasField("collective") and (refused := self._unopened(worker, json.loads(order.plan))):
            ready.unopened.extend(refused)
            ready.problem.CopyFrom(unavailable(refused[0].reason).problem)
        else:
            worker.ready = frozenset({*sorted(worker.ready)[:1], hashlib.sha256(order.plan).digest()})
        try:
            if order.HasField("collective"):
                yield from worker_joins(self, worker, order)
        except CkptEngineError as error:
            ready.problem.CopyFrom(error.problem)
        made = [] if worker.communicator is None else [worker.communicator[0]]
        ready.plans.extend([*sorted(worker.ready), *made])
        ready.stages = worker.stage.there
        if worker.stage.there and not (order.asleep or order.HasField("collective") or ready.HasField("problem")):
            ready.early_bytes = SLICES
            process = self.world.spawn(bring_early(self, worker, order))
            worker.stage.begin(process)
            self._processes.append(process)
        yield from self.ask(worker, _request(ready=ready), 3.0)

    def _unopened(self, worker: Worker, plan: Mapping[str, str]) -> list[weights_pb2.Unopened]:
        """The sources of a plan that the system does not let a worker open, which its manager cannot know."""
        found = []
        for digest in [bytes.fromhex(each) for each in sorted(set(plan.values()))]:
            if self.cannot_open(worker, digest):
                source = self.truth.sources[digest]
                (way, *_) = ways(source.host, source.offered, self.host, WORKERS_READ)
                said = f"the simulator does not let this worker open {way.transport}"
                told = weights_pb2.Unopened(worker_rank=worker.rank, transport=way.transport, reason=said)
                told.locator = locator_of(digest)
                found.append(told)
        return found

    def cannot_open(self, worker: Worker, table: bytes) -> bool:
        """Whether a worker is not let near a source: the same each time, until the world heals."""
        key = worker.boot_id, table
        if self.faults.cannot_open and key not in self._shut:
            self._shut[key] = self.world.chance(self.faults.cannot_open)
        return bool(self.faults.cannot_open) and self._shut[key]

    def _install(self, worker: Worker) -> Steps:
        reply = yield from self.ask(worker, _request(want_install=worker_pb2.WantOrder()), 3.0)
        yield from worker.stage.stop()
        if reply is None or not reply.HasField("install"):
            return
        order = reply.install
        end = self.world.now + order.deadline_seconds
        worker.order = order.fence.epoch, end
        yield self.world.between(0.001, 0.05)
        if self.world.chance(self.faults.slow):
            yield self.world.between(1.0, 10.0)
        try:
            if self.world.now >= end:
                raise precondition("too late to begin")
            if self.world.chance(self.faults.worker_early):
                raise unavailable("the simulator made this worker fail before its first byte")
            self._check_fence(worker, order)
            if order.HasField("collective"):
                yield from worker_part(self, worker, order, end)
            else:
                if self.world.chance(self.faults.write_late):
                    yield self.world.between(1.0, 25.0)
                yield from self._read(worker, order, end)
            problem = None
        except CkptEngineError as error:
            problem = error.problem
        worker.order = 0, 0.0
        report = manager_pb2.WorkerReport(rank=worker.rank, bytes=SLICES, verified=SLICES, problem=problem)
        installed = worker_pb2.WorkerInstalled(fence=order.fence, report=report)
        yield from self.ask(worker, _request(installed=installed), 3.0)

    def _check_fence(self, worker: Worker, order: worker_pb2.InstallOrder) -> None:
        worker.check_fence(order.fence)

    def _read(self, worker: Worker, order: worker_pb2.InstallOrder, end: float) -> Steps:
        plan, expected = json.loads(order.plan), json.loads(order.expected)
        early = worker.stage.tags if worker.stage.held == key_of(order.plan, order.expected) else None
        worker.state, worker.epoch = DIRTY, order.fence.epoch
        for index in range(SLICES):
            yield self.world.between(0.001, 0.03)
            if self.world.now >= end:
                raise precondition("out of time in the middle")
            if self.world.chance(self.faults.worker_late):
                raise unavailable("the simulator made this worker fail in the middle")
            if self.world.chance(self.faults.read_late):
                yield self.world.between(0.2, 6.0)
            if early is not None:
                worker.weights[index] = early[index]
                continue
            if self.cannot_open(worker, bytes.fromhex(plan[str(index)])):
                raise BrokenPromiseError(f"{self.name} was paused for memory that it cannot open")
            source = self.truth.sources[bytes.fromhex(plan[str(index)])]
            if not ways(source.host, source.offered, self.host, WORKERS_READ):
                raise BrokenPromiseError(f"{self.name} on {self.host.name} is to read memory of {source.host.name}")
            try:
                worker.weights[index] = source.read(index)
            except SourceGoneError as error:
                raise unavailable(str(error)) from error
        progress = worker_pb2.WorkerProgress(
            fence=order.fence, stage=manager_pb2.STAGE_TRANSFER, bytes_done=SLICES, bytes_total=SLICES
        )
        yield from self.ask(worker, worker_pb2.WorkerRequest(progress=progress), 0.1)
        if {str(index): tag for index, tag in enumerate(worker.weights)} != expected:
            raise data_loss("what was read is not what was sealed")
        worker.state, worker.identity = CLEAN, order.identity
        worker.stage.held = None


def _request(
    want_prepare: worker_pb2.WantOrder | None = None,
    prepared: worker_pb2.WorkerPrepared | None = None,
    want_install: worker_pb2.WantOrder | None = None,
    installed: worker_pb2.WorkerInstalled | None = None,
    ready: worker_pb2.WorkerReady | None = None,
) -> worker_pb2.WorkerRequest:
    return worker_pb2.WorkerRequest(
        want_prepare=want_prepare, prepared=prepared, want_install=want_install, installed=installed, ready=ready
    )
