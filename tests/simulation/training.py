"""Trainer runs of a story: their steps, their calls, and what their weights do the moment that a call has returned."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.v1 import manager_pb2
from tests.simulation.members import TrainerShell
from tests.simulation.world import Process, Steps

if TYPE_CHECKING:
    from tests.simulation.scenario import Scenario


@dataclass
class Group:
    """The ranks of one trainer run. first: of which step its checkpoint was, if it numbers its versions itself.
    pool: that it mostly updates."""

    lineage: str
    number: int
    trainers: list[TrainerShell]
    first: int | None = None
    step: int = 0
    reports: list[manager_pb2.UpdateReport] = field(default_factory=list)
    gone: bool = False
    pool: str = ""

    def train(self) -> None:
        """One step of the optimizer on all ranks."""
        self.step += 1
        self.load()

    def load(self) -> None:
        """All ranks have what they had after the last step, from a checkpoint."""
        for trainer in self.trainers:
            trainer.source.train(f"{self.lineage} from {self.number} step {self.step}")


class Training:
    """One run's loop: train, update, perhaps end."""

    def __init__(self, scenario: Scenario, group: Group) -> None:
        self.scenario = scenario
        self.world = scenario.world
        self.group = group

    def steps(self) -> Steps:
        """Until the run ends."""
        group = self.group
        while not group.gone:
            yield self.world.between(0.05, 1.5)
            repeat = bool(group.reports) and self.world.chance(self.scenario.slant.repeats)
            if repeat:
                group.load()
            else:
                group.train()
            version = None if group.first is None else group.first + group.step
            report = yield from self._update(group.reports[-1].identity.version if repeat else version)
            if report is not None:
                group.reports.append(report)
            elif group.first is not None and self.world.chance(0.3):
                # The next one takes a new lineage, or goes on counting.
                self.scenario.end_group(group, in_good_order=True)
            if report is not None and self.scenario.relays and self.world.chance(self.scenario.slant.withdraws):
                yield from self._withdraw()
            if group.trainers[0].source.kind == "directory" and report is not None and self.world.chance(0.7):
                self.scenario.end_group(group, in_good_order=True)

    def _update(self, version: int | None) -> Steps:
        """All ranks call; the report if all calls ended well."""
        scenario, group = self.scenario, self.group
        scenario.attempts += 1
        some = self.world.chance(scenario.faults.task)
        other = scenario.slant.pools and scenario.chaos is not None and self.world.chance(0.2)
        pool = scenario.some_pool() if other else group.pool
        agents = [name for name, agent in scenario.agents.items() if agent.pool == pool]
        wanted = [name for name in agents if self.world.chance(0.5)] if some else []
        prefetch, until = self._by_relay()
        staged = None
        if scenario.slant.staged and scenario.chaos is not None and self.world.chance(scenario.slant.staged):
            staged = self._in_waves()
        calls: list[Process] = []
        for trainer in group.trainers:
            options = manager_pb2.UpdateOptions(
                timeout_seconds=self.world.random.choice((0.0, 12.0)), prefetch=prefetch, until=until, pool=pool
            )
            request = manager_pb2.UpdateWeightsRequest(options=options)
            if staged is not None:
                options.MergeFrom(staged)
                request.options.CopyFrom(options)
            if version is not None:
                request.version = version
            elif self.world.chance(self.scenario.faults.task / 5):
                request.version = 10_000  # one rank is confused
            if wanted:
                request.options.replicas.extend(wanted)
                request.options.min_replicas = len(wanted)
            elif group.number % 4 == 3 and scenario.chaos is not None:  # else a report is ok without all replicas
                request.options.min_replicas = 1
            calls.append(self.world.spawn(self._call(trainer, request)))
        reports = []
        for call in calls:
            report = yield call.over
            reports.append(report)
        if any(report is None for report in reports):
            return None
        scenario.succeeded += reports[0].ok or reports[0].held
        return reports[0]

    def _in_waves(self) -> manager_pb2.UpdateOptions:
        """How a version is deployed in waves. Not at a story's end: relays may hold nothing to go back to by then."""
        random = self.world.random
        strategy = random.choice(("rolling", "rolling", "canary", "canary", "all_or_none"))
        options = manager_pb2.UpdateOptions(strategy=strategy, until=manager_pb2.UNTIL_INSTALLED)
        options.until = random.choice((manager_pb2.UNTIL_INSTALLED, manager_pb2.UNTIL_FIRST_WAVE))
        if strategy != "all_or_none":
            options.wave_replicas = random.choice((0, 1, 2))
            if self.world.chance(0.5):
                options.conditions.add(name="time", value=random.choice((0.5, 2.0)))
        if self.world.chance(0.6):
            options.newer = manager_pb2.NEWER_WAIT
        return options

    def _withdraw(self) -> Steps:
        """All ranks take back what they publish, and offer it again a while later."""
        for trainer in self.group.trainers:
            trainer.withdraw()
        yield self.world.between(0.0, 2.0)
        for trainer in self.group.trainers:
            trainer.publish()

    def _by_relay(self) -> tuple[manager_pb2.Prefetch, manager_pb2.Until]:
        """What the callers want of relays: held only while nobody looks at how the installs of a report ended."""
        if not self.scenario.relays:
            return manager_pb2.PREFETCH_UNSPECIFIED, manager_pb2.UNTIL_UNSPECIFIED
        if self.scenario.chaos is not None and self.world.chance(self.scenario.slant.held):
            return manager_pb2.PREFETCH_AUTO, manager_pb2.UNTIL_HELD
        return self.world.random.choice(
            (manager_pb2.PREFETCH_AUTO, manager_pb2.PREFETCH_ALWAYS)
        ), manager_pb2.UNTIL_INSTALLED

    def _call(self, trainer: TrainerShell, request: manager_pb2.UpdateWeightsRequest) -> Steps:
        yield self.world.between(0.0, 0.3)
        yield self.world.first_of(trainer.accepted, 3.0)
        patience = (request.options.timeout_seconds or self.scenario.deadlines.update) + 2.0
        if self.world.chance(self.scenario.faults.loss):
            patience = self.world.between(0.0, 3.0)
        try:
            report = yield from trainer.update(request, patience)
            if report.held or self.world.chance(0.5):
                trainer.source.train(f"{trainer.name} trained at once at {self.world.now:.3f}")
            return report
        except CkptEngineError as error:
            self.world.note(f"{trainer.name}: {error}")
            # Its call is over, so nothing keeps this rank from training on while others still wait.
            if self.world.chance(0.5):
                trainer.source.train(f"{trainer.name} went on at {self.world.now:.3f}")
            return None
