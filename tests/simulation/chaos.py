"""What goes wrong in a story, beside messages that are lost: connections break, members come, go and die."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tests.simulation.members import AgentShell
from tests.simulation.world import Steps

if TYPE_CHECKING:
    from tests.simulation.scenario import Scenario


class Chaos:
    """Does one bad thing after the other, at a pace that differs from seed to seed."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.world = scenario.world

    def steps(self) -> Steps:
        """Never ends; killed when the world heals."""
        actions: list[Callable[[], None]] = [
            self._break_somebody,
            self._break_somebody,
            self._replica_joins,
            self._replica_leaves,
            self._engine_dies,
            self._group_ends,
            self._group_begins,
            self._sleep_or_wake,
        ]
        if self.scenario.crashes:
            actions += [self._manager_restarts, self._agent_restarts]
        pace = self.world.random.choice((1.0, 4.0, 15.0))
        while True:
            yield self.world.between(0.2, 2 * pace)
            self.world.random.choice(actions)()

    def _break_somebody(self) -> None:
        members = [
            *self.scenario.agents.values(),
            *(trainer for group in self.scenario.groups for trainer in group.trainers),
        ]
        member = self.world.random.choice(members)
        self.world.note(f"{member.name} loses its connection")
        member.break_streams()

    def _replica_joins(self) -> None:
        if sum(agent.alive for agent in self.scenario.agents.values()) < 4:
            self.scenario.join_replica()

    def _replica_leaves(self) -> None:
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

    def _engine_dies(self) -> None:
        agent = self._some_agent()
        if agent is None or agent.engine is None or not agent.engine.alive:
            return
        self.world.note(f"the engine of {agent.name} dies")
        agent.engine.kill()

        def noticed() -> None:
            agent.engine_died()
            self.scenario.start_engine(agent)

        self.world.after(self.world.between(0.0, 1.0), noticed)

    def _sleep_or_wake(self) -> None:
        manager, agent = self.scenario.cluster.manager, self._some_agent()
        if manager is not None and manager.alive and agent is not None:
            wake = self.world.chance(0.6)
            self.world.note(f"somebody {'wakes' if wake else 'puts to sleep'} {agent.name}")
            manager.sleep_or_wake(wake, [agent.name])

    def _group_ends(self) -> None:
        groups = [group for group in self.scenario.groups if not group.gone]
        if groups:
            group = self.world.random.choice(groups)
            self.world.note(f"{group.lineage} ends")
            self.scenario.end_group(group, in_good_order=self.world.chance(0.5))

    def _group_begins(self) -> None:
        alive = [group for group in self.scenario.groups if not group.gone]
        if len(alive) < 2:
            old = self.scenario.groups[-1]
            again = old.lineage if old.gone and self.world.chance(0.5) else None
            self.scenario.start_group(again)

    def _manager_restarts(self) -> None:
        if self.scenario.cluster.manager is not None and self.scenario.cluster.manager.alive:
            self.world.note("the manager is killed")
            self.scenario.cluster.manager.crash()
            self.world.after(self.world.between(0.1, 3.0), self.scenario.start_manager)

    def _agent_restarts(self) -> None:
        agent = self._some_agent()
        if agent is not None and agent.name not in self.scenario.restarting:
            self.scenario.restart_agent(agent, self.world.between(0.1, 3.0))

    def _some_agent(self) -> AgentShell | None:
        agents = [agent for agent in self.scenario.agents.values() if agent.alive]
        return self.world.random.choice(agents) if agents else None
