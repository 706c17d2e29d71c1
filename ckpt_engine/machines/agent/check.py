"""The check of an engine version that no test has run, before its first update.

It decides the steps. Each round of core/check_verdict.py pauses the engine (which empties caches), has every worker
load the round's weights, resumes, and asks for log-probabilities. The verdict is check_verdict's; how weights are made
and loaded is install/self_check.py's. The check runs while no worker holds a version, so the gate is closed to all
requests. Whatever happens, the engine is resumed. A pass is stored on this host, for one version, architecture,
quantisation, layout and device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import cast

from ckpt_engine.core.check_verdict import CONTINUED, PROMPT, ROUNDS, Score, failure
from ckpt_engine.core.version import Fence
from ckpt_engine.machines.agent.state import CLEAN, AgentReplica, acknowledged
from ckpt_engine.machines.events import (
    AgentTask,
    Done,
    FindCheck,
    KeepCheck,
    PauseEngine,
    PrepareEngine,
    ResumeEngine,
    Say,
    ScoreEngine,
)
from ckpt_engine.v1 import manager_pb2, weights_pb2, worker_pb2

Problem = weights_pb2.Problem

STEPS = frozenset({"find check", "check pause", "check load", "check resume", "check score", "keep check"})


class EngineCheck:
    """One run of the check, within the preparation of a manifest that all workers have recorded."""

    def __init__(
        self,
        replica: AgentReplica,
        fence: Fence,
        manifest_digest: bytes,
        models: Mapping[int, str],
        end: float,
        run: Callable[[str, AgentTask], None],
    ) -> None:
        """models: by rank, what the worker says about its model; they are a part of the key of a stored pass. end: the
        deadline, in seconds of the machine's clock. run: starts a task, by the name of its step."""
        self.problem: Problem | None = None  # set when the check has ended and failed
        self._replica, self._fence, self._digest = replica, fence, manifest_digest
        self._end, self._run = end, run
        assert replica.engine is not None
        engine = replica.engine.engine
        self._key = " | ".join([engine.kind, engine.version, *(models[rank] for rank in sorted(models))])
        self._began = 0.0
        self._loaded: dict[int, worker_pb2.WorkerChecked] = {}
        self._loading = False
        self._scores: list[Score] = []

    @classmethod
    def is_due(cls, replica: AgentReplica) -> bool:
        """Whether the engine is to be checked now. Writes to `replica.engine_check` why an untested one is not."""
        engine = replica.engine
        if engine is None or replica.checked or replica.mode == manager_pb2.MODE_COLOCATED:
            return False
        if replica.check_engine == "always" or (engine.untested and replica.check_engine == "auto"):
            holding = any(status.state == CLEAN for status in replica.words.workers)
            if not holding and not replica.sleeping:
                return True
            why = "it serves a version already" if holding else "it is asleep"
        else:
            why = "--check-engine never"
        replica.engine_check = f"{engine.untested}; not checked: {why}" if engine.untested else ""
        return False

    def start(self, now: float) -> None:
        """Looks for a stored pass of this engine on this host."""
        self._began = now
        self._run("find check", FindCheck(self._key))

    def reply_to(self, request: worker_pb2.WorkerRequest, now: float) -> worker_pb2.AgentReply | None:
        """Answers a worker: hands out the round's order, takes the result. None: the request is for something else."""
        match request.WhichOneof("body"):
            case "want_prepare" if self._loading:
                each = ROUNDS[len(self._scores)]
                order = worker_pb2.CheckOrder(
                    fence=self._fence.message(),
                    manifest_digest=self._digest,
                    seed=each.seed,
                    by_engine=each.by_engine,
                    deadline_seconds=self._remaining(now),
                )
                return worker_pb2.AgentReply(check=order)
            case "checked" if self._loading and Fence.of(request.checked.fence) == self._fence:
                self._loaded[request.rank] = request.checked
                return acknowledged()
        return None

    def done(self, step: str, done: Done, now: float) -> bool:
        """Takes the result of a step and starts the next one. True: the check has ended; `problem` is None if it
        passed."""
        replica = self._replica
        match step:
            case "find check":
                if done.problem is None and done.result:
                    self._passed("checked on this host before")
                    return True
                self._replica.out.append(Say(f"{self._what()}: it is checked now, before its first update"))
                self._pause(now)
            case "check pause":
                if done.problem is not None:
                    self._fail(done.problem.code, done.problem.message)
                    self._resume(now)
                else:
                    replica.paused = True
                    self._loading, self._loaded = True, {}
                    self._run("check load", PrepareEngine(self._remaining(now)))
            case "check load":
                self._loading = False
                self._take_loaded(done)
                self._resume(now)
            case "check resume":
                if done.problem is None:
                    replica.paused = False
                elif self.problem is None:
                    self._fail(done.problem.code, done.problem.message)
                if self.problem is not None:
                    return True
                self._run("check score", ScoreEngine(PROMPT, CONTINUED, self._remaining(now)))
            case "check score":
                if done.problem is not None:
                    self._fail(done.problem.code, done.problem.message)
                    return True
                self._scores.append(cast(Score, done.result))
                if len(self._scores) < len(ROUNDS):
                    self._pause(now)
                    return False
                if why := failure(self._scores):
                    self._fail(Problem.CODE_INVALID_ARGUMENT, why)
                    return True
                self._passed(f"checked here in {now - self._began:.1f} s")
                self._run("keep check", KeepCheck(self._key))
            case "keep check":
                return True
        return False

    def _pause(self, now: float) -> None:
        self._replica.paused = None
        self._run("check pause", PauseEngine(manager_pb2.PAUSE_MODE_UNSPECIFIED, self._remaining(now)))

    def _resume(self, now: float) -> None:
        self._run("check resume", ResumeEngine(max(self._remaining(now), self._replica.deadlines.resume)))

    def _take_loaded(self, done: Done) -> None:
        engine = self._replica.engine
        assert engine is not None
        first = next((each.problem for _, each in sorted(self._loaded.items()) if each.HasField("problem")), None)
        missing = [rank for rank in range(engine.world_size) if rank not in self._loaded]
        if first is not None:
            how = "its own loader" if ROUNDS[len(self._scores)].by_engine else "ckpt-engine's install"
            self._fail(first.code, f"{how} did not load the check's weights: {first.message}")
        elif missing:
            message = done.problem.message if done.problem is not None else f"workers {missing} did not answer"
            self._fail(Problem.CODE_UNAVAILABLE, message)

    def _passed(self, how: str) -> None:
        self._replica.checked = True
        self._replica.engine_check = f"{self._what()}; {how}"
        self._replica.out.append(Say(self._replica.engine_check))

    def _fail(self, code: Problem.Code, why: str) -> None:
        """Fails the check with INVALID_ARGUMENT if it ran to its end; with other codes it may be tried again."""
        message = f"{self._what()}, and its check failed: {why}; no update is installed (--check-engine never: all are)"
        self._replica.engine_check = message
        self.problem = self._replica.problem(code, message)

    def _what(self) -> str:
        engine = self._replica.engine
        assert engine is not None
        return (
            engine.untested
            or f"{engine.engine.kind} {engine.engine.version} is a tested version (--check-engine always)"
        )

    def _remaining(self, now: float) -> float:
        return max(0.001, self._end - now)
