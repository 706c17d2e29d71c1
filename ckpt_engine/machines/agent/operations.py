"""The agent's smaller operations: recording a loader, and resuming what need not be paused."""

from __future__ import annotations

from typing import ClassVar, cast

from ckpt_engine.core.manifest import other_format
from ckpt_engine.core.sleeping import AWAKE
from ckpt_engine.core.version import Fence
from ckpt_engine.machines.agent.check import STEPS, EngineCheck
from ckpt_engine.machines.agent.label import RETRY_SECONDS, LabellingOperation
from ckpt_engine.machines.agent.state import AgentReplica, Operation, acknowledged
from ckpt_engine.machines.events import (
    Done,
    FetchBlobs,
    InstallEngine,
    PauseEngine,
    PrepareEngine,
    PutBlobs,
    ReadWords,
    ResumeEngine,
    WakeEngine,
    Words,
)
from ckpt_engine.v1 import manager_pb2, weights_pb2, worker_pb2

Problem = weights_pb2.Problem


class Preparing(Operation):
    """Every worker records its loader against a manifest. Touches no weight that is served, and pauses nothing but an
    engine that is checked before its first update (check.py).

    Ends with a Prepared in `answer`. Workers that have recorded this manifest already are not asked again.
    """

    kind: ClassVar[str] = "prepare"

    def __init__(self, replica: AgentReplica, prepare: manager_pb2.Prepare) -> None:
        super().__init__(replica, prepare.fence)
        self.answer: manager_pb2.Prepared | None = None
        self._prepare = prepare
        self._manifest = b""
        self._giving_orders = False
        self._check: EngineCheck | None = None
        self._recorded: dict[int, tuple[bytes, worker_pb2.WorkerPrepared]] = {}

    def start(self, now: float) -> None:
        """Reads which workers there are now."""
        self._end = now + self._prepare.deadline_seconds
        self.run("look", ReadWords())

    def done(self, step: str, done: Done, now: float) -> None:
        """Takes the step after the one that ended."""
        if step in STEPS:
            assert self._check is not None
            if self._check.done(step, done, now):
                self._answer(self._check.problem)
            return
        if done.problem is not None and step != "engine":
            self._answer(problem=done.problem)
            return
        match step:
            case "look":
                self.replica.take_words(cast(Words, done.result))
                self._look(now)
            case "fetch":
                (self._manifest,) = cast(tuple[bytes, ...], done.result)
                self._giving_orders = True
                self.run("engine", PrepareEngine(max(0.001, self._end - now)))
            case "engine":
                self._giving_orders = False
                self._recorded_by_all(done, now)
            case "put":
                self._stored(cast(tuple[manager_pb2.BlobRef, ...], done.result), now)

    def reply_to(self, request: worker_pb2.WorkerRequest, now: float) -> worker_pb2.AgentReply | None:
        """Answers a worker: hands out the manifest, takes needs."""
        if self._check is not None:
            return self._check.reply_to(request, now)
        match request.WhichOneof("body"):
            case "want_prepare" if self._giving_orders:
                return worker_pb2.AgentReply(
                    prepare=worker_pb2.PrepareOrder(
                        fence=self._prepare.fence, manifest=self._manifest, deadline_seconds=self._end - now
                    )
                )
            case "prepared" if Fence.of(request.prepared.fence) == self.fence:
                self._recorded[request.rank] = (request.boot_id, request.prepared)
                return acknowledged()
        return None

    def engine_exited(self, reason: str, now: float) -> None:
        """Answers that there is no engine to record with."""
        self._answer(self.replica.problem(Problem.CODE_UNAVAILABLE, f"the engine ended: {reason}"))

    def _look(self, now: float) -> None:
        replica = self.replica
        if replica.engine is None:
            self._answer(replica.problem(Problem.CODE_UNAVAILABLE, f"no engine: {replica.engine_reason}"))
            return
        boots = {status.rank: status.boot_id for status in replica.words.workers}
        ranks = range(replica.engine.world_size)
        recorded = all(
            rank in boots
            and rank in replica.prepared
            and replica.prepared[rank].boot_id == boots[rank]
            and replica.prepared[rank].manifest_digest == self._prepare.manifest.digest
            for rank in ranks
        )
        if recorded:
            # Their needs are stored again: the manager that asks may have been restarted without them.
            self._recorded = {}
            self.run("put", PutBlobs(tuple(replica.needs[rank] for rank in ranks), self._seconds(now)))
        else:
            self.run("fetch", FetchBlobs((self._prepare.manifest,), self._seconds(now)))

    def _recorded_by_all(self, done: Done, now: float) -> None:
        engine = self.replica.engine
        assert engine is not None
        problems = [self._recorded[rank][1] for rank in sorted(self._recorded)]
        failed = [prepared.problem for prepared in problems if prepared.HasField("problem")]
        first = min(failed, key=lambda problem: bool(problem.kept), default=None)
        other = next((why for rank in self._recorded if (why := self._other_format(rank))), "")
        missing = [rank for rank in range(engine.world_size) if rank not in self._recorded]
        unknown = sorted(rank for rank in self._recorded if rank >= engine.world_size)
        if first is not None:
            replica_problem = weights_pb2.Problem()
            replica_problem.CopyFrom(first)
            replica_problem.replica = self.replica.name
            for problem in failed if first.kept else ():
                replica_problem.kept.update(problem.kept)
            self._answer(replica_problem)
        elif other:
            self._answer(self.replica.problem(Problem.CODE_FAILED_PRECONDITION, other))
        elif unknown:
            message = (
                f"the engine says that it has {engine.world_size} workers, but workers {unknown} recorded its loader"
            )
            self._answer(self.replica.problem(Problem.CODE_INTERNAL, message))
        elif missing and done.problem is not None:
            self._answer(done.problem)
        elif missing:
            self._answer(
                self.replica.problem(
                    Problem.CODE_INTERNAL,
                    f"the engine says that it recorded its loader, but workers {missing} told nothing",
                )
            )
        else:
            needs = tuple(self._recorded[rank][1].needs for rank in range(engine.world_size))
            self.run("put", PutBlobs(needs, self._seconds(now)))

    def _other_format(self, rank: int) -> str:
        """Why a worker's engine must be restarted: it may have loaded another release than its agent. Empty: it need
        not."""
        return other_format(f"worker {rank} of replica {self.replica.name!r}", self._recorded[rank][1].digest_format)

    def _stored(self, refs: tuple[manager_pb2.BlobRef, ...], now: float) -> None:
        for rank, (boot_id, recorded) in self._recorded.items():
            self.replica.prepared[rank] = manager_pb2.PreparedWorker(
                rank=rank,
                needs=refs[rank],
                host=recorded.host,
                boot_id=boot_id,
                manifest_digest=self._prepare.manifest.digest,
            )
            self.replica.needs[rank] = recorded.needs
            self.replica.models[rank] = recorded.model
            self.replica.stage_memory[rank] = recorded.stage_memory
        if EngineCheck.is_due(self.replica):
            manifest, models = self._prepare.manifest.digest, self.replica.models
            self._check = EngineCheck(self.replica, self.fence, manifest, models, self._end, self.run)
            self._check.start(now)
        else:
            self._answer()

    def _answer(self, problem: Problem | None = None) -> None:
        self.answer = manager_pb2.Prepared(
            fence=self._prepare.fence,
            manifest_digest=self._prepare.manifest.digest,
            workers=[]
            if problem is not None
            else [self.replica.prepared[rank] for rank in sorted(self.replica.prepared)],
            problem=problem,
        )
        self.replica.end()

    def _seconds(self, now: float) -> float:
        return max(0.001, min(self.replica.deadlines.blobs, self._end - now))


class Resuming(LabellingOperation):
    """Resumes an engine that is, or may be, paused or half asleep although its workers are whole, and lets in requests
    that its gate holds for an update that has ended. What fails is tried again at the next look.

    If an earlier agent may have given out orders, the workers are first called to an install for which there is no
    order. An engine calls its workers for one thing at a time, so none of them acts on an old order afterwards.
    """

    kind: ClassVar[str] = "resume"

    def start(self, now: float) -> None:
        """Reads the words once more: those that began this may be older than the last install."""
        self.run("look", ReadWords())

    def done(self, step: str, done: Done, now: float) -> None:
        """Takes the step after the one that ended. Ends if a step failed, or if there is nothing to resume any more."""
        replica = self.replica
        quiesce = replica.deadlines.quiesce
        if step == "stamp":
            if self.labelled(done, now):
                self._resume()
            else:
                self.set_timer("retry", RETRY_SECONDS)
            return
        if done.problem is None:
            match step:
                case "look":
                    replica.take_words(cast(Words, done.result))
                    if not replica.words.open or replica.orders:
                        replica.end()
                    elif replica.accounted:
                        self._resume()
                    else:
                        self.run("pause", PauseEngine(manager_pb2.PAUSE_MODE_UNSPECIFIED, quiesce))
                    return
                case "pause":
                    replica.paused = True
                    self.run("account", InstallEngine(0, quiesce))
                    return
                case "account":
                    replica.accounted = True
                    self.run("look", ReadWords())
                    return
                case "rouse":
                    self.run("mark", replica.mark(AWAKE))
                    return
                case "mark":
                    replica.sleeping = AWAKE
                    self._resume()
                    return
                case "resume":
                    replica.paused = False
                    if replica.holding:
                        self.run("let in", replica.hold(0, 0.0))
                        return
                case "let in":
                    replica.holding = False
        replica.end()

    def timer(self, step: str, now: float) -> None:
        """Tries again after the engine refused its label."""
        self._resume()

    def _resume(self) -> None:
        """Sets the label, wakes the caches, resumes, as after an install."""
        replica = self.replica
        reserve = replica.deadlines.resume
        if self.label(reserve, reserve):
            return
        if replica.sleeping:
            replica.paused = None  # some engines resume by being woken
            self.run("rouse", WakeEngine(tuple(replica.sleeping.tags), reserve))
        else:
            self.run("resume", ResumeEngine(reserve))

    def engine_exited(self, reason: str, now: float) -> None:
        """Ends: there is nothing left to resume."""
        self.replica.end()
