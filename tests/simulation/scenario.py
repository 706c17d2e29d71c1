"""A seeded story: members join, leave, break and train on a bad network for a while; then the world heals.

While it is bad only the invariants count. Once it has healed, an update must succeed on every replica.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ckpt_engine.core.deadlines import Deadlines
from ckpt_engine.core.machines.agent import AgentMachine
from ckpt_engine.core.machines.manager import ManagerMachine
from ckpt_engine.core.machines.trainer import TrainerMachine
from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.v1 import manager_pb2
from tests.simulation.chaos import Chaos
from tests.simulation.engine import Engine
from tests.simulation.invariants import BrokenPromiseError, Invariants
from tests.simulation.manager import Ledger, ManagerShell
from tests.simulation.members import AgentShell, Cluster, TrainerShell
from tests.simulation.shell import Faults
from tests.simulation.weights import Source, Truth
from tests.simulation.world import Process, Steps, World

DEADLINES = Deadlines(
    heartbeat=1.0,
    lease=4.0,
    resend=0.8,
    reconnect_first=0.1,
    reconnect_most=1.0,
    words=1.0,
    blobs=2.0,
    ledger=2.0,
    gather=6.0,
    merge=2.0,
    prepare=4.0,
    plan=2.0,
    seal=3.0,
    quiesce=2.0,
    resume=1.5,
    report=1.0,
    update=20.0,
    catch_up=10.0,
    catch_up_retry=0.5,
    sleep_wake=4.0,
)


@dataclass(frozen=True)
class Machines:
    """Which machines run; a test of the simulator itself puts broken ones in."""

    manager: type[ManagerMachine] = ManagerMachine
    agent: type[AgentMachine] = AgentMachine
    trainer: type[TrainerMachine] = TrainerMachine
    engine: type[Engine] = Engine


@dataclass
class Group:
    """The ranks of one trainer run."""

    lineage: str
    number: int
    trainers: list[TrainerShell]
    step: int = 0
    reports: list[manager_pb2.UpdateReport] = field(default_factory=list)
    gone: bool = False

    def train(self) -> None:
        """One step of the optimizer on all ranks."""
        self.step += 1
        for trainer in self.trainers:
            trainer.source.train(f"{self.lineage} from {self.number} step {self.step}")


class Scenario:
    """One run of one seed. crashes: whether managers and agents are killed too, not only engines and trainers."""

    def __init__(self, seed: int, machines: Machines | None = None, crashes: bool = False, calm: bool = False) -> None:
        self.world = World(seed)
        self.machines = machines or Machines()
        self.crashes = crashes
        self.deadlines = DEADLINES
        self.faults = Faults() if calm else self._draw_faults()
        self.truth = Truth()
        self.ledger = Ledger()
        self.agents: dict[str, AgentShell] = {}
        self.groups: list[Group] = []
        self.cluster = Cluster(self.world, self.faults, self.truth, self.deadlines)
        self.invariants = Invariants(self)
        self.world.check = self.invariants.check
        self.attempts = self.succeeded = 0
        self._engines = self._lineages = self._sessions = 0
        self.restarting: set[str] = set()

    def run(self, bad_seconds: float = 20.0) -> None:
        """The whole story. Raises BrokenPromiseError, with the seed and the last notes, when a promise is."""
        try:
            self._tell(bad_seconds)
        except Exception as error:
            notes = "\n".join(self.world.log[-40:])
            message = f"seed {self.world.seed} at {self.world.now - 1000.0:.3f} s: {error}\n{notes}"
            raise BrokenPromiseError(message) from error

    def _tell(self, bad_seconds: float) -> None:
        random = self.world.random
        self.start_manager()
        for _ in range(random.randint(1, 3)):
            self.join_replica()
        self.start_group()
        chaos = self.world.spawn(Chaos(self).steps())
        self.world.run(self.world.now + bad_seconds)
        chaos.kill()
        self._heal()
        self.world.run(self.world.now + 2 * self.deadlines.lease + self.deadlines.update / 2)
        self._wake_all()
        self._nothing_is_paused()
        self._must_succeed()

    def _draw_faults(self) -> Faults:
        """Some seeds are gentle, some are not; each kind of fault is often absent, so that others get their turn."""

        def some(most: float) -> float:
            return self.world.random.choice((0.0, most / 4, most))

        return Faults(
            loss=some(0.1),
            duplicate=some(0.2),
            delay=self.world.random.choice((0.005, 0.05, 0.5)),
            task=some(0.05),
            slow=some(0.05),
            engine_no=some(0.1),
            engine_hang=some(0.1),
            engine_lies=some(0.1),
            worker_early=some(0.1),
            worker_late=some(0.1),
            half_open=some(0.5),
        )

    # -- who joins and leaves

    def start_manager(self) -> None:
        """A manager on the same ledger."""
        self.cluster.manager = ManagerShell(
            self.world,
            self.faults,
            self.truth,
            self.ledger,
            self.deadlines,
            self.invariants.watch,
            self.machines.manager,
        )

    def join_replica(self, mode: manager_pb2.Mode | None = None) -> None:
        """A new replica with a new engine; few are colocated, if nobody says what it is."""
        name = f"replica-{len(self.agents)}"
        if mode is None:
            mode = manager_pb2.COLOCATED if self.world.chance(0.05) else manager_pb2.STANDALONE
        agent = self.agents[name] = AgentShell(self.cluster, name, 1, mode, self.machines.agent)
        self.world.note(f"{name} joins")
        self.start_engine(agent)

    def start_engine(self, agent: AgentShell) -> None:
        self._engines += 1
        models = {"model A"} if self.world.chance(0.3) else {"model A", "model B"}
        workers = self.world.random.choice((1, 2, 2, 3))
        engine = self.machines.engine(self.world, self.faults, self.truth, f"engine-{self._engines}", workers, models)
        delay = self.world.between(0.1, 2.0)
        self.world.after(delay, lambda: agent.attach(engine) if agent.alive and agent.engine is None else None)

    def start_group(self, lineage: str | None = None, kind: str | None = None, model: str | None = None) -> None:
        """A trainer run: a new lineage, or one that goes on after its processes died."""
        random = self.world.random
        if lineage is None:
            self._lineages += 1
            lineage = f"run-{self._lineages}"
        kind = kind or random.choice(("live", "live", "snapshot", "snapshot", "directory"))
        model = model or random.choice(("model A",) * 8 + ("model B",))
        world_size = 1 if kind == "directory" else random.randint(1, 3)
        self.world.note(f"{lineage}: {world_size} ranks, {kind}, {model}")
        self.world.spawn(self._train(self.join_group(lineage, kind, model, world_size)))

    def join_group(self, lineage: str, kind: str, model: str, world_size: int) -> Group:
        """The ranks of a run, which publish, and train when they are told to."""
        self._sessions += 1
        trainers = [
            TrainerShell(
                self.cluster,
                Source(lineage, rank, world_size, kind, model, self._sessions),
                f"session-{self._sessions}-{rank}",
                self.machines.trainer,
            )
            for rank in range(world_size)
        ]
        group = Group(lineage, self._sessions, trainers)
        self.groups.append(group)
        return group

    def end_group(self, group: Group, in_good_order: bool) -> None:
        """All its processes end, the way that a launcher ends them when one of them dies."""
        group.gone = True
        for trainer in group.trainers:
            if not trainer.alive:
                continue
            if in_good_order:
                trainer.leave()
            else:
                self.world.after(self.world.between(0.0, 0.5), trainer.crash)

    def restart_agent(self, agent: AgentShell, seconds: float) -> None:
        """Kills an agent, whose engine goes on; so much later there is a new one for that engine."""
        self.world.note(f"the agent of {agent.name} is killed")
        engine = agent.engine
        agent.crash()
        self.restarting.add(agent.name)

        def again() -> None:
            self.restarting.discard(agent.name)
            new = AgentShell(self.cluster, agent.name, agent.agent_epoch + 1, agent.mode, self.machines.agent)
            self.agents[agent.name] = new
            if engine is not None and engine.alive:
                self.world.after(self.world.between(0.05, 1.0), lambda: new.attach(engine))
            else:
                self.start_engine(new)

        self.world.after(seconds, again)

    # -- training

    def _train(self, group: Group) -> Steps:
        while not group.gone:
            yield self.world.between(0.05, 1.5)
            repeat = bool(group.reports) and self.world.chance(0.15)
            if not repeat:
                group.train()
            report = yield from self.update(group, group.reports[-1].identity.version if repeat else None)
            if report is not None:
                group.reports.append(report)
            if group.trainers[0].source.kind == "directory" and report is not None and self.world.chance(0.7):
                self.end_group(group, in_good_order=True)

    def update(self, group: Group, version: int | None) -> Steps:
        """All ranks call; the report if all calls ended well."""
        self.attempts += 1
        wanted = [name for name in self.agents if self.world.chance(0.5)] if self.world.chance(self.faults.task) else []
        calls: list[Process] = []
        for trainer in group.trainers:
            request = manager_pb2.UpdateWeightsRequest(timeout_seconds=self.world.random.choice((0.0, 12.0)))
            if version is not None:
                request.version = version
            elif self.world.chance(self.faults.task / 5):
                request.version = 10_000  # one rank is confused
            if wanted:
                request.replicas.extend(wanted)
                request.min_replicas = len(wanted)
            calls.append(self.world.spawn(self._call(trainer, request)))
        reports = []
        for call in calls:
            report = yield call.over
            reports.append(report)
        if any(report is None for report in reports):
            return None
        self.succeeded += reports[0].ok
        return reports[0]

    def _call(self, trainer: TrainerShell, request: manager_pb2.UpdateWeightsRequest) -> Steps:
        yield self.world.between(0.0, 0.3)
        yield self.world.first_of(trainer.accepted, 3.0)
        patience = (request.timeout_seconds or self.deadlines.update) + 2.0
        if self.world.chance(self.faults.loss):
            patience = self.world.between(0.0, 3.0)
        try:
            return (yield from trainer.update(request, patience))
        except CkptEngineError as error:
            self.world.note(f"{trainer.name}: {error}")
            # Its call is over, so nothing keeps this rank from training on while others still wait.
            if self.world.chance(0.5):
                trainer.source.train(f"{trainer.name} went on at {self.world.now:.3f}")
            return None

    # -- the end

    def _heal(self) -> None:
        self.world.note("the world heals")
        for name, value in vars(Faults()).items():
            setattr(self.faults, name, value)
        for group in self.groups:
            if not group.gone:
                self.end_group(group, in_good_order=True)
        self.join_replica(manager_pb2.STANDALONE)  # the others may all be about to leave

    def _wake_all(self) -> None:
        manager = self.cluster.manager
        assert manager is not None
        asleep = [name for name, agent in self.agents.items() if agent.alive and agent.machine.replica.asleep]
        if not asleep:
            return
        over = manager.sleep_or_wake(True, asleep)
        self.world.run(self.world.now + self.deadlines.sleep_wake)
        if not isinstance(over.value, manager_pb2.WakeResponse) or any(
            result.HasField("problem") for result in over.value.results
        ):
            raise BrokenPromiseError(f"{asleep} cannot be woken in a good world: {over.value}")

    def _nothing_is_paused(self) -> None:
        """What can serve does so again, also without another update."""
        for agent in self.agents.values():
            engine = agent.engine
            if not agent.alive or engine is None or not engine.alive or not engine.words().open:
                continue
            reason = agent.machine.replica.closed_reason()
            if engine.paused or reason:
                raise BrokenPromiseError(f"{agent.name} holds a whole version, but does not serve: {reason}")

    def _must_succeed(self) -> None:
        """A new run updates every replica that lives."""
        self.start_group(kind="live", model="model A")
        group = self.groups[-1]
        self.world.run(self.world.now + 8.0)
        self.end_group(group, in_good_order=True)
        self.world.run(self.world.now + 2.0)
        if not group.reports or not group.reports[-1].ok:
            raise BrokenPromiseError(f"no update succeeds in a good world; the last report: {group.reports[-1:]}")
        for agent in self.agents.values():
            if not agent.alive or agent.mode == manager_pb2.COLOCATED:
                continue
            engine = agent.engine
            if engine is None or engine.paused or not engine.words().open:
                raise BrokenPromiseError(
                    f"{agent.name} does not serve in a good world: {agent.machine.replica.closed_reason()}"
                )
            if engine.words().identity != group.reports[-1].identity:
                raise BrokenPromiseError(f"{agent.name} was left behind in a good world")


def run_seed(seed: int, machines: Machines | None = None, crashes: bool = False) -> Scenario:
    """One seed from beginning to end."""
    scenario = Scenario(seed, machines, crashes)
    scenario.run()
    return scenario
