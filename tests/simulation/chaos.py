"""What goes wrong in a story, beside messages that are lost: processes break, stop, are cut off, come, go and die.

Some of it happens at any time, some just after the manager has commanded something: that is where it hurts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ckpt_engine.machines import events
from ckpt_engine.v1 import manager_pb2, weights_pb2
from tests.simulation.ledgers import LedgerFaults
from tests.simulation.members import AgentShell, MemberShell
from tests.simulation.nodes import Site
from tests.simulation.shell import Shell
from tests.simulation.terms import TermFaults
from tests.simulation.world import Steps

if TYPE_CHECKING:
    from tests.simulation.scenario import Scenario

MOMENTS: tuple[type[Any], ...] = (
    manager_pb2.Prepare,
    manager_pb2.Seal,
    manager_pb2.Install,
    manager_pb2.OutcomeReceived,
    manager_pb2.Release,
    manager_pb2.SleepWake,
    events.CompilePlans,
    events.CombineSeals,
    events.SpendEpoch,
    events.RecordIntent,
    events.RecordOutcome,
)
"""After the sending or starting of one of these, somebody is struck."""

IN_COLLECTIVES: tuple[type[Any], ...] = (manager_pb2.Install, manager_pb2.TakePart)
"""The same where there are collectives, and up to so many seconds later: they take a while."""
IN_COLLECTIVES_SECONDS = 0.6

WITH_RELAYS: tuple[type[Any], ...] = (*MOMENTS, manager_pb2.FillRelay, events.JoinSources)
"""The same where there are relays."""

AGAIN = (weights_pb2.Problem.CODE_ABORTED, weights_pb2.Problem.CODE_UNAVAILABLE, weights_pb2.Problem.CODE_NOT_FOUND)
"""Refusals after which an operator asks once more."""


class Chaos:
    """Does one bad thing after the other, at a pace that differs from seed to seed."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.world = scenario.world
        self._trap: tuple[type[Any], Callable[[], None]] | None = None

    def steps(self) -> Steps:
        """Never ends; killed when the world heals."""
        actions = self.actions()
        pace = self.world.random.choice((1.0, 4.0, 15.0))
        while True:
            yield self.world.between(0.2, 2 * pace)
            action = self.world.random.choice(actions)
            if self.scenario.crashes and self.world.chance(0.4):
                moments = WITH_RELAYS if self.scenario.relays else MOMENTS
                moments = IN_COLLECTIVES if self.scenario.slant.collective and self.world.chance(0.8) else moments
                self._trap = self.world.random.choice(moments), action
            elif action.__name__ not in self.scenario.slant.without:
                action()

    def actions(self) -> list[Callable[[], None]]:
        """What may happen in this story."""
        actions: list[Callable[[], None]] = [
            self.break_somebody,
            self.break_somebody,
            self.replica_joins,
            self.replica_leaves,
            self.engine_dies,
            self.group_ends,
            self.group_begins,
            self.sleep_or_wake,
            self.holder_copies,
            self.holder_copies,
            self.somebody_prepares,
        ]
        operated = (self.somebody_goes_back, self.somebody_holds, self.somebody_decides)
        actions += [action for action in operated if action.__name__ in self.scenario.slant.often]
        if self.scenario.crashes:
            actions += [
                self.manager_restarts,
                self.manager_restarts,
                self.agent_restarts,
                self.agent_restarts,
                self.second_agent,
                self.rank_restarts,
                self.worker_dies,
                self.engine_is_swapped,
                self.somebody_stops,
                self.somebody_stops,
                self.partition,
            ]
            if self.scenario.relays:
                actions += [self.relay_restarts, self.relay_restarts]
            if self.scenario.slant.pools:
                actions.append(self.replica_moves)
            if self.scenario.slant.far:
                actions += [self.relay_restarts, self.network_is_cut, self.network_is_cut]
            if self.scenario.slant.nodes:
                actions += [self.follower_restarts, self.follower_stops, self.follower_is_cut_off] * 2
            if self.scenario.slant.standby:
                actions += [*TermFaults(self.scenario).actions(), LedgerFaults(self.scenario).disk_is_full]
            elif self.scenario.ledger_faults or self.scenario.slant.often:
                actions += LedgerFaults(self.scenario).actions()
        often = [action for action in actions if action.__name__ in self.scenario.slant.often]
        return actions + often * (len(actions) // len(often)) if often else actions

    def seen(self, command: Any) -> None:
        """The manager commands something: strikes if that was waited for."""
        if self._trap is None:
            return
        moment, action = self._trap
        if isinstance(getattr(command, "body", getattr(command, "task", None)), moment):
            if self.scenario.slant.far and self.world.chance(0.4):
                return  # a later one: of another relay, or of another stage
            self._trap = None
            if action.__name__ not in self.scenario.slant.without:
                most = IN_COLLECTIVES_SECONDS if self.scenario.slant.collective else 0.15
                self.world.after(self.world.between(0.0, most), action)

    # -- connections and time

    def break_somebody(self) -> None:
        member = self.world.random.choice(self._members())
        self.world.note(f"{member.name} loses its connection")
        member.break_streams()

    def somebody_stops(self) -> None:
        """SIGSTOP, and SIGCONT perhaps after the lease and all deadlines."""
        manager = self.scenario.cluster.manager
        processes: list[Shell] = [*self._members(), *([manager] * 2 if manager is not None else [])]
        process, seconds = self.world.random.choice(processes), self.world.random.choice((0.5, 3.0, 9.0))
        self.world.note(f"{process.name} is stopped for {seconds} s")
        process.stop_for(seconds)

    def partition(self) -> None:
        """Some members hear nothing of the manager for a while, or it hears nothing of them, or both."""
        share = self.world.random.choice((0.3, 0.7, 1.0))
        cut = {member.name for member in self._members() if self.world.chance(share)}
        ways = self.world.random.choice(((True,), (False,), (True, False)))
        cuts = {(name, way) for name in cut for way in ways}
        self.world.note(f"{sorted(cut)} are cut off, towards the manager: {ways}")
        self.scenario.faults.cuts |= cuts

        def mend() -> None:
            self.scenario.faults.cuts -= cuts

        self.world.after(self.world.random.choice((0.5, 3.0, 8.0)), mend)

    # -- replicas

    def replica_joins(self) -> None:
        if sum(agent.alive for agent in self.scenario.agents.values()) < 4:
            self.scenario.join_replica()

    def replica_leaves(self) -> None:
        agent = self._some_agent()
        if agent is None:
            return
        self.world.note(f"{agent.name} leaves")
        if agent.engine is not None:
            agent.engine.kill()
        if self.world.chance(0.5):
            agent.leave()
        else:
            agent.crash()

    def engine_dies(self) -> None:
        self._engine_ends(self.world.between(0.0, 1.0), noticed=True)

    def engine_is_swapped(self) -> None:
        """It dies, and another one answers before anybody has looked."""
        self._engine_ends(self.world.between(0.0, 0.5), noticed=False)

    def worker_dies(self) -> None:
        """The engine hangs until its agent has had enough and starts it again."""
        agent = self._some_agent()
        if agent is None or agent.engine is None or not agent.engine.alive:
            return
        engine = agent.engine
        worker = self.world.random.choice(engine.workers)
        self.world.note(f"worker {worker.rank} of {agent.name} dies")
        engine.kill_worker(worker)

        def noticed() -> None:
            holder = self.scenario.agents[agent.name]
            if engine.alive and holder.alive and holder.engine is engine:
                engine.kill()
                holder.engine_died()
                self.scenario.start_engine(holder)
            elif engine.alive:
                self.world.after(1.0, noticed)

        self.world.after(self.world.between(0.5, 8.0), noticed)

    def sleep_or_wake(self) -> None:
        manager, agent = self.scenario.cluster.manager, self._some_agent()
        if manager is not None and manager.alive and agent is not None:
            wake = self.world.chance(0.6)
            level = self.world.random.choice((1, 2))
            tags = self.world.random.choice(((), (), ("weights",), ("kv_cache",)))
            what = f"wakes {tags or 'all'} of" if wake else f"puts to sleep (level {level})"
            self.world.note(f"somebody {what} {agent.name}")
            manager.sleep_or_wake(wake, [agent.name], level, tags, pool=agent.pool)

    def agent_restarts(self) -> None:
        agent = self._some_agent()
        if agent is not None and agent.name not in self.scenario.restarting:
            self.scenario.restart_agent(agent, self.world.between(0.1, 3.0))

    def replica_moves(self) -> None:
        """Its agent is started again with another pool."""
        agent = self._some_agent()
        if agent is not None and agent.name not in self.scenario.restarting:
            pool = next(pool for pool in self.scenario.pools if pool != agent.pool)
            self.world.note(f"{agent.name} goes into pool {pool!r}")
            self.scenario.restart_agent(agent, self.world.between(0.05, 1.0), pool)

    def second_agent(self) -> None:
        """Somebody starts another agent for an engine that has one."""
        agent = self._some_agent()
        if agent is not None and agent.engine is not None and agent.engine.alive:
            self.world.note(f"a second agent is started for {agent.name}")
            self.scenario.start_second_agent(agent)

    # -- the other nodes of a replica

    def follower_restarts(self) -> None:
        site, node = self._some_follower()
        if site is not None:
            self.world.note(f"{site.followers[node].name} is killed")
            site.restart_follower(node, self.world.between(0.1, 6.0))

    def follower_stops(self) -> None:
        site, node = self._some_follower()
        if site is not None:
            seconds = self.world.random.choice((0.5, 3.0, 9.0))
            self.world.note(f"{site.followers[node].name} is stopped for {seconds} s")
            site.followers[node].stop_for(seconds)

    def follower_is_cut_off(self) -> None:
        site, node = self._some_follower()
        if site is not None:
            seconds = self.world.random.choice((0.5, 3.0, 9.0))
            self.world.note(f"{site.followers[node].name} does not reach its leader for {seconds} s")
            site.cut_off(node, seconds)

    def _some_follower(self) -> tuple[Site | None, int]:
        sites = list(self.scenario.sites.values())
        site = self.world.random.choice(sites) if sites else None
        return site, 0 if site is None else self.world.random.choice(sorted(site.followers))

    # -- trainers and the manager

    def group_ends(self) -> None:
        groups = [group for group in self.scenario.groups if not group.gone]
        if groups:
            group = self.world.random.choice(groups)
            self.world.note(f"{group.lineage} ends")
            self.scenario.end_group(group, in_good_order=self.world.chance(0.5))

    def group_begins(self) -> None:
        """A new run, or the last one goes on: perhaps from an older checkpoint, perhaps with another world size."""
        alive = [group for group in self.scenario.groups if not group.gone]
        if len(alive) < 1 + len(self.scenario.pools):
            old = self.scenario.groups[-1]
            again = old.lineage if old.gone and self.world.chance(0.5) else None
            older = self.world.random.randint(0, old.step) if again is not None and self.world.chance(0.5) else None
            self.scenario.start_group(again, first=older)

    def rank_restarts(self) -> None:
        """One rank is killed, and another process takes its place while the other ranks live."""
        groups = [group for group in self.scenario.groups if not group.gone]
        if groups:
            group = self.world.random.choice(groups)
            rank = self.world.random.randrange(len(group.trainers))
            self.world.note(f"rank {rank} of {group.lineage} is killed and comes again")
            self.scenario.restart_rank(group, rank)

    def manager_restarts(self) -> None:
        manager = self.scenario.cluster.manager
        if manager is not None and manager.alive:
            self.world.note("the manager is killed")
            manager.crash()
            self.world.after(self.world.between(0.1, 3.0), self.scenario.start_manager)

    # -- holders, and filling beside an update

    def holder_copies(self) -> None:
        """A holder gets a copy of what was meant to be installed last, or of something that it says is that."""
        alive = [holder for holder in self.scenario.holders if holder.alive]
        if len(alive) < 2:
            alive.append(self.scenario.join_holder(lies=self.world.chance(0.3)))
        elif self.world.chance(0.3):
            self.world.note(f"{alive[0].name} is killed")
            alive.pop(0).crash()
        intents = self.scenario.ledger.intents
        if intents:
            identity, holder = intents[max(intents)], self.world.random.choice(alive)
            what = "lies that it has copied" if holder.lies else "has copied"
            self.world.note(f"{holder.name} {what} version {identity.number} of {identity.lineage}")
            holder.hold(identity.message())

    def relay_restarts(self) -> None:
        """It is killed with all that it holds; another one takes its name, perhaps at once."""
        relays = [relay for relay in self.scenario.relays if relay.alive]
        if relays:
            relay = self.world.random.choice(relays)
            self.world.note(f"{relay.name} is killed")
            relay.crash()
            again = self.world.between(0.0, 6.0)
            self.world.after(again, lambda: self.scenario.join_relay(relay.name, relay.host))

    def network_is_cut(self) -> None:
        """Between two hosts, for relays; the manager is heard all the same."""
        cut = frozenset(host.name for host in self.world.random.sample(self.scenario.hosts, 2))
        self.world.note(f"no network leads between {sorted(cut)}")
        self.scenario.faults.wire_cuts |= {cut}

        def mend() -> None:
            self.scenario.faults.wire_cuts -= {cut}

        self.world.after(self.world.random.choice((0.3, 2.0, 6.0)), mend)

    def somebody_holds(self) -> None:
        """An operator holds a replica, or lets one go."""
        manager, agent = self.scenario.cluster.manager, self._some_agent()
        if manager is None or not manager.alive or agent is None:
            return
        if agent.name in manager.ledger.holds:
            self.world.note(f"somebody releases {agent.name}")
            manager.operate(manager_pb2.ReleaseReplicaRequest(name=agent.name))
        else:
            self.world.note(f"somebody holds {agent.name}")
            manager.operate(manager_pb2.HoldReplicaRequest(name=agent.name))

    def somebody_decides(self) -> None:
        """A person approves an undecided deployment, mostly; or pauses, resumes or undoes it."""
        manager = self.scenario.cluster.manager
        if manager is None or not manager.alive:
            return
        steer = manager_pb2.SteerDeploymentRequest
        actions = (steer.ACTION_APPROVE,) * 4 + (steer.ACTION_PAUSE, steer.ACTION_RESUME, steer.ACTION_RESUME)
        action = self.world.random.choice((*actions, steer.ACTION_UNDO))
        for row in manager.machine.status().deployments:
            if row.state == manager_pb2.Deployment.STATE_UNDECIDED:
                self.world.note(f"somebody says {steer.Action.Name(action)} to deployment {row.number}")
                manager.operate(steer(number=row.number, action=action))

    def somebody_goes_back(self) -> None:
        """An operator names a version that was meant for installing once, mostly one that a holder has a copy of, and
        asks again while an update runs."""
        known = list(self.scenario.ledger.intents.values())
        if not known:
            return
        identity = self.world.random.choice(known)
        if self.world.chance(0.8):
            holder = self.scenario.join_holder()
            self.world.after(0.5, lambda: holder.hold(identity.message()) if holder.alive else None)
        lineage = identity.lineage if self.world.chance(0.8) else ""
        names = [name for name in self.scenario.agents if self.world.chance(0.5)] if self.world.chance(0.2) else []
        self.world.note(f"somebody goes back to version {identity.number} of {identity.lineage}: {names or 'all'}")
        self.world.spawn(self._go_back(identity.number, lineage, names, self.scenario.some_pool()))

    def _go_back(self, version: int, lineage: str, names: list[str], pool: str) -> Steps:
        for _ in range(30):
            yield self.world.between(0.2, 1.5)
            manager = self.scenario.cluster.manager
            if manager is None or not manager.alive:
                continue
            call, over = manager.roll_back(version, lineage, replicas=names, timeout_seconds=12.0, pool=pool)
            if self.world.chance(0.1):
                self.world.after(self.world.between(0.0, 2.0), lambda m=manager, c=call: m.cancel_call(c))
            answer = yield self.world.first_of(over, 14.0)
            if not isinstance(answer, weights_pb2.Problem) or answer.code not in AGAIN:
                return

    def somebody_prepares(self) -> None:
        """The manager has a replica prepare for another version while an update goes on, as relays will have it."""
        manager, agent = self.scenario.cluster.manager, self._some_agent()
        if manager is not None and manager.alive and not manager.stopped and agent is not None:
            manager.prepare_beside(agent.name)

    # -- small things

    def _engine_ends(self, seconds: float, noticed: bool) -> None:
        agent = self._some_agent()
        if agent is None or agent.engine is None or not agent.engine.alive:
            return
        self.world.note(f"the engine of {agent.name} dies{'' if noticed else ' and is replaced'}")
        engine = agent.engine
        engine.kill()

        def after() -> None:
            holder = self.scenario.agents[agent.name]
            if holder.engine is not engine:
                return
            if noticed:
                holder.engine_died()
            self.scenario.start_engine(holder, instead=None if noticed else engine)

        self.world.after(seconds, after)

    def _members(self) -> list[MemberShell]:
        return [
            *self.scenario.agents.values(),
            *self.scenario.holders,
            *self.scenario.relays,
            *(trainer for group in self.scenario.groups for trainer in group.trainers),
        ]

    def _some_agent(self) -> AgentShell | None:
        agents = [agent for agent in self.scenario.agents.values() if agent.alive]
        return self.world.random.choice(agents) if agents else None
