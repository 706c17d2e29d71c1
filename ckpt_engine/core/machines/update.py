"""One update that runs: prepare, plan, seal, combine, record the intent, install, report.

Until the intent is recorded every failure refuses it, and no replica has been touched. From then on it always ends
with an outcome for every replica, at its deadline at the latest. The same steps bring a late replica to the latest
version (`late`); then there is no caller, and sources only digest what they keep sealed.

Every message that somebody must act on is sent again until it is answered, and at once when its receiver comes back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from ckpt_engine.core.machines.events import (
    Call,
    Combined,
    CombineSeals,
    Compiled,
    CompilePlans,
    Done,
    PlanWorker,
    Published,
    RecordIntent,
    RecordOutcome,
)
from ckpt_engine.core.machines.manager_state import Latest, State, describe
from ckpt_engine.core.machines.members import Replica, Trainer
from ckpt_engine.core.machines.report import already_there, build_report, left_out
from ckpt_engine.core.problems import deadline, precondition, unavailable
from ckpt_engine.v1 import manager_pb2, weights_pb2

Problem = weights_pb2.Problem

LEAVES_OUT = frozenset({Problem.UNAVAILABLE, Problem.DEADLINE_EXCEEDED, Problem.ABORTED})
"""Problems of a prepare that concern this replica's health, not its model: it is left out, the others go on."""


@dataclass
class Order:
    """What an update is to do. end: monotonic seconds by which it must have reported.

    replicas: those it is for, by name. selection: the caller's wish, None for all. late: a replica is brought to
    `identity`, which was sealed before; otherwise `identity` is None.
    """

    lineage: str
    version: int
    published: Published
    replicas: tuple[str, ...]
    calls: dict[int, Call]  # by trainer rank
    pause_mode: manager_pb2.PauseMode
    min_replicas: int
    selection: frozenset[str] | None
    end: float
    late: weights_pb2.Identity | None = None


class Update:
    """Runs one order. over: called once, with the report, or the problem for which it was refused."""

    def __init__(
        self,
        state: State,
        order: Order,
        over: Callable[[manager_pb2.UpdateReport | None, Problem | None, float], None],
    ) -> None:
        self.state = state
        self.order = order
        self.fence = state.next_fence()
        self.phase = "preparing"
        self._over = over
        self._prepared: dict[str, list[manager_pb2.PreparedWorker]] = {}
        self._outcomes: dict[str, manager_pb2.ReplicaOutcome] = {}
        self._sealed: dict[int, manager_pb2.Sealed] = {}
        self._sealing: set[int] = set()
        self._compiled: Compiled | None = None
        self._combined: Combined | None = None
        self._identity = order.late
        self.cut = ""
        self._released = False
        self._report: manager_pb2.UpdateReport | None = None
        self._install_started: float | None = None

    # -- for the manager's machine

    def describe(self) -> str:
        """What runs, for who must wait for it."""
        what = "bringing up" if self.order.late is not None else "update"
        return (
            f"{what} {self.fence.epoch} (version {self.order.version} of lineage {self.order.lineage!r}): {self.phase}"
        )

    def blobs(self) -> list[manager_pb2.BlobRef]:
        """Blobs that members may fetch for it."""
        refs = [prepared.needs for workers in self._prepared.values() for prepared in workers]
        if self._compiled is not None:
            refs += [*self._compiled.plans.values(), *self._compiled.atoms.values()]
        if self._combined is not None:
            refs += self._combined.expected.values()
        return refs + [sealed.digests for sealed in self._sealed.values() if sealed.HasField("digests")]

    def start(self, now: float) -> None:
        """Takes the first step."""
        self._started = now
        self._timer("end", self.order.end - self.state.deadlines.report / 2 - now)
        self._timer("resend", self.state.deadlines.resend)
        self._begin_phase("preparing", self.state.deadlines.prepare, now)
        for name in self.order.replicas:
            replica = self.state.members.replicas.get(name)
            if replica is None or replica.peer is None:
                self._leave_out(name, unavailable("it is not connected", replica=name).problem)
            else:
                self._prepare(replica, now)
        self._when_prepared(now)

    def cut_short(self, reason: str, now: float) -> None:
        """Ends as soon as that is safe: something more important waits. Only for late replicas."""
        self.cut = reason
        if self.phase in ("preparing", "planning", "sealing", "combining"):
            self._refuse(Problem(code=Problem.ABORTED, message=reason), now)
        elif self.phase == "installing":
            for name in self._waiting_for():
                self._send_to(name, manager_pb2.Abandon(fence=self.fence, reason=reason))

    def caller_left(self, rank: int, now: float) -> None:
        """A rank's call was cancelled: before the intent its weights may change now, after it that will be noticed."""
        del self.order.calls[rank]
        if self._can_refuse():
            self._refuse(unavailable(f"the call of rank {rank} was cancelled", ranks=(rank,)).problem, now)

    # -- members come and go

    def member_lost(self, member: Trainer | Replica, now: float) -> None:
        """It gets some time to come back."""
        if self._concerns(member):
            self._timer(_absence(member), self.state.deadlines.lease)

    def member_back(self, member: Trainer | Replica, now: float) -> None:
        """It said hello again (or for the first time): it gets what it may have missed."""
        if not self._concerns(member):
            return
        self.state.cancel_timer(self._key(_absence(member)))
        if isinstance(member, Trainer):
            if self.order.late is None and self._can_refuse() and not self._offers_the_same(member):
                message = f"rank {member.rank} published another table while {self.phase}"
                self._refuse(unavailable(message, ranks=(member.rank,)).problem, now)
                return
        else:
            outcome = member.last_outcome
            if outcome is not None and outcome.fence == self.fence:
                self._take_outcome(member, outcome, now)
        self._send_missing(now)

    def member_gone(self, member: Trainer | Replica, now: float) -> None:
        """It said goodbye, was replaced by another process, or did not come back in time."""
        if not self._concerns(member):
            return
        if isinstance(member, Trainer):
            if self._can_refuse():
                message = f"rank {member.rank} of lineage {member.lineage!r} is gone while {self.phase}"
                self._refuse(unavailable(message, ranks=(member.rank,)).problem, now)
        else:
            self._lose_replica(member.name, now)

    def _lose_replica(self, name: str, now: float) -> None:
        if name not in self._outcomes and self.phase in ("preparing", "installing"):
            message = f"its agent was lost while {self.phase} and did not come back"
            self._leave_out(name, unavailable(message, replica=name).problem)
            self._when_prepared(now)
            self._when_installed(now)

    def _offers_the_same(self, trainer: Trainer) -> bool:
        tables = {source.rank: source.table for source in self.order.published.sources}
        return trainer.table == tables.get(trainer.rank)

    def _concerns(self, member: Trainer | Replica) -> bool:
        if isinstance(member, Replica):
            return member.name in self.order.replicas
        return member.lineage == self.order.lineage

    # -- messages and results

    def message(self, member: Trainer | Replica, body: object, now: float) -> None:
        """Something of a member that carries a fence; other fences than this one's are of the past."""
        match body:
            case manager_pb2.Prepared() if isinstance(member, Replica) and body.fence == self.fence:
                self._take_prepared(member, body, now)
            case manager_pb2.Sealed() if body.fence == self.fence:
                self._take_sealed(body, now)
            case manager_pb2.Progress() if isinstance(member, Replica) and body.fence == self.fence:
                self._tell(
                    manager_pb2.UpdateProgress(
                        replica=member.name,
                        stage=body.stage,
                        bytes_done=body.bytes_done,
                        bytes_total=body.bytes_total,
                    )
                )
            case manager_pb2.ReplicaOutcome() if isinstance(member, Replica) and body.fence == self.fence:
                self._take_outcome(member, body, now)

    def done(self, step: str, done: Done, now: float) -> None:
        """A task of this update ended."""
        if step == "report":
            self._end(now)
        elif done.problem is not None:
            if step == "intent" and not done.answered and self._identity is not None:
                # It may be on the disk all the same, and what is there counts after a restart: its number is taken.
                self.state.last[self.order.lineage] = self._identity
            if self._can_refuse() or step == "intent":
                self._refuse(done.problem, now)
        elif step == "plan":
            self._compiled = cast(Compiled, done.result)
            self._seal(now)
        elif step == "combine":
            self._combined = cast(Combined, done.result)
            self._decide_identity(now)
        elif step == "intent":
            self._install(now)

    def timer(self, step: str, now: float) -> None:
        """A timer of this update fired."""
        if step == "resend":
            self._timer("resend", self.state.deadlines.resend)
            self._send_missing(now)
        elif step == "end":
            self._out_of_time(now)
        elif step == self.phase:
            self._phase_over(now)
        elif step.startswith("lost "):
            self._not_back(step, now)

    def _not_back(self, step: str, now: float) -> None:
        """A lost member had its time to come back."""
        members = self.state.members
        for rank, trainer in members.ranks(self.order.lineage).items():
            if step == f"lost rank {rank}" and trainer.peer is None:
                self.member_gone(trainer, now)
                return
        for name in self.order.replicas:
            replica = members.replicas.get(name)
            if step == f"lost replica {name}" and (replica is None or replica.peer is None):
                self._lose_replica(name, now)
                return

    # -- prepare and plan

    def _prepare(self, replica: Replica, now: float) -> None:
        known = replica.prepared_for(self.order.published.manifest.digest)
        if known is not None:
            self._prepared[replica.name] = known
        else:
            left = self._phase_end - now
            command = manager_pb2.Prepare(
                fence=self.fence, manifest=self.order.published.manifest, deadline_seconds=max(0.001, left)
            )
            self.state.send(replica, command)

    def _take_prepared(self, replica: Replica, body: manager_pb2.Prepared, now: float) -> None:
        if self.phase != "preparing" or replica.name in self._prepared or replica.name in self._outcomes:
            return
        if not body.HasField("problem"):
            self._prepared[replica.name] = sorted(body.workers, key=lambda worker: worker.rank)
            replica.prepared = {worker.rank: worker for worker in body.workers}
        elif body.problem.code in LEAVES_OUT:
            self._leave_out(replica.name, body.problem)
        else:
            self._refuse(body.problem, now)
            return
        self._when_prepared(now)

    def _when_prepared(self, now: float) -> None:
        """Goes on once every replica is prepared or left out."""
        if self.phase != "preparing" or len(self._prepared) + len(self._outcomes) < len(self.order.replicas):
            return
        if len(self._prepared) < self.order.min_replicas:
            reasons = "; ".join(f"{name}: {self._outcomes[name].problem.message}" for name in sorted(self._outcomes))
            message = (
                f"{len(self._prepared)} replicas can be updated, {self.order.min_replicas} are required ({reasons})"
            )
            self._refuse(precondition(message).problem, now)
            return
        self._begin_phase("planning", self.state.deadlines.plan, now)
        workers = tuple(
            PlanWorker((name, worker.rank), worker.needs, worker.host, self.state.members.replicas[name].transports)
            for name in sorted(self._prepared)
            for worker in self._prepared[name]
        )
        self._run("plan", CompilePlans(self.order.published, workers, self._seconds(self.state.deadlines.plan, now)))

    # -- seal and combine

    def _seal(self, now: float) -> None:
        self._begin_phase("sealing", self.state.deadlines.seal, now)
        self._sealing = {source.rank for source in self.order.published.sources}
        self._send_seals(now)

    def _send_seals(self, now: float) -> None:
        assert self._compiled is not None
        left = max(0.001, self._phase_end - now)
        for source in self.order.published.sources:
            if source.rank not in self._sealing:
                continue
            atoms = self._compiled.atoms[source.rank]
            trainer = self.state.members.source(self.order.lineage, source.rank, source.table)
            if trainer is not None:
                seal = manager_pb2.Seal(
                    fence=self.fence,
                    version=self.order.version,
                    atoms=atoms,
                    keep=self.order.late is not None,
                    deadline_seconds=left,
                )
                self.state.send(trainer, seal)
            elif self.order.late is not None:
                # The source's process is gone, but what it offered stays sealed without it: its reader digests.
                command = manager_pb2.SealForReaders(
                    fence=self.fence, table=source.table, atoms=atoms, deadline_seconds=left
                )
                self._send_to(self.order.replicas[0], command)

    def _take_sealed(self, body: manager_pb2.Sealed, now: float) -> None:
        if self.phase != "sealing":
            return
        assert self._compiled is not None
        # Two sources with the same atoms blob are impossible: it names the digest of its source's table.
        ranks = [rank for rank in sorted(self._sealing) if self._compiled.atoms[rank] == body.atoms]
        if not ranks:
            return
        if body.HasField("problem"):
            problem = Problem()
            problem.CopyFrom(body.problem)
            problem.ranks[:] = problem.ranks or ranks
            self._refuse(problem, now)
            return
        self._sealing.difference_update(ranks)
        self._sealed.update(dict.fromkeys(ranks, body))
        if not self._sealing:
            self._begin_phase("combining", self.state.deadlines.plan, now)
            digests = {rank: sealed.digests for rank, sealed in self._sealed.items()}
            seconds = self._seconds(self.state.deadlines.plan, now)
            self._run("combine", CombineSeals(self.order.published, self._compiled, digests, seconds))

    def _decide_identity(self, now: float) -> None:
        """The root is known: is this the version that it says it is, and who lacks it?"""
        assert self._combined is not None
        order = self.order
        identity = weights_pb2.Identity(lineage=order.lineage, version=order.version, root=self._combined.root)
        known = order.late or self.state.last.get(order.lineage)
        if known is not None and known.version == order.version and known != identity:
            message = (
                f"the weights are not those of {describe(known)}: their root is {identity.root.hex()[:12]}; "
                "take a higher version, or start a new lineage"
            )
            self._refuse(precondition(message).problem, now)
            return
        self._identity = identity
        for name in sorted(self._prepared):
            replica = self.state.members.replicas.get(name)
            if replica is not None and replica.holds(identity) and replica.serving:
                self._outcomes[name] = already_there(name, self.fence, identity)
        if self._install_seconds(now) <= 0:
            self._refuse(deadline("no time was left to install when the weights were sealed").problem, now)
        else:
            self._begin_phase("recording", self.state.deadlines.ledger, now)
            seconds = self._seconds(self.state.deadlines.ledger, now)
            self._run("intent", RecordIntent(self.fence.epoch, identity, seconds))

    # -- install

    def _install(self, now: float) -> None:
        """The intent is on the disk: from here on there is no refusing."""
        assert self._identity is not None
        order = self.order
        self.state.last[order.lineage] = self._identity
        if order.late is None:
            self.state.latest = Latest(self._identity, order.published, order.selection)
        self._begin_phase("installing", order.end - now, now)
        self._install_started = now
        for name in self._waiting_for():
            replica = self.state.members.replicas.get(name)
            if self.cut:
                self._leave_out(name, Problem(code=Problem.ABORTED, message=self.cut, replica=name))
            elif replica is None or replica.peer is None:
                self._timer(f"lost replica {name}", self.state.deadlines.lease)
        self._send_missing(now)
        self._when_installed(now)

    def _send_install(self, name: str, now: float) -> None:
        assert self._compiled is not None
        assert self._combined is not None
        command = manager_pb2.Install(
            fence=self.fence,
            identity=self._identity,
            pause_mode=self.order.pause_mode,
            deadline_seconds=max(0.001, self._install_seconds(now)),
        )
        for worker in self._prepared[name]:
            key = (name, worker.rank)
            command.workers.add(rank=worker.rank, plan=self._compiled.plans[key], expected=self._combined.expected[key])
        self._send_to(name, command)

    def _take_outcome(self, replica: Replica, outcome: manager_pb2.ReplicaOutcome, now: float) -> None:
        if self.phase == "installing" and replica.name not in self._outcomes and replica.name in self._prepared:
            self._outcomes[replica.name] = outcome
            self._when_installed(now)

    def _waiting_for(self) -> list[str]:
        return [name for name in sorted(self._prepared) if name not in self._outcomes]

    def _when_installed(self, now: float) -> None:
        if self.phase != "installing" or self._waiting_for():
            return
        assert self._identity is not None
        self.phase = "reporting"
        self._report = build_report(
            self.fence,
            self._identity,
            self.order.published,
            self._outcomes,
            seconds=now - self._started,
            planning=(self._install_started or now) - self._started,
        )
        self._run("report", RecordOutcome(self._report, self.state.deadlines.ledger))

    # -- time

    def _out_of_time(self, now: float) -> None:
        if self._can_refuse():
            seconds = now - self._started
            self._refuse(deadline(f"the update was still {self.phase} after {seconds:.1f} s").problem, now)
        elif self.phase == "installing":
            for name in self._waiting_for():
                message = f"no outcome within {now - self._started:.1f} s; its agent goes on by itself"
                self._leave_out(name, deadline(message, replica=name).problem)
            self._when_installed(now)

    def _phase_over(self, now: float) -> None:
        if self.phase == "preparing":
            for name in self.order.replicas:
                if name not in self._prepared and name not in self._outcomes:
                    message = f"its engine's loader was not recorded within {self.state.deadlines.prepare:g} s"
                    self._leave_out(name, deadline(message, replica=name).problem)
            self._when_prepared(now)
        elif self.phase == "sealing":
            ranks = sorted(self._sealing)
            message = f"ranks {ranks} did not seal their weights within {self.state.deadlines.seal:g} s"
            self._refuse(deadline(message, ranks=ranks).problem, now)

    def _send_missing(self, now: float) -> None:
        """Sends again what has not been answered."""
        if self.phase == "preparing":
            for name in self.order.replicas:
                replica = self.state.members.replicas.get(name)
                if replica is not None and name not in self._prepared and name not in self._outcomes:
                    self._prepare(replica, now)
            self._when_prepared(now)
        elif self.phase == "sealing":
            self._send_seals(now)
        elif self.phase == "installing":
            for name in self._waiting_for():
                self._send_install(name, now)
                if self.cut:
                    self._send_to(name, manager_pb2.Abandon(fence=self.fence, reason=self.cut))

    # -- the end

    def _can_refuse(self) -> bool:
        """While the intent is being recorded only the ledger can still refuse: it may be on the disk already."""
        return self.phase in ("preparing", "planning", "sealing", "combining")

    def _refuse(self, problem: Problem, now: float) -> None:
        self.phase = "over"
        for call in self.order.calls.values():
            self.state.finish(call, problem)
        self._release()
        self._over(None, problem, now)

    def _end(self, now: float) -> None:
        assert self._report is not None
        self.phase = "over"
        for call in self.order.calls.values():
            self.state.emit(call, manager_pb2.UpdateEvent(report=self._report))
            self.state.finish(call)
        self._release()
        self._over(self._report, None, now)

    def _release(self) -> None:
        for name in ("end", "resend", "preparing", "sealing"):
            self.state.cancel_timer(self._key(name))
        if self.order.late is None:
            for trainer in self.state.members.ranks(self.order.lineage).values():
                self.state.send(trainer, manager_pb2.Release(fence=self.fence))

    def _leave_out(self, name: str, problem: Problem) -> None:
        """Ends the update for one replica that gave no outcome."""
        told = self.phase == "installing" and not self.cut
        replica = None if told else self.state.members.replicas.get(name)
        self._outcomes[name] = left_out(name, replica, self.fence, problem)
        self._prepared.pop(name, None)

    # -- small things

    def _begin_phase(self, phase: str, seconds: float, now: float) -> None:
        self.phase = phase
        self._phase_end = now + self._seconds(seconds, now)
        if phase in ("preparing", "sealing"):
            self._timer(phase, self._phase_end - now)
        self._tell(manager_pb2.UpdateProgress(stage=manager_pb2.PLAN, message=phase))

    def _seconds(self, most: float, now: float) -> float:
        return max(0.001, min(most, self.order.end - self.state.deadlines.report - now))

    def _install_seconds(self, now: float) -> float:
        return self.order.end - self.state.deadlines.report - now

    def _tell(self, progress: manager_pb2.UpdateProgress) -> None:
        for call in self.order.calls.values():
            self.state.emit(call, manager_pb2.UpdateEvent(progress=progress))

    def _send_to(self, name: str, body: manager_pb2.Install | manager_pb2.Abandon | manager_pb2.SealForReaders) -> None:
        replica = self.state.members.replicas.get(name)
        if replica is not None:
            self.state.send(replica, body)

    def _run(self, step: str, task: CompilePlans | CombineSeals | RecordIntent | RecordOutcome) -> None:
        self.state.run(self._key(step), task)

    def _timer(self, step: str, seconds: float) -> None:
        self.state.set_timer(self._key(step), seconds)

    def _key(self, step: str) -> tuple[str, int, str]:
        return ("update", self.fence.epoch, step)


def _absence(member: Trainer | Replica) -> str:
    """The timer that ends waiting for a lost member."""
    return f"lost rank {member.rank}" if isinstance(member, Trainer) else f"lost replica {member.name}"
