"""A seeded story: members join, leave, break and train on a bad network for a while; then the world heals.

While it is bad only the invariants count. Once it has healed, an update must succeed on every replica.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ckpt_engine.core.deadlines import Deadlines
from ckpt_engine.core.names import in_pool
from ckpt_engine.machines.agent.machine import AgentMachine
from ckpt_engine.machines.manager.machine import ManagerMachine
from ckpt_engine.machines.relay.member import RelayMachine
from ckpt_engine.machines.trainer.machine import TrainerMachine
from ckpt_engine.v1 import manager_pb2, weights_pb2
from tests.simulation.chaos import Chaos
from tests.simulation.engine import Engine
from tests.simulation.healing import Healed
from tests.simulation.holders import HolderShell
from tests.simulation.hosts import HOST, host_of
from tests.simulation.invariants import BrokenPromiseError, Invariants
from tests.simulation.manager import Ledger, ManagerShell
from tests.simulation.members import AgentShell, Cluster, TrainerShell
from tests.simulation.nodes import LeadingAgentShell, Site, spread_kind
from tests.simulation.relays import RelayShell
from tests.simulation.shell import Faults
from tests.simulation.terms import TERM, stand_by
from tests.simulation.training import Group, Training
from tests.simulation.weights import Source, Truth
from tests.simulation.world import World

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
    fill=3.0,
    engine_grace=1.0,
    worker_reply=3.0,
    worker_attempt=0.5,
    quiesce=2.0,
    resume=1.5,
    stall=4.0,
    report=1.0,
    update=20.0,
    arm=3.0,
    catch_up=10.0,
    catch_up_retry=0.5,
    sleep_wake=4.0,
    forget=8.0,
)


@dataclass(frozen=True)
class Machines:
    """Which machines run; a test of the simulator itself puts broken ones in."""

    manager: type[ManagerMachine] = ManagerMachine
    agent: type[AgentMachine] = AgentMachine
    trainer: type[TrainerMachine] = TrainerMachine
    engine: type[Engine] = Engine
    relay: type[RelayMachine] = RelayMachine


@dataclass(frozen=True)
class Slant:
    """How a story differs from what its seed alone would make of it.

    without: names of faults and of the chaos's actions that are left out, to find a shorter story. often: actions that
    make up half of what the chaos does. worse: faults that are as bad as this, to bring something about more often.
    repeats: how often a run asks for the version again that it asked for last. relays: whether there may be some.
    held: how often callers return when these hold the version. withdraws: how often a run takes back what it published
    after an update. far: whether there are several hosts, which only relays reach over a network. collective: how many
    runs publish for collectives alone; then there are no relays. pools: whether replicas and runs are in two pools.
    nodes: how many replicas span nodes. early: whether workers have stage memory. staged: how many updates are deployed
    in waves; then there are more replicas. standby: whether another manager takes the ledger over when one is lost.
    """

    without: frozenset[str] = frozenset()
    often: frozenset[str] = frozenset()
    worse: Mapping[str, float] = field(default_factory=dict)
    repeats: float = 0.15
    relays: bool = False
    held: float = 0.4
    withdraws: float = 0.0
    far: bool = False
    collective: float = 0.0
    pools: bool = False
    nodes: float = 0.0
    early: bool = False
    staged: float = 0.0
    standby: bool = False


class Scenario:
    """One run of one seed.

    crashes: whether anything may be killed or stopped at any time, and the ledger may fail; otherwise only engines and
    trainers end.
    """

    def __init__(
        self,
        seed: int,
        machines: Machines | None = None,
        crashes: bool = False,
        calm: bool = False,
        slant: Slant | None = None,
    ) -> None:
        self.world = World(seed)
        self.machines = machines or Machines()
        self.calm, self.crashes, self.slant = calm, crashes, slant or Slant()
        self.hosts = [host_of(name) for name in "ABC"[: self.world.random.choice((2, 3))]] if self.slant.far else [HOST]
        self.deadlines = DEADLINES
        self.ledger = Ledger(term=TERM if self.slant.standby else 0.0)
        self.faults = Faults() if calm else self._draw_faults()
        self.truth = Truth(self.world)
        self.ledger_faults = crashes and self.world.chance(0.4 if "ledger" not in self.slant.without else 0.0)
        self.ledgers_replaced = 0
        self.chaos: Chaos | None = None
        self.agents: dict[str, AgentShell] = {}
        self.sites: dict[str, Site] = {}
        self.groups: list[Group] = []
        self.holders: list[HolderShell] = []
        self.relays: list[RelayShell] = []
        self.cluster = Cluster(self.world, self.faults, self.truth, self.deadlines)
        self.cluster.several = self.slant.standby
        self._stands_by = False
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
        for _ in range(random.randint(3, 5) if self.slant.staged else random.randint(1, 3)):
            self.join_replica()
        self.start_group()
        for pool in self.pools[1:]:
            self.join_replica(pool=pool)
            self.start_group(pool=pool)
        for _ in range(random.choice((0, 1, 1, 2)) if self.slant.relays else 0):
            self.join_relay()
        for host in self.hosts[1:]:
            if self.world.chance(0.0 if self.slant.collective else 0.9):
                self.join_relay(host=host)
        self.chaos = Chaos(self)
        going_wrong = self.world.spawn(self.chaos.steps())
        self.world.run(self.world.now + bad_seconds)
        going_wrong.kill()
        self.chaos = None
        Healed(self).all_is_well()

    def _draw_faults(self) -> Faults:
        """Some seeds are gentle, some are not; each kind of fault is often absent, so that others get their turn."""

        def some(most: float) -> float:
            return self.world.random.choice((0.0, most / 4, most))

        faults = Faults(
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
            read_late=some(0.05),
            write_late=some(0.05),
            stamp_no=some(0.6),
            drift=some(0.03) if self.crashes else 0.0,
        )
        if self.slant.standby:
            faults.drift, self.ledger.slow = 0.0, some(0.2)
        if self.slant.far:
            faults.wire, faults.wire_delay = some(0.05), some(0.3)
        for name in self.slant.without & vars(faults).keys():
            setattr(faults, name, 0.005 if name == "delay" else 0.0)
        for name, value in self.slant.worse.items():
            setattr(faults, name, value)
        return faults

    # -- who joins and leaves

    def start_manager(self, although_one_lives: bool = False) -> None:
        """A manager on the same ledger, if none holds its lock; it is tried again if that cannot be written. Where
        managers share it, one stands by from then on."""
        if self.slant.standby:
            if not self._stands_by:
                self._stands_by = True
                self.world.spawn(stand_by(self))
            return
        if self.manager_lives and not although_one_lives:
            return
        if self.ledger.refuses:
            self.world.note("no manager can start: the ledger cannot be written")
            self.world.after(0.5, self.start_manager)
            return
        self.lead()

    def lead(self) -> None:
        """A manager takes the ledger."""
        self.cluster.manager = ManagerShell(
            self.world,
            self.faults,
            self.truth,
            self.ledger,
            self.deadlines,
            self.invariants.watch,
            self._took,
            self.machines.manager,
        )

    def _took(self, manager: ManagerShell, event: object) -> None:
        self.invariants.mechanism.took(manager, event)
        self.invariants.waves.took(manager, event)

    @property
    def pools(self) -> tuple[str, ...]:
        """The pool without a name, and perhaps another one."""
        return ("", "judge") if self.slant.pools else ("",)

    def some_pool(self) -> str:
        """Any of them."""
        return self.world.random.choice(self.pools) if self.slant.pools else ""

    def join_replica(
        self, mode: manager_pb2.Mode | None = None, host: weights_pb2.Host | None = None, pool: str | None = None
    ) -> None:
        """A new replica with a new engine; many are hybrid and few colocated, if nobody says what it is."""
        name = f"replica-{len(self.agents)}"
        if mode is None:
            others = manager_pb2.MODE_HYBRID if self.world.chance(0.4) else manager_pb2.MODE_STANDALONE
            mode = manager_pb2.MODE_COLOCATED if self.world.chance(0.05) else others
        host = host or self.some_host()
        pool = self.some_pool() if pool is None else pool
        site = None
        if self.world.chance(self.slant.nodes):
            site = self.sites[name] = Site(self.cluster, name, self.world.random.choice((2, 2, 3)))
        agent = self.agents[name] = self._start_agent(name, 1, mode, host, pool)
        nodes = f" on {site.nodes} nodes" if site is not None else ""
        self.world.note(f"{name} joins{self._at(host)}{self._in(pool)}{nodes}")
        self.start_engine(agent)

    def _start_agent(
        self, name: str, epoch: int, mode: manager_pb2.Mode, host: weights_pb2.Host, pool: str
    ) -> AgentShell:
        """An agent's process; one that leads, if its replica spans nodes."""
        machine, site = self.machines.agent, self.sites.get(name)
        if site is None:
            return AgentShell(self.cluster, name, epoch, mode, machine, host, pool)
        kind = spread_kind(self.machines.engine)
        return LeadingAgentShell(
            self.cluster,
            name,
            epoch,
            mode,
            machine,
            host,
            pool,
            site,
            lambda workers: self._engine(kind, host, workers),
        )

    def some_host(self) -> weights_pb2.Host:
        """Any of those that there are."""
        return self.world.random.choice(self.hosts) if len(self.hosts) > 1 else self.hosts[0]

    def _at(self, host: weights_pb2.Host) -> str:
        return f" on host {host.name}" if len(self.hosts) > 1 else ""

    def _in(self, pool: str) -> str:
        return f" {in_pool(pool)}" if self.slant.pools else ""

    @property
    def manager_lives(self) -> bool:
        """Whether there is one."""
        return self.cluster.manager is not None and self.cluster.manager.alive

    def join_holder(self, lies: bool = False) -> HolderShell:
        """Somebody who keeps copies of versions."""
        holder = HolderShell(self.cluster, f"keeper-{len(self.holders)}", lies)
        self.holders.append(holder)
        return holder

    def join_relay(self, name: str | None = None, host: weights_pb2.Host | None = None) -> RelayShell:
        """A relay, on the first host if nothing is said. name: of one that was there before, and holds nothing now."""
        host = host or self.hosts[0]
        relay = RelayShell(self.cluster, name or f"relay-{len(self.relays)}", self.machines.relay, host)
        self.world.note(f"{relay.name} joins{self._at(host)}")
        relay.watched.append(self.invariants.overwritten)
        self.relays = [each for each in self.relays if each.name != name] + [relay]
        return relay

    def start_engine(self, agent: AgentShell, instead: Engine | None = None) -> None:
        """An engine, ready a moment later, unless the agent has one, or launches its own ones. instead: of a dead one
        that it still counts on."""
        if agent.name in self.sites:
            return
        engine = self._engine(self.machines.engine, agent.host)
        delay = self.world.between(0.1, 2.0)
        self.world.after(delay, lambda: agent.attach(engine) if agent.alive and agent.engine is instead else None)

    def _engine(self, kind: type[Engine], host: weights_pb2.Host, workers: int = 0) -> Engine:
        self._engines += 1
        limited = self.world.chance(0.3) and not self.calm
        models = {"model A"} if limited else {"model A", "model B"}
        workers = workers or self.world.random.choice((1, 2, 2, 3))
        engine = kind(self.world, self.faults, self.truth, f"engine-{self._engines}", workers, models, host)
        for worker in engine.workers:
            worker.stage.there = self.slant.early
        return engine

    def start_group(
        self,
        lineage: str | None = None,
        kind: str | None = None,
        model: str | None = None,
        first: int | None = None,
        hosts: list[weights_pb2.Host] | None = None,
        pool: str | None = None,
    ) -> None:
        """A trainer run: a new lineage, or one that goes on after its processes died."""
        random = self.world.random
        if lineage is None:
            self._lineages += 1
            lineage = f"run-{self._lineages}"
        kind = kind or random.choice(("live", "live", "snapshot", "snapshot", "directory"))
        model = model or random.choice(("model A",) * 8 + ("model B",))
        world_size = 1 if kind == "directory" else random.randint(1, 3)
        self.world.note(f"{lineage}: {world_size} ranks, {kind}, {model}")
        group = self.join_group(lineage, kind, model, world_size, hosts or self._hosts_of_a_run())
        group.first = first
        group.pool = self.some_pool() if pool is None else pool
        self.world.spawn(Training(self, group).steps())

    def join_group(
        self, lineage: str, kind: str, model: str, world_size: int, hosts: list[weights_pb2.Host] | None = None
    ) -> Group:
        """The ranks of a run, which publish, and train when they are told to. hosts: where they are, in turns; None:
        all on the first one."""
        self._sessions += 1
        hosts = hosts or [self.hosts[0]]
        collective = self.world.chance(self.slant.collective)
        trainers = [
            TrainerShell(
                self.cluster,
                Source(
                    *(lineage, rank, world_size, kind, model, self._sessions),
                    host=hosts[rank % len(hosts)],
                    collective=collective and kind != "directory",
                ),
                f"session-{self._sessions}-{rank}",
                self.machines.trainer,
            )
            for rank in range(world_size)
        ]
        group = Group(lineage, self._sessions, trainers)
        self.groups.append(group)
        return group

    def _hosts_of_a_run(self) -> list[weights_pb2.Host]:
        if len(self.hosts) == 1:
            return self.hosts
        return self.world.random.choice((self.hosts[:1], self.hosts[:1], self.hosts[1:2], self.hosts[:2]))

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

    def restart_rank(self, group: Group, rank: int) -> None:
        """Kills one rank; a new process with the same weights takes its place, while the other ranks go on."""
        old = group.trainers[rank].source
        group.trainers[rank].crash()
        self._sessions += 1
        source = Source(
            *(old.lineage, rank, old.world_size, old.kind, old.model, self._sessions, dict(old.memory)),
            host=old.host,
            collective=old.collective,
        )
        session = f"session-{self._sessions}-{rank}"

        def again() -> None:
            if not group.gone:
                group.trainers[rank] = TrainerShell(self.cluster, source, session, self.machines.trainer)

        self.world.after(self.world.between(0.0, 2.0), again)

    def start_second_agent(self, agent: AgentShell) -> None:
        """For an engine that has one: it finds the directory locked and ends before it dials, unless the first died."""
        engine = agent.engine
        if engine is None or engine.held_by_another(None) or agent.name in self.sites:
            return
        second = self._start_agent(agent.name, agent.agent_epoch + 1, agent.mode, agent.host, agent.pool)
        self.agents[agent.name] = second
        self.world.after(self.world.between(0.0, 0.5), lambda: second.attach(engine) if engine.alive else None)

    def restart_agent(self, agent: AgentShell, seconds: float, pool: str | None = None) -> None:
        """Kills an agent, whose engine goes on; so much later there is a new one for that engine, perhaps in another
        pool."""
        pool = agent.pool if pool is None else pool
        self.world.note(f"the agent of {agent.name} is killed")
        engine = agent.engine
        agent.crash()
        self.restarting.add(agent.name)

        def again() -> None:
            self.restarting.discard(agent.name)
            new = self._start_agent(agent.name, agent.agent_epoch + 1, agent.mode, agent.host, pool)
            self.agents[agent.name] = new
            if agent.name in self.sites:
                return
            if engine is not None and engine.alive:
                self.world.after(self.world.between(0.05, 1.0), lambda: new.attach(engine))
            else:
                self.start_engine(new)

        self.world.after(seconds, again)


def run_seed(
    seed: int,
    machines: Machines | None = None,
    crashes: bool = False,
    slant: Slant | None = None,
    bad_seconds: float = 20.0,
) -> Scenario:
    """One seed from beginning to end."""
    scenario = Scenario(seed, machines, crashes, slant=slant)
    scenario.run(bad_seconds)
    return scenario
