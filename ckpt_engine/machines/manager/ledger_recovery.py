"""Decides what a manager does about a ledger that lost something or does not answer, and warns operators of it.

- The ledger was rolled back (an old copy was put back), or lost and created again under the old cluster's id: members
  have seen higher epochs and versions than it knows. The manager goes on above them, so that no epoch is used twice.
- It was lost, and has another cluster's id now: members of the old cluster are refused, stay as they are and dial
  again. Only an operator knows whether the old ledger is lost, so they are named, with what brings them back.
- A member has seen far higher epochs than any ledger could have forgotten: it is not believed and not let in, since one
  wrong hello would spend all epochs for ever. It stays as it is and dials again.
- The ledger cannot be written: nothing is begun that would need it, and no replica is touched.
- It did not answer about a commit: it is read again, and nothing is begun meanwhile for the selected replicas.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

from ckpt_engine.core.problems import unavailable
from ckpt_engine.core.version import Version
from ckpt_engine.machines.events import Done, ReadCommits
from ckpt_engine.machines.manager.members import Hello, Replica, speaker
from ckpt_engine.machines.manager.state import ManagerState
from ckpt_engine.machines.manager.versions import Commits
from ckpt_engine.v1 import manager_pb2

MOST_SKIPPED = 1 << 32
"""The most epochs that a ledger is believed to have forgotten: one a second for 136 years. A ledger that was lost and
created again under its cluster's id has forgotten all of them."""

NAMED = 8
"""Clusters, and members of each, that are remembered at most: names come from outside."""


@dataclass(frozen=True, slots=True)
class CommitsRead:
    """Key of the task that reads the ledger's commits again."""


@dataclass(frozen=True, slots=True)
class CommitsRetry:
    """Key of the timer after which reading the commits is tried again."""


@dataclass
class LedgerRecovery:
    """Members that this manager does not let in or does not believe, and whether its ledger was rolled back."""

    state: ManagerState
    rolled_back: str = ""  # how it is known that the ledger was, for people; empty: it was not
    strangers: dict[str, list[str]] = field(default_factory=dict)  # members refused for their cluster, by cluster
    unbelieved: dict[str, int] = field(default_factory=dict)  # impossible epochs, by the member's name
    reading: bool = False  # a task that reads the ledger runs, or the timer before it

    def check(self, hello: Hello) -> None:
        """Raises UNAVAILABLE for an epoch that is not believed; remembers members of other clusters."""
        highest, name = self._highest(hello), speaker(hello)
        if not self._believed(highest, name):
            raise unavailable(
                f"{name} has seen epoch {highest}, this manager's ledger knows of {self.state.epoch}: no ledger is so "
                f"far behind (more than {MOST_SKIPPED}), so one of the two is wrong. It is not let in, goes on as it "
                "is and asks again: restart it (a replica with its engine), or give this manager the right ledger",
                replica=hello.name if isinstance(hello, manager_pb2.ReplicaHello) else "",
            )
        cluster = self.state.members.cluster
        if hello.cluster and hello.cluster != cluster and len(self.strangers) < NAMED:
            names = self.strangers.setdefault(hello.cluster, [])
            if name not in names and len(names) < NAMED:
                names.append(name)

    def learn(self, hello: Hello) -> bool:
        """Takes over what an accepted member knows and the ledger does not. Returns whether epochs were skipped.

        Epochs of workers' words count even if they are of another cluster: an engine that is moved here must not be
        given lower ones. Versions count only if the member served this cluster: another one may use the same name for
        another lineage.
        """
        state, highest = self.state, self._highest(hello)
        same_cluster = hello.cluster == state.members.cluster
        skipped = highest > state.epoch
        if skipped:
            if same_cluster:
                self.rolled_back = (
                    f"the ledger was rolled back: {speaker(hello)} has seen epoch {highest}, the ledger only "
                    f"{state.epoch}; it goes on above that"
                )
            self._skip(highest)
        if same_cluster and isinstance(hello, manager_pb2.ReplicaHello):
            for worker in hello.workers:
                if worker.state == manager_pb2.WORKER_STATE_CLEAN:
                    self._learn_version(hello.name, worker)
        if same_cluster and isinstance(hello, manager_pb2.HolderHello) and self._decided_on(hello):
            for held in hello.held:
                state.versions.take_number(Version.of(held.identity))
        return skipped

    def _decided_on(self, hello: manager_pb2.HolderHello) -> bool:
        """Whether the numbers of what a holder holds are used. Relays hold versions before these are committed, so what
        an intact ledger does not know was not installed."""
        return not hello.HasField("filling") or bool(self.rolled_back)

    def learn_epochs(self, replica: Replica) -> bool:
        """Takes over epochs from a heartbeat: an agent may say hello before its engine has started. Returns whether
        epochs were skipped."""
        highest = max((worker.epoch for worker in replica.workers), default=0)
        skipped = highest > self.state.epoch and self._believed(highest, f"replica {replica.name!r}")
        if skipped:
            self._skip(highest)
        return skipped

    def _believed(self, epoch: int, name: str) -> bool:
        if epoch <= self.state.epoch + MOST_SKIPPED:
            self.unbelieved.pop(name, None)
            return True
        if name in self.unbelieved or len(self.unbelieved) < NAMED:
            self.unbelieved[name] = epoch
        return False

    def _skip(self, epoch: int) -> None:
        self.state.epoch = epoch
        self.state.spend_ahead()

    def look(self) -> None:
        """Has the ledger read again if it was silent about a commit. Called after every event."""
        if self.state.versions.doubtful and not self.reading:
            self.read()

    def read(self) -> None:
        """Has the ledger read."""
        self.reading = True
        self.state.run(CommitsRead(), ReadCommits(self.state.deadlines.ledger))

    def take_commits(self, done: Done) -> Commits | None:
        """Takes the commits that were read, and returns them; None: the read failed, and is tried again in a moment."""
        if done.problem is not None:
            self.state.set_timer(CommitsRetry(), self.state.deadlines.resend)
            return None
        self.reading = False
        commits = cast(Commits, done.result)
        self.state.versions.read_again(commits)
        return commits

    def warnings(self) -> list[str]:
        """Sentences for the status that say what is wrong and what to do."""
        lines = (
            [] if self.state.ledger_problem is None else [f"no update can begin: {self.state.ledger_problem.message}"]
        )
        if self.rolled_back:
            lines.append(self.rolled_back)
        if self.state.versions.doubtful:
            lines.append(
                "the ledger has not answered whether a version was committed: it is read again before more begins"
            )
        for name, epoch in self.unbelieved.items():
            lines.append(
                f"{name}: not believed, since it has seen epoch {epoch} and this manager's ledger knows of "
                f"{self.state.epoch} only. Restart it (a replica with its engine), or give this manager the right "
                "ledger"
            )
        for cluster, names in self.strangers.items():
            lines.append(
                f"{', '.join(names)}: refused, since it served cluster {cluster} and this manager's ledger is of "
                f"cluster {self.state.members.cluster}. If that cluster's ledger is lost, restart the manager "
                f"with `ckpt-engine manager --cluster {cluster}` and a fresh ledger: all of them then come back by "
                "themselves"
            )
        return lines

    def _learn_version(self, name: str, worker: manager_pb2.WorkerStatus) -> None:
        identity = Version.of(worker.identity)
        if self.state.versions.take_number(identity):
            self.rolled_back = f"the ledger was rolled back: a replica holds {identity}, which it lacks"
        self.state.versions.remember(identity)
        self.state.versions.learn(name, identity, worker.epoch)

    def _highest(self, hello: Hello) -> int:
        same_cluster = hello.cluster == self.state.members.cluster
        epochs = [hello.epoch if same_cluster else 0]
        if isinstance(hello, manager_pb2.ReplicaHello):
            epochs += [worker.epoch for worker in hello.workers]
            if hello.HasField("last_outcome") and hello.last_outcome.fence.cluster == self.state.members.cluster:
                epochs.append(hello.last_outcome.fence.epoch)
        return max(epochs)
