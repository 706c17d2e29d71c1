"""Stories: a good world in which only happens what a test says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.machines import events
from ckpt_engine.machines.manager.absences import LEFT_SECONDS
from ckpt_engine.v1 import manager_pb2, weights_pb2
from tests.simulation.engine import Engine
from tests.simulation.members import AgentShell, TrainerShell
from tests.simulation.relays import RelayShell
from tests.simulation.scenario import Machines, Scenario, Slant
from tests.simulation.training import Group
from tests.simulation.world import Steps

Problem = weights_pb2.Problem
NEW, OLD, QUARANTINED = (
    manager_pb2.OUTCOME_NEW_SERVING,
    manager_pb2.OUTCOME_OLD_SERVING,
    manager_pb2.OUTCOME_QUARANTINED,
)
UNREACHED = manager_pb2.OUTCOME_NOT_REACHED


class AbleEngine(Engine):
    """It can load both models, also if it is asked before a test has looked at it."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.models = {"model A", "model B"}


class Story(Scenario):
    """A good world in which only happens what the test says. Invariants are checked all the same."""

    def __init__(
        self,
        far: bool = False,
        collective: bool = False,
        nodes: float = 0.0,
        standby: bool = False,
        **deadlines: float,
    ) -> None:
        slant = Slant(far=far or collective, collective=float(collective), nodes=nodes, standby=standby)
        super().__init__(seed=1, calm=True, machines=Machines(engine=AbleEngine), slant=slant)
        patient = {"stall": 60.0}  # many stories hold an install up, to see what goes on beside it
        self.deadlines = self.cluster.deadlines = replace(self.deadlines, **patient | deadlines)
        self.start_manager()

    def replica(
        self, mode: manager_pb2.Mode = manager_pb2.MODE_STANDALONE, host: weights_pb2.Host | None = None, pool: str = ""
    ) -> AgentShell:
        """A replica whose engine is ready and can load both models."""
        self.join_replica(mode, host, pool)
        self.wait(3.0)
        agent = list(self.agents.values())[-1]
        assert agent.engine is not None
        return agent

    def ranks(
        self,
        lineage: str = "run",
        world_size: int = 1,
        kind: str = "live",
        model: str = "model A",
        hosts: list[weights_pb2.Host] | None = None,
    ) -> Group:
        """Ranks that have trained once and whose tables are accepted."""
        group = self.join_group(lineage, kind, model, world_size, hosts)
        group.train()
        self.wait(1.0)
        return group

    def wait(self, seconds: float) -> None:
        """Lets time pass."""
        self.world.run(self.world.now + seconds)

    def until(self, reached: Callable[[], object], seconds: float = 10.0) -> None:
        """Lets time pass until it has come to that, which must happen within so many seconds."""
        end = self.world.now + seconds
        while not reached():
            assert self.world.now < end, "it does not come to that"
            self.wait(0.001)

    def engine_again(self, agent: AgentShell) -> None:
        """Its engine is killed, and another one is there when this returns."""
        assert agent.engine is not None
        agent.engine.kill()
        agent.engine_died()
        self.start_engine(agent)
        self.wait(3.0)

    def relay(self) -> RelayShell:
        """A relay that is connected."""
        relay = self.join_relay()
        self.wait(1.0)
        return relay

    def kill_manager(self) -> None:
        """It ends without a word."""
        assert self.cluster.manager is not None
        self.cluster.manager.crash()

    def restart_manager(self) -> None:
        """Another one on the same ledger; returns when all have dialled in again."""
        self.kill_manager()
        self.start_manager()
        self.wait(6.0)

    @property
    def phase(self) -> str:
        """What the manager's status says that it does."""
        assert self.cluster.manager is not None
        return self.cluster.manager.machine.status().phase

    def held_by(self, agent: AgentShell) -> weights_pb2.Identity | None:
        """What an engine's workers say that they hold."""
        assert agent.engine is not None
        return agent.engine.words().identity

    def last_report(self) -> manager_pb2.UpdateReport:
        """Of the last update in the ledger that was not for a late replica."""
        return self.ledger.reports[max(self.ledger.reports.keys() - self.ledger.late)]

    def call(self, trainer: TrainerShell, **wishes: Any) -> list[Any]:
        """One rank calls; its result is appended to the list when it comes: a report or a problem. sealed: the fence
        under which it has sealed the version for a manager that led before."""
        version, adapts, sealed = (wishes.pop(name, None) for name in ("version", "adapts", "sealed"))
        scores: manager_pb2.ProbeScores | None = wishes.pop("probe", None)
        request = manager_pb2.UpdateWeightsRequest(
            version=version, adapts=adapts, sealed=sealed, options=manager_pb2.UpdateOptions(**wishes)
        )
        if scores is not None:
            assert self.cluster.manager is not None
            request.probe.CopyFrom(self.cluster.manager.blobs.put(scores.SerializeToString()))
        results: list[Any] = []

        def steps() -> Steps:
            try:
                results.append((yield from trainer.update(request, 60.0)))
            except CkptEngineError as error:
                results.append(error.problem)

        self.world.spawn(steps())
        return results

    def leave(self, rank: int = 0) -> None:
        """The caller of a rank goes, and has done so for good when this returns."""
        manager = self.cluster.manager
        assert manager is not None
        (call,) = (call for call, each in manager.calls.items() if getattr(each.request, "rank", None) == rank)
        manager.cancel_call(call)
        self.wait(LEFT_SECONDS + 0.1)

    def roll_back(self, version: int, lineage: str = "", seconds: float = 5.0, **wishes: Any) -> Any:
        """An operator goes back; the report, or the problem."""
        assert self.cluster.manager is not None
        _, over = self.cluster.manager.roll_back(version, lineage, **wishes)
        self.wait(seconds)
        return over.value

    def evict(self, name: str) -> None:
        """An operator takes a replica out."""
        assert isinstance(self._operate(manager_pb2.EvictReplicaRequest(name=name)), manager_pb2.EvictReplicaResponse)

    def retry(self, name: str) -> Any:
        """An operator asks for another try; the answer, or the problem."""
        return self._operate(manager_pb2.RetryReplicaRequest(name=name))

    def hold(self, name: str, reason: str = "") -> Any:
        """An operator holds a replica; the answer, or the problem."""
        return self._operate(manager_pb2.HoldReplicaRequest(name=name, reason=reason))

    def release(self, name: str) -> Any:
        """An operator lets it go; the answer, or the problem."""
        return self._operate(manager_pb2.ReleaseReplicaRequest(name=name))

    def forget(self, lineage: str, dry_run: bool = False) -> Any:
        """What an operator hears who has a lineage forgotten."""
        return self._operate(manager_pb2.ForgetLineageRequest(lineage=lineage, dry_run=dry_run))

    def deploy(self, action: manager_pb2.SteerDeploymentRequest.Action, number: int = 0, reason: str = "") -> Any:
        """A person approves, pauses, resumes or undoes a deployment; the answer, or the problem."""
        return self._operate(manager_pb2.SteerDeploymentRequest(number=number, action=action, reason=reason))

    @property
    def deployments(self) -> list[manager_pb2.Deployment]:
        """Those that the manager's status shows."""
        assert self.cluster.manager is not None
        return list(self.cluster.manager.machine.status().deployments)

    def _operate(self, request: events.OperatorRequest) -> Any:
        assert self.cluster.manager is not None
        over = self.cluster.manager.operate(request)
        self.wait(0.1)
        return over.value

    def trained(self, group: Group, **wishes: Any) -> Any:
        """One step of the optimizer, and the update to it."""
        group.train()
        return self.update(group, **wishes)

    def update(self, group: Group, seconds: float = 5.0, **wishes: Any) -> Any:
        """All ranks call with the same wishes; the result that all of them get."""
        results = [self.call(trainer, **wishes) for trainer in group.trainers]
        self.wait(seconds)
        assert all(len(result) == 1 for result in results), "a call has no end"
        assert all(result[0] == results[0][0] for result in results)
        return results[0][0]


def outcomes(report: manager_pb2.UpdateReport) -> dict[str, manager_pb2.Outcome]:
    """By replica."""
    return {replica.replica: replica.outcome for replica in report.replicas}


def refused(result: Any, code: weights_pb2.Problem.Code, *words: str) -> None:
    """The result is a problem with this code and these words."""
    assert isinstance(result, Problem), result
    assert result.code == code, result
    for word in words:
        assert word in result.message, result.message
