"""What a staged deployment promises, checked at each commit of one and each install."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_engine.core.version import Version
from ckpt_engine.machines import events
from ckpt_engine.machines.manager.members import Holder, Replica
from ckpt_engine.machines.manager.update import InstallJob
from ckpt_engine.v1 import manager_pb2
from tests.simulation.world import BrokenPromiseError

if TYPE_CHECKING:
    from typing import Any

    from tests.simulation.manager import ManagerShell
    from tests.simulation.scenario import Scenario

UNDECIDED = manager_pb2.Deployment.STATE_UNDECIDED
DEPLOYED = manager_pb2.Deployment.STATE_DEPLOYED
UNDONE = manager_pb2.Deployment.STATE_UNDONE


class Waves:
    """Watches the deployments of one scenario. begun, decided: how many there were."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.begun = 0
        self.decided: dict[int, int] = {}  # by state
        self._served: dict[tuple[str, Version], float] = {}  # by replica, since when it has said that it holds it
        self._began: dict[int, float] = {}  # by generation, when a manager took its first event
        self._paused: set[int] = set()  # epochs of installs that were told to pause after they had waited

    def command(self, manager: ManagerShell, command: Any) -> None:
        """Looks at a command of the manager, before it is performed."""
        match command:
            case events.Run(_, events.RecordIntent(epoch, identity, _, selection, row, _, _)):
                if row is not None and row.state == UNDECIDED:
                    self.check_an_undone_number_stays_used(manager, identity)
                if row is not None:
                    self._commit(manager, epoch, frozenset(selection), row)
                elif selection:
                    self.check_nothing_newer_begins(manager, epoch, identity)
            case events.Send(peer, manager_pb2.Install() as body):
                self.check_the_base_is_served_outside_of_waves(manager, manager.machine._members.by_peer[peer], body)
                self.check_all_are_ready_before_one_is_paused(manager, body)
            case events.Send(peer, manager_pb2.FillRelay() as body):
                self.check_base_and_target_stay(manager, manager.machine._members.by_peer[peer], body)

    def _commit(
        self, manager: ManagerShell, epoch: int, selection: frozenset[str], row: manager_pb2.Deployment
    ) -> None:
        if row.state != UNDECIDED:
            self.decided[row.state] = self.decided.get(row.state, 0) + 1
            if row.state == DEPLOYED and row.waves:
                self.check_the_wave_before_serves(manager, row, row.waves[-1])
            return
        self.check_a_wave_commits_its_names(selection, row)
        if row.strategy == "all_or_none":
            self.check_every_replica_takes_part(manager, row)
        if row.number == epoch:
            self.begun += 1
            self.check_there_is_a_way_back(manager, row)
            return
        self.check_conditions(manager, row)
        self.check_the_wave_before_serves(manager, row, row.waves[-2])
        if row.strategy == "rolling":
            self.check_no_more_than_a_wave_does_not_serve(manager, row)

    def check_a_wave_commits_its_names(self, selection: frozenset[str], row: manager_pb2.Deployment) -> None:
        """A newcomer is in no wave."""
        if selection != frozenset(row.waves[-1].replicas):
            raise BrokenPromiseError(f"wave {row.waves[-1].replicas} of {row.number} commits {set(selection)}")

    def check_every_replica_takes_part(self, manager: ManagerShell, row: manager_pb2.Deployment) -> None:
        """All or none begins with every replica of its pool, or of its names."""
        update = next(each for each in manager.machine._updates.all() if each.goal.staging is not None)
        if set(row.waves[0].replicas) != set(update.goal.replicas):
            raise BrokenPromiseError(f"all or none of {set(update.goal.replicas)} begins with {row.waves[0].replicas}")

    def check_there_is_a_way_back(self, manager: ManagerShell, row: manager_pb2.Deployment) -> None:
        """Something that stays holds the base when the first wave is committed: files, or holders."""
        base, machine = Version.of(row.base), manager.machine
        content = machine._state.versions.contents.get(base)
        published = None if content is None else content.published
        files = published is not None and all(source.outlives for source in published.sources)
        if not files and not machine._members.offers(base):
            raise BrokenPromiseError(f"deployment {row.number} begins, and nothing holds {base}")

    def check_conditions(self, manager: ManagerShell, row: manager_pb2.Deployment) -> None:
        """A wave begins when every condition of the wave before is met, and while it is not paused."""
        before = manager.machine._state.deployments[row.number]
        waves = len(row.waves) - 1
        if before.paused:
            raise BrokenPromiseError(f"deployment {row.number} is paused, and its wave {waves + 1} begins")
        for each in row.conditions:
            if each.name == "person" and row.approved < waves:
                raise BrokenPromiseError(f"nobody has approved what follows wave {waves} of {row.number}")
            served = (self._served.get((name, Version.of(row.target)), 0.0) for name in row.waves[-2].replicas)
            since = max(self._began[manager.generation], *served)
            # Its clock may be fast by as much as drifts are.
            if each.name == "time" and self.scenario.world.now - since < each.value * 0.95:
                raise BrokenPromiseError(f"wave {waves + 1} of {row.number} begins before its time")

    def check_the_wave_before_serves(
        self, manager: ManagerShell, row: manager_pb2.Deployment, wave: manager_pb2.Deployment.Wave
    ) -> None:
        """What follows a wave comes when its replicas were brought to the target: as many as are to be in the end."""
        target = Version.of(row.target)
        served = [name for name in wave.replicas if (name, target) in self._served]
        dropped = [name for name in wave.replicas if name not in row.participants]
        spare = len(row.participants) - row.min_replicas
        if len(served) + len(dropped) < len(wave.replicas) - spare:
            raise BrokenPromiseError(f"only {served} of {wave.replicas} were brought to {target}")

    def check_no_more_than_a_wave_does_not_serve(self, manager: ManagerShell, row: manager_pb2.Deployment) -> None:
        """Rolling leaves all but a wave serving, as far as it depends on it."""
        replicas = manager.machine._members.replicas
        failed = manager.machine._deployments.courses[row.number].failures  # as many as may fail
        closed = {name for name in row.participants if name in replicas and not replicas[name].serving} - failed.keys()
        opened = set(row.waves[-1].replicas) - closed
        if opened and len(closed | opened) > row.wave_replicas:
            raise BrokenPromiseError(f"{opened} are taken while {closed} do not serve: a wave is {row.wave_replicas}")

    def check_nothing_newer_begins(self, manager: ManagerShell, epoch: int, identity: Version) -> None:
        """While a deployment is undecided, nothing else is committed in its pool or of its lineage."""
        update = next(each for each in manager.machine._updates.all() if each.installs and each.installs.epoch == epoch)
        if not update.goal.is_rollback:
            self.check_an_undone_number_stays_used(manager, identity)
        for row in manager.machine._state.deployments.values():
            meets = row.pool == update.goal.pool or row.target.lineage == identity.lineage
            if row.state == UNDECIDED and meets:
                raise BrokenPromiseError(f"{identity} is committed while deployment {row.number} is undecided")

    def check_an_undone_number_stays_used(self, manager: ManagerShell, identity: Version) -> None:
        """What was undone is not committed again by a trainer, whatever it calls for and however often."""
        for row in manager.ledger.deployments.values():
            if row.state == UNDONE and Version.of(row.target) == identity:
                raise BrokenPromiseError(f"{identity} is committed, which was undone in deployment {row.number}")

    def check_the_base_is_served_outside_of_waves(
        self, manager: ManagerShell, member: Any, body: manager_pb2.Install
    ) -> None:
        """A replica that is in no wave is not brought to the target of an undecided deployment."""
        identity = Version.of(body.identity)
        for row in manager.ledger.deployments.values():
            names = {name for wave in row.waves for name in wave.replicas}
            if row.state == UNDECIDED and identity == Version.of(row.target) and member.name not in names:
                raise BrokenPromiseError(f"{member.name} is in no wave of {row.number}, and is brought to {identity}")

    def check_all_are_ready_before_one_is_paused(self, manager: ManagerShell, body: manager_pb2.Install) -> None:
        """All or none: a replica is told to pause when each has said that it is ready, or serves the target."""
        identity, machine = Version.of(body.identity), manager.machine
        jobs = {update.goal.replicas[0]: update.job for update in machine._updates.attempts()}
        heard = {name: job._heard.get(name) for name, job in jobs.items() if isinstance(job, InstallJob)}
        ready = {name for name, progress in heard.items() if progress is not None and progress.ready}
        for row in machine._state.deployments.values():
            if row.strategy != "all_or_none" or row.state != UNDECIDED or row.target != identity or body.waits:
                continue
            if body.fence.epoch in self._paused:
                continue  # it is told so again
            self._paused.add(body.fence.epoch)
            for name in set(row.participants) - machine.holds().keys():
                replica = machine._members.replicas.get(name)
                if name not in ready and (replica is None or not replica.holds(identity)):
                    raise BrokenPromiseError(f"deployment {row.number} pauses replicas, and {name} is not ready")

    def check_base_and_target_stay(self, manager: ManagerShell, member: Any, body: manager_pb2.FillRelay) -> None:
        """No relay that holds the base or the target of an undecided deployment is filled with something else."""
        assert isinstance(member, Holder)
        for row in manager.machine._state.deployments.values():
            holds = {held.identity for held in member.held}
            if row.state == UNDECIDED and holds & {row.base, row.target} and Version.of(body.identity) != row.target:
                raise BrokenPromiseError(f"{member.source} is filled, and deployment {row.number} needs what it holds")

    def took(self, manager: ManagerShell, event: object) -> None:
        """A manager has taken one event, and its commands were performed."""
        self._began.setdefault(manager.generation, self.scenario.world.now)
        if isinstance(event, events.Message):
            member = manager.machine._members.by_peer.get(event.peer)
            if isinstance(member, Replica) and member.identity is not None:
                self._served.setdefault((member.name, member.identity), self.scenario.world.now)
            return
        self.check_a_manager_knows_its_deployments(manager)

    def check_a_manager_knows_its_deployments(self, manager: ManagerShell) -> None:
        """Also one that was started again."""
        if manager.generation != manager.ledger.generation or manager.machine._state.versions.doubtful:
            return
        rows = manager.ledger.deployments.values()
        missing = {row.number for row in rows if row.state == UNDECIDED} - manager.machine._state.deployments.keys()
        if missing and not manager.is_writing:
            raise BrokenPromiseError(f"the ledger has the undecided deployments {missing}, and its manager does not")
