"""Asks an engine the questions of a version's probe, after an install, and compares what it answers.

It decides which question comes next and when there are enough. It does not decide what figures mean for a deployment,
nor change the install's outcome: whatever fails here is told as the answer's problem.

Each sequence is asked for twice: as the engine continues it over what it has cached, and, with a salt that nothing else
has, what it computes without. The probe's time is its own, after the pause, and no longer than the install's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from google.protobuf.message import DecodeError

from ckpt_engine.core.check_verdict import Score
from ckpt_engine.core.probe import (
    CONTINUED,
    EngineScores,
    accepted_share,
    against_trainer,
    broken_bounds,
    check_scores,
    over_cache,
)
from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.machines.agent.state import AgentReplica
from ckpt_engine.machines.events import AgentTask, Done, ReadWords, ScoreEngine
from ckpt_engine.v1 import manager_pb2, weights_pb2

Problem = weights_pb2.Problem

STEPS = frozenset({"probe over caches", "probe", "probe words"})


class Probing:
    """The questions of one probe. `answer` is what it has found; it is complete once `done` returns True."""

    def __init__(
        self,
        replica: AgentReplica,
        scores: bytes | Problem,
        accepted_before: float | None,
        end: float,
        run: Callable[[str, AgentTask], None],
    ) -> None:
        """scores: a ProbeScores, or why it could not be fetched. accepted_before: the share of the draft's guesses that
        were accepted under the version before. end: by which it must have ended, in seconds of the machine's clock.
        run: starts a task, by the name of its step."""
        self.answer = manager_pb2.ProbeAnswer(accepted_before=accepted_before)
        self._replica, self._blob, self._end, self._run = replica, scores, end, run
        self._scores = manager_pb2.ProbeScores()
        self._cached: list[Score] = []
        self._fresh: list[Score] = []
        self._began = 0.0

    def start(self, now: float) -> bool:
        """Asks the first question. True: the probe has ended, since there is none that could be asked."""
        self._began = now
        if isinstance(self._blob, Problem):
            # A manager that was lost has taken them along: that says nothing about the engine.
            return self._fail(Problem.CODE_ABORTED, f"the scores could not be fetched: {self._blob.message}", now)
        try:
            self._scores = manager_pb2.ProbeScores.FromString(self._blob)
            check_scores(self._scores)
        except (DecodeError, CkptEngineError) as error:
            return self._fail(Problem.CODE_INVALID_ARGUMENT, f"the trainer's scores cannot be used: {error}", now)
        self._end = min(self._end, now + self._scores.seconds)
        self._ask(now)
        return False

    def done(self, step: str, done: Done, now: float) -> bool:
        """Takes the result of a step and starts the next one. True: the probe has ended."""
        if done.problem is not None:
            return self.fail(done.problem, now)
        match step:
            case "probe over caches":
                self._cached.append(cast(Score, done.result))
            case "probe":
                self._fresh.append(cast(Score, done.result))
            case "probe words":
                return self._compare(now)
        if len(self._fresh) == len(self._scores.sequences):
            self._run("probe words", ReadWords())  # with what the draft has guessed since
            return False
        if now >= self._end:
            scored, count = len(self._fresh), len(self._scores.sequences)
            return self._fail(
                Problem.CODE_DEADLINE_EXCEEDED, f"only {scored} of {count} sequences were scored in its time", now
            )
        self._ask(now)
        return False

    def fail(self, problem: Problem, now: float) -> bool:
        """Ends the probe without figures. Returns True."""
        self.answer.problem.CopyFrom(problem)
        self.answer.problem.replica = self._replica.name
        self.answer.seconds = now - self._began
        return True

    def _fail(self, code: Problem.Code, message: str, now: float) -> bool:
        return self.fail(self._replica.problem(code, message), now)

    def _ask(self, now: float) -> None:
        """Asks over caches first: what the next question computes is not to lie there."""
        tokens = tuple(self._scores.sequences[len(self._fresh)].tokens)
        is_cached = len(self._cached) == len(self._fresh)
        step = "probe over caches" if is_cached else "probe"
        self._run(step, ScoreEngine(tokens, CONTINUED, self._remaining(now), is_cached))

    def _compare(self, now: float) -> bool:
        scores, bounds, replica = self._scores, self._scores.bounds, self._replica
        sequences = tuple(tuple(each.tokens) for each in scores.sequences)
        try:
            self.answer.engine.CopyFrom(against_trainer(scores, self._fresh))
            self.answer.cached.CopyFrom(over_cache(self._fresh, self._cached, scores.clip))
        except ValueError as error:
            self.answer.ClearField("engine")
            return self._fail(Problem.CODE_INTERNAL, f"its answer cannot be used: {error}", now)
        before = replica.probed
        if before is not None and before.sequences == sequences:
            self.answer.before.CopyFrom(against_trainer(scores, before.scores))
        replica.probed = EngineScores(sequences, tuple(self._fresh))
        self.answer.broken.extend(broken_bounds(self.answer.engine, bounds))
        self.answer.broken_cached.extend(broken_bounds(self.answer.cached, bounds))
        if (accepted := accepted_share(replica.guesses)) is not None:
            self.answer.accepted = accepted
        self.answer.seconds = now - self._began
        return True

    def _remaining(self, now: float) -> float:
        return max(0.001, self._end - now)
