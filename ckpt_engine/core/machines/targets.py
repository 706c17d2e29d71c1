"""The replicas of one update: prepared or left out first, then told to install, and in the end each with an outcome."""

from __future__ import annotations

from ckpt_engine.core.machines.events import Combined, Compiled, PlanWorker
from ckpt_engine.core.machines.manager_state import State
from ckpt_engine.core.machines.members import Replica
from ckpt_engine.core.machines.order import Order
from ckpt_engine.core.machines.report import already_there, left_out
from ckpt_engine.v1 import manager_pb2, weights_pb2

Problem = weights_pb2.Problem

LEAVES_OUT = frozenset({Problem.UNAVAILABLE, Problem.DEADLINE_EXCEEDED, Problem.ABORTED, Problem.INTERNAL})
"""Problems of a prepare that concern this replica's health, not its model: it is left out, the others go on."""


class Targets:
    """outcomes: by name; grows until every replica has one. told: whether some were told to install."""

    def __init__(self, state: State, order: Order, fence: weights_pb2.Fence) -> None:
        self._state = state
        self._order = order
        self._fence = fence
        self._prepared: dict[str, list[manager_pb2.PreparedWorker]] = {}
        self.outcomes: dict[str, manager_pb2.ReplicaOutcome] = {}
        self.told = False

    def blobs(self) -> list[manager_pb2.BlobRef]:
        """Their workers' needs."""
        return [prepared.needs for workers in self._prepared.values() for prepared in workers]

    # -- preparing

    def unprepared(self) -> list[str]:
        """Those that are neither prepared nor left out."""
        return [name for name in self._order.replicas if name not in self._prepared and name not in self.outcomes]

    def prepared(self) -> list[str]:
        """Those that are prepared, and so can be installed into."""
        return sorted(self._prepared)

    def prepare(self, seconds: float) -> None:
        """Asks, again, every connected replica whose workers have not recorded this manifest."""
        manifest = self._order.published.manifest
        for name in self.unprepared():
            replica = self._state.members.replicas.get(name)
            known = None if replica is None else replica.prepared_for(manifest.digest)
            if known is not None:
                self._prepared[name] = known
            else:
                command = manager_pb2.Prepare(fence=self._fence, manifest=manifest, deadline_seconds=seconds)
                self._state.send_to(name, command)

    def take_prepared(self, replica: Replica, body: manager_pb2.Prepared) -> Problem | None:
        """Takes an answer; the problem if it is one that refuses the whole update."""
        if replica.name not in self.unprepared():
            return None
        if not body.HasField("problem"):
            self._prepared[replica.name] = sorted(body.workers, key=lambda worker: worker.rank)
            replica.prepared = {worker.rank: worker for worker in body.workers}
        elif body.problem.code in LEAVES_OUT:
            self.leave_out(replica.name, body.problem)
        else:
            return body.problem
        return None

    def prepare_again(self) -> None:
        """What they recorded is not stored here: it went to a manager before this one. They store it once more."""
        for name in self.prepared():
            replica = self._state.members.replicas.get(name)
            if replica is not None:
                replica.prepared.clear()
        self._prepared.clear()

    def why_left_out(self) -> str:
        """Names those that are, with the reason."""
        return "; ".join(f"{name}: {self.outcomes[name].problem.message}" for name in sorted(self.outcomes))

    def workers(self) -> tuple[PlanWorker, ...]:
        """Of the prepared ones, for the planner."""
        return tuple(
            PlanWorker((name, worker.rank), worker.needs, worker.host, self._state.members.replicas[name].transports)
            for name in self.prepared()
            for worker in self._prepared[name]
        )

    # -- installing

    def skip_holders(self, identity: weights_pb2.Identity) -> None:
        """Those that serve this very version already are left alone."""
        for name in self.prepared():
            replica = self._state.members.replicas.get(name)
            if replica is not None and replica.holds(identity) and replica.serving:
                self.outcomes[name] = already_there(name, self._fence, identity)

    def waiting_for(self) -> list[str]:
        """Those that are prepared and have no outcome."""
        return [name for name in self.prepared() if name not in self.outcomes]

    def install(self, identity: weights_pb2.Identity, compiled: Compiled, combined: Combined, seconds: float) -> None:
        """Tells, again, everybody who has no outcome."""
        self.told = True
        for name in self.waiting_for():
            command = manager_pb2.Install(
                fence=self._fence, identity=identity, pause_mode=self._order.pause_mode, deadline_seconds=seconds
            )
            for worker in self._prepared[name]:
                key = (name, worker.rank)
                command.workers.add(rank=worker.rank, plan=compiled.plans[key], expected=combined.expected[key])
            self._state.send_to(name, command)

    def abandon(self, reason: str) -> None:
        """Asks everybody who has no outcome to go back, if no byte was written."""
        for name in self.waiting_for():
            self._state.send_to(name, manager_pb2.Abandon(fence=self._fence, reason=reason))

    def take_outcome(self, outcome: manager_pb2.ReplicaOutcome, name: str) -> None:
        """A replica says what became of it."""
        if name in self.waiting_for():
            self.outcomes[name] = outcome

    def leave_out(self, name: str, problem: Problem) -> None:
        """Ends the update for one replica that gave no outcome."""
        replica = None if self.told else self._state.members.replicas.get(name)
        self.outcomes[name] = left_out(name, replica, self._fence, problem)
        self._prepared.pop(name, None)
