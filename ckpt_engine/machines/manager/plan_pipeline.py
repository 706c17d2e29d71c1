"""How plans come about: offers are joined, plans compiled, atoms digested by their sources, digests added up.

Decides what each stage hands on to the next, and which answers and results still count. Does not decide for which
workers and from which sources plans are made, how long a stage may take, or what a failure means: its owner does (an
update, a route, holdings), which begins each stage and looks at `stage` after each event.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias, cast

from ckpt_engine.machines import events
from ckpt_engine.machines.events import Combined, CombineSeals, Compiled, CompilePlans, Joined, JoinSources, Published
from ckpt_engine.machines.manager.sealing import Sealing
from ckpt_engine.machines.manager.state import State
from ckpt_engine.v1 import manager_pb2, weights_pb2

Work: TypeAlias = JoinSources | CompilePlans | CombineSeals


@dataclass(frozen=True, slots=True)
class PlanTask:
    """The key of a pipeline's task."""

    pipeline: int  # its number
    work: type[Work]


@dataclass(frozen=True, slots=True)
class Planned:
    """Plans are compiled. They may be compiled again, for other workers, before anything is digested."""

    published: Published
    compiled: Compiled


@dataclass(frozen=True, slots=True)
class Way:
    """What replicas are installed with."""

    compiled: Compiled
    combined: Combined  # what the readers of these plans must find


@dataclass(frozen=True, slots=True)
class Failed:
    """There are no plans, or they are not to be used."""

    problem: weights_pb2.Problem
    sources: tuple[str, ...] = ()  # those that failed, by their ids; none: it is not known which


Stage: TypeAlias = JoinSources | Joined | CompilePlans | Planned | Sealing | CombineSeals | Way | Failed
"""In the order in which they come; a publication needs no join. A task is the stage in which its result is awaited."""


class PlanPipeline:
    """One way from sources, record and workers to plans. What comes for a stage that is over changes nothing."""

    def __init__(self, state: State) -> None:
        state.pipelines += 1
        self.number = state.pipelines
        self.stage: Stage | None = None
        self._state = state
        self._made: dict[type[Stage], list[manager_pb2.BlobRef]] = {}  # by the stage that needed or made it

    def run(self, task: Work) -> None:
        """Begins a stage that is work of the manager's own."""
        self.stage = task
        self._state.run(PlanTask(self.number, type(task)), task)

    def seal(self, sealing: Sealing, seconds: float) -> None:
        """Has the sources digest what they have to."""
        self.stage = sealing
        self.send(seconds)

    def send(self, seconds: float) -> None:
        """Tells, again, the sources that have not digested."""
        if isinstance(self.stage, Sealing):
            self.stage.send(seconds)

    def missing(self) -> list[events.SourceOffer]:
        """The sources that have not digested, and are asked to."""
        return self.stage.missing() if isinstance(self.stage, Sealing) else []

    def take(self, body: manager_pb2.Sealed) -> bool:
        """Takes an answer of a source; whether it was asked for here."""
        if not isinstance(self.stage, Sealing) or not (answered := self.stage.asked(body)):
            return False
        problem = self.stage.take(body, answered)
        self._made[Sealing] = [*self.stage.digests.values()]
        if problem is not None:
            self.stage = Failed(problem, tuple(source.source for source in answered))
        return True

    def combine(self, seconds: float) -> None:
        """Adds up digests, of which none may be missing."""
        assert isinstance(self.stage, Sealing)
        self.run(CombineSeals(self.stage.published, self.stage.compiled, self.stage.digests, seconds))

    def done(self, task: PlanTask, done: events.Done) -> bool:
        """A task ended; whether its result is awaited here."""
        if task.pipeline != self.number or not isinstance(self.stage, task.work):
            return False
        match self.stage:
            case _ if done.problem is not None:
                self.stage = Failed(done.problem)
            case JoinSources():
                self.stage = joined = cast(Joined, done.result)
                self._made[Joined] = [] if joined.published is None else [joined.published.manifest]
            case CompilePlans(published):
                self.stage = Planned(published, compiled := cast(Compiled, done.result))
                self._made[Planned] = [*compiled.plans.values(), *compiled.atoms.values()]
            case CombineSeals(compiled=compiled):
                self.stage = Way(compiled, combined := cast(Combined, done.result))
                self._made[Way] = [*combined.expected.values(), *([combined.record] if combined.record else [])]
        return True

    def blobs(self) -> list[manager_pb2.BlobRef]:
        """Blobs that it made, which members may fetch or the next stage needs."""
        return [ref for refs in self._made.values() for ref in refs]
