"""The end of every story: nothing goes wrong any more, so within bounded time all must be well again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_engine.v1 import manager_pb2
from tests.simulation.shell import Faults
from tests.simulation.world import BrokenPromiseError

if TYPE_CHECKING:
    from tests.simulation.manager import ManagerShell
    from tests.simulation.scenario import Scenario
    from tests.simulation.training import Group

OPERATOR_SECONDS = 10.0
"""After the world has healed. By then ledgers are mended; what still belongs to another one is moved by an operator."""


class Healed:
    """Heals a scenario's world and sees what becomes of it."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.world = scenario.world

    def all_is_well(self) -> None:
        """Raises BrokenPromiseError if it does not get well."""
        self._heal()
        self.world.run(self.world.now + OPERATOR_SECONDS)
        self._move_those_of_other_clusters()
        self.world.run(self.world.now + 2 * self.scenario.deadlines.lease + self.scenario.deadlines.update / 2)
        self._nobody_gave_up()
        self._release_all()
        self._undo_all()
        self._evict_the_dead()
        self._wake_all()
        self._nothing_is_paused()
        self._must_succeed()

    def _heal(self) -> None:
        self.world.note("the world heals")
        for name, value in vars(Faults()).items():
            setattr(self.scenario.faults, name, value)
        self.scenario.ledger.unreachable.clear()
        self.scenario.ledger.slow = 0.0
        for group in self.scenario.groups:
            if not group.gone:
                self.scenario.end_group(group, in_good_order=True)
        with_relays = {relay.host.name for relay in self.scenario.relays if relay.alive}
        for host in self.scenario.hosts if self.scenario.slant.far and not self.scenario.slant.collective else []:
            if host.name not in with_relays:
                self.scenario.join_relay(host=host)
        for pool in self.scenario.pools:
            self.scenario.join_replica(manager_pb2.MODE_STANDALONE, pool=pool)  # the others may all be about to leave

    def _move_those_of_other_clusters(self) -> None:
        """Only their agents are started again: engines, and what they hold, stay."""
        for agent in list(self.scenario.agents.values()):
            cluster = agent.cluster_served
            if agent.alive and cluster not in ("", self.scenario.ledger.cluster):
                if agent.refusal is None:
                    raise BrokenPromiseError(f"{agent.name} belongs to {cluster}, and nobody is told")
                self.world.note(f"{agent.name} of {cluster} is moved")
                self.scenario.restart_agent(agent, 0.1)
        for relay in list(self.scenario.relays):
            cluster = relay.machine._session.cluster
            if relay.alive and cluster not in ("", self.scenario.ledger.cluster):
                relay.crash()
                self.scenario.join_relay(relay.name, relay.host)

    def _nobody_gave_up(self) -> None:
        for agent in self.scenario.agents.values():
            if agent.ended is not None and agent.alive:
                raise BrokenPromiseError(f"the agent of {agent.name} gave up: {agent.ended.message}")

    def _release_all(self) -> None:
        manager = self.scenario.cluster.manager
        assert manager is not None
        for name in list(manager.machine.holds()):
            manager.operate(manager_pb2.ReleaseReplicaRequest(name=name))

    def _undo_all(self) -> None:
        """What waits for a person is undone: nobody is left to approve it."""
        manager = self.scenario.cluster.manager
        assert manager is not None
        undo = manager_pb2.SteerDeploymentRequest.ACTION_UNDO
        for row in manager.machine.status().deployments:
            if row.state == manager_pb2.Deployment.STATE_UNDECIDED:
                manager.operate(manager_pb2.SteerDeploymentRequest(number=row.number, action=undo))

    def _evict_the_dead(self) -> None:
        """Killed for good, with their engines: only an operator knows that, and until then they count as missing."""
        manager = self.scenario.cluster.manager
        assert manager is not None
        for replica in manager.machine.status().replicas:
            if not self.scenario.agents[replica.name].alive:
                manager.operate(manager_pb2.EvictReplicaRequest(name=replica.name))

    def _wake_all(self) -> None:
        manager = self.scenario.cluster.manager
        assert manager is not None
        for pool in self.scenario.pools:
            agents = [agent for agent in self.scenario.agents.values() if agent.alive and agent.pool == pool]
            asleep = [agent.name for agent in agents if agent.machine.replica.asleep]
            if asleep:
                self._wake(manager, asleep, pool)

    def _wake(self, manager: ManagerShell, asleep: list[str], pool: str) -> None:
        over = manager.sleep_or_wake(True, asleep, pool=pool)
        self.world.run(self.world.now + self.scenario.deadlines.sleep_wake)
        if not isinstance(over.value, manager_pb2.WakeResponse) or any(
            result.HasField("problem") for result in over.value.results
        ):
            raise BrokenPromiseError(f"{asleep} cannot be woken in a good world: {over.value}")

    def _nothing_is_paused(self) -> None:
        """What can serve does so again, also without another update."""
        for agent in self.scenario.agents.values():
            engine = agent.engine
            if not agent.alive or engine is None or not engine.alive or not engine.words().open:
                continue
            reason = agent.machine.replica.closed_reason()
            if engine.paused or reason:
                raise BrokenPromiseError(f"{agent.name} holds a whole version, but does not serve: {reason}")
            if engine.words().identity not in (None, engine.label):
                raise BrokenPromiseError(f"{agent.name} goes on calling its tokens by {engine.label}")

    def _must_succeed(self) -> None:
        """A new run updates every replica that lives. The update in whose midst it leaves goes on from what relays
        hold, and may not reach all of them."""
        pools = self.scenario.pools
        for pool in pools:
            self.scenario.start_group(kind="live", model="model A", pool=pool)
        groups = self.scenario.groups[-len(pools) :]
        self.world.run(self.world.now + 8.0)
        if self.scenario.slant.collective or self.scenario.slant.early:
            for group in groups:
                # A run that leaves in the middle of a collective leaves its replicas dirty, and one that leaves while
                # they bring its version into stage memory leaves them behind.
                group.gone = True
            self.world.run(self.world.now + 4.0)
        for group in groups:
            self.scenario.end_group(group, in_good_order=True)
        self._come_to_rest()
        for group in groups:
            self._has_succeeded(group)

    def _come_to_rest(self) -> None:
        """Lets what the runs have left behind end, within the deadlines of an update and of a late replica.

        An update that waited for relays of another pool may record its intent so late that the process of a rank ends
        while a replica reads it: that one is quarantined, and brought up from a relay.
        """
        manager, deadlines = self.scenario.cluster.manager, self.scenario.deadlines
        assert manager is not None
        end, rest = self.world.now + deadlines.update + deadlines.catch_up, self.world.now + 2.0
        while self.world.now < min(rest, end):
            self.world.run(self.world.now + 0.1)
            if manager.machine._updates.all():
                rest = max(rest, self.world.now + 1.0)

    def _has_succeeded(self, group: Group) -> None:
        whole = [number for number, report in enumerate(group.reports) if report.ok]
        if not whole or whole[-1] < len(group.reports) - 2:
            raise BrokenPromiseError(f"no update succeeds in a good world; the last report: {group.reports[-1:]}")
        brought = [report.identity for report in group.reports[whole[-1] :]]
        for agent in self.scenario.agents.values():
            if not agent.alive or agent.mode == manager_pb2.MODE_COLOCATED or agent.pool != group.pool:
                continue
            engine = agent.engine
            if engine is None or engine.paused or not engine.words().open:
                raise BrokenPromiseError(
                    f"{agent.name} does not serve in a good world: {agent.machine.replica.closed_reason()}"
                )
            if engine.words().identity not in brought:
                raise BrokenPromiseError(f"{agent.name} was left behind in a good world")
