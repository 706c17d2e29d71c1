"""Telling an engine which version it serves, for the engine's own responses: its label.

Weights are whole whatever the label says, but with a wrong one tokens of one version are attributed to another. So an
engine is told before it computes with other weights, and more than once if it refuses. If it still refuses, it
computes with a label that is reported as untrusted, and is told again later.
"""

from __future__ import annotations

from typing import ClassVar, cast

from ckpt_engine.machines.agent.state import AgentReplica, Operation
from ckpt_engine.machines.events import Done, ReadWords, StampEngine, Words
from ckpt_engine.v1 import weights_pb2

ATTEMPTS = 3
"""How often an operation tells the engine its version before it goes on with an untrusted label."""

RETRY_SECONDS = 0.2
"""Seconds before an engine that refused something is asked again."""


class LabellingOperation(Operation):
    """Base of the operations that tell the engine its version before they let it compute."""

    def __init__(self, replica: AgentReplica, fence: weights_pb2.Fence) -> None:
        super().__init__(replica, fence)
        self._attempts = 0
        self._label: weights_pb2.Identity | None = None

    def label(self, reserve: float, remaining: float) -> bool:
        """Starts a `stamp` if the engine may attribute tokens to another version than its workers hold.

        False: there is no need, or no attempt is left. All attempts together take about half of `reserve`, the seconds
        reserved for resuming; `remaining` of these are left.
        """
        identity = self.replica.words.identity
        if identity is None or identity == self.replica.labelled or self._attempts == ATTEMPTS:
            return False
        if self._attempts and remaining < reserve / 2:
            return False
        seconds = reserve / 8 if self._attempts else reserve / 4
        self._attempts += 1
        self._label, self.replica.labelled = identity, None
        self.run("stamp", StampEngine(identity, min(seconds, remaining / 2)))
        return True

    def labelled(self, done: Done, now: float) -> bool:
        """Takes the result of a `stamp`. Returns whether the operation may go on."""
        if done.problem is None:
            self.replica.labelled, self.replica.label_reason = self._label, ""
            return True
        self.replica.label_reason = done.problem.message
        self.replica.label_again = now + self.replica.deadlines.resume
        return self._attempts == ATTEMPTS


class Stamping(LabellingOperation):
    """Tells a computing engine its version once, since it may attribute its tokens to another one."""

    kind: ClassVar[str] = "stamp"

    def start(self, now: float) -> None:
        """Reads the state words again: what is known of them may be older than the last install."""
        self.run("look", ReadWords())

    def done(self, step: str, done: Done, now: float) -> None:
        """Takes the words, then the result of the stamp."""
        if step == "stamp":
            self.labelled(done, now)
        elif done.problem is None:
            self.replica.take_words(cast(Words, done.result))
            reserve = self.replica.deadlines.resume
            if self.label(reserve, reserve):
                return
        self.replica.end()

    def engine_exited(self, reason: str, now: float) -> None:
        """Ends: there is no engine to tell."""
        self.replica.end()
