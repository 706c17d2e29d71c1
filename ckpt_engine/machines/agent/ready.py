"""What must hold before an engine pauses: the install fits the engine, and every worker is ready for its plan.

A ready worker has opened, mapped, pinned and compiled all that its plan needs, while the engine went on. Workers report
what they have ready. One that is known to be ready is not asked again, since a question is a short pause of some
engines.

A worker with stage memory is asked each time: it then brings what it can of the version into that memory, on a thread
of its own, while the engine computes, and verifies it there. The engine pauses once every worker has told that this is
done. If one tells that it cannot be done, the install goes back before it has touched anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ckpt_engine.core.pausing import check_pause_mode
from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.core.sleeping import SleepStep, update_steps
from ckpt_engine.core.version import Fence
from ckpt_engine.machines.agent.state import AgentReplica, ReadyWorker, acknowledged
from ckpt_engine.machines.events import Done, PrepareEngine
from ckpt_engine.v1 import manager_pb2, weights_pb2, worker_pb2

Problem = weights_pb2.Problem

SILENCE_SECONDS = 30.0
"""How long a worker may tell nothing of what it brings into stage memory. It tells several times a second, but not
while it pins what it reads, which takes 0.1 s a GB the first time."""


def steps_around(
    replica: AgentReplica, install: manager_pb2.Install, remaining: float
) -> tuple[SleepStep, ...] | Problem:
    """The steps of an install around an engine that may sleep, or why it cannot begin. remaining: seconds for it."""
    engine = replica.engine
    if engine is None:
        return replica.problem(Problem.CODE_UNAVAILABLE, f"no engine to install into: {replica.engine_reason}")
    try:
        # The manager asks this too, but of the engine that was there when the update began.
        check_pause_mode(replica.name, engine.engine, install.pause_mode)
        steps = update_steps(replica.mode, replica.sleeping)
    except CkptEngineError as error:
        return replica.problem(error.problem.code, error.problem.message)
    ranks = sorted(worker.rank for worker in install.workers)
    if ranks != list(range(engine.world_size)):
        return replica.problem(
            Problem.CODE_FAILED_PRECONDITION,
            f"the plan is for workers {ranks}, but the engine has workers 0 to {engine.world_size - 1}",
        )
    if remaining <= 0:
        return replica.problem(Problem.CODE_DEADLINE_EXCEEDED, "the agent was late: there was no time left to begin")
    return steps


def blobs_of(install: manager_pb2.Install) -> list[manager_pb2.BlobRef]:
    """The blobs that an agent fetches to carry out an install, each once."""
    refs = [ref for worker in install.workers for ref in (worker.plan, worker.expected)]
    refs += [install.collective.plan] if install.HasField("collective") else []
    return list({ref.digest: ref for ref in refs}.values())


def part_of(
    install: manager_pb2.Install, worker: manager_pb2.WorkerInstall, blobs: Mapping[bytes, bytes]
) -> worker_pb2.CollectiveOrder | None:
    """A worker's order for the collective of an install; None: there is no collective."""
    if not install.HasField("collective"):
        return None
    collective = install.collective
    return worker_pb2.CollectiveOrder(
        members=collective.members,
        member=worker.member,
        plan=blobs[collective.plan.digest],
        meeting=collective.meeting,
        communicator=collective.communicator,
        arm_seconds=collective.arm_seconds,
    )


class Readying:
    """Gets the workers of one install ready."""

    def __init__(
        self, replica: AgentReplica, install: manager_pb2.Install, unopened: dict[int, Sequence[weights_pb2.Unopened]]
    ) -> None:
        """unopened: filled, by rank, with the regions that workers could not open."""
        self._unopened = unopened
        self._replica = replica
        self._install = install
        self._workers = {worker.rank: worker for worker in install.workers}
        self._problems: dict[int, Problem] = {}
        self._giving = False
        self._respondents: set[int] = set()  # ranks that have answered in this install
        self._bringing: set[int] = set()  # ranks that have begun to bring into stage memory
        self._verified: set[int] = set()  # ranks of which all of that lies there, verified
        self._heard: dict[int, float] = {}  # by rank, when it told last how far that is

    def unready(self) -> list[int]:
        """The ranks of workers that are not known to be ready."""
        boots = {status.rank: status.boot_id for status in self._replica.words.workers}
        ready, communicator = self._replica.ready, self._install.collective.communicator
        return [
            rank
            for rank, worker in sorted(self._workers.items())
            if rank not in ready
            or ready[rank].boot_id != boots.get(rank)
            or not ready[rank].plans.issuperset({worker.plan.digest, communicator or worker.plan.digest})
            or (ready[rank].stages and rank not in self._respondents and not self._replica.sleeping)
        ]

    def begin(self, seconds: float) -> PrepareEngine:
        """Lets each worker that asks have its order. Returns the task that has the engine call its workers."""
        self._giving = True
        return PrepareEngine(seconds)

    def reply_to(
        self, request: worker_pb2.WorkerRequest, blobs: Mapping[bytes, bytes], now: float, seconds: float
    ) -> worker_pb2.AgentReply | None:
        """Answers a worker: hands out its order, takes its report. None: the request is for something else. seconds:
        that are left."""
        match request.WhichOneof("body"):
            case "want_prepare" if self._giving and seconds > 0 and request.rank in self._workers:
                self._replica.ready.pop(request.rank, None)  # it may let go of something, and its answer may not come
                worker = self._workers[request.rank]
                return worker_pb2.AgentReply(
                    ready=worker_pb2.ReadyOrder(
                        fence=self._install.fence,
                        plan=blobs[worker.plan.digest],
                        deadline_seconds=seconds,
                        asleep=bool(self._replica.sleeping),
                        collective=part_of(self._install, worker, blobs),
                        expected=blobs[worker.expected.digest],
                    )
                )
            case "ready" if Fence.of(request.ready.fence) == Fence.of(self._install.fence):
                answer = request.ready
                found = ReadyWorker(request.boot_id, frozenset(answer.plans), answer.stages)
                self._replica.ready[request.rank] = found
                self._replica.stage_memory[request.rank] = answer.stage_memory
                self._respondents.add(request.rank)
                if answer.early_bytes:
                    self._bringing.add(request.rank)
                    self._heard[request.rank] = now
                self._take_unopened(request)
                if answer.HasField("problem"):
                    self._problems[request.rank] = answer.problem
                return acknowledged()
            case "early" if Fence.of(request.early.fence) == Fence.of(self._install.fence):
                self._heard[request.rank] = now
                if request.early.HasField("problem"):
                    self._problems[request.rank] = request.early.problem
                if request.early.verified:
                    self._verified.add(request.rank)
                return acknowledged()
        return None

    def _take_unopened(self, request: worker_pb2.WorkerRequest) -> None:
        """Adds to what this process reported before: when asked again it opens only what is not open yet."""
        before = [each for each in self._unopened.get(request.rank, ()) if each.boot_id == request.boot_id]
        regions = {(each.transport, each.locator): each for each in before}
        for each in request.ready.unopened:
            region = weights_pb2.Unopened()
            region.CopyFrom(each)
            region.boot_id = request.boot_id
            regions[each.transport, each.locator] = region
        self._unopened[request.rank] = list(regions.values())

    @property
    def asks(self) -> bool:
        """Whether the engine's answer is waited for."""
        return self._giving

    def stop(self) -> bool:
        """Gives no more orders and waits no more for the engine's answer; returns whether it was waited for."""
        before, self._giving = self._giving, False
        return before

    @property
    def bringing(self) -> set[int]:
        """Ranks of workers that still bring into stage memory."""
        return self._bringing - self._verified

    def problem(self, now: float, remaining: float) -> Problem | None:
        """Why the install cannot go on, by what workers have told, or have not for too long; None: it can, once
        nothing is brought any more. remaining: seconds for it."""
        if self._problems:
            problem = Problem()
            problem.CopyFrom(self._problems[min(self._problems)])
            problem.replica = self._replica.name
            return problem
        silent = [rank for rank in sorted(self.bringing) if now - self._heard[rank] > SILENCE_SECONDS]
        if silent:
            message = (
                f"worker {silent[0]} has told nothing for {SILENCE_SECONDS:g} s of what it brings into stage memory"
            )
            return self._replica.problem(Problem.CODE_UNAVAILABLE, message)
        if remaining <= 0:
            message = "getting the workers ready took all the time there was"
            return self._replica.problem(Problem.CODE_DEADLINE_EXCEEDED, message)
        return None

    def ended(self, done: Done, now: float, remaining: float) -> Problem | None:
        """Takes the engine's answer to `begin`. Returns why the install cannot go on; None: all workers are ready, but
        for what they still bring.

        remaining: seconds for it.
        """
        self._giving = False
        if self._problems:
            return self.problem(now, remaining)
        missing = self.unready()
        if missing and done.problem is not None:
            return done.problem
        if missing:
            message = f"the engine says that it made its workers ready, but workers {missing} are not"
            return self._replica.problem(Problem.CODE_INTERNAL, message)
        return self.problem(now, remaining)
