"""The replicas of one update: each is prepared or left out, then told to install, and in the end has an outcome."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from ckpt_engine.core.problems import deadline, precondition
from ckpt_engine.core.version import Fence, Version
from ckpt_engine.machines.events import PlanWorker
from ckpt_engine.machines.manager.goal import Goal
from ckpt_engine.machines.manager.members import Replica, Unfit
from ckpt_engine.machines.manager.plan_pipeline import Way
from ckpt_engine.machines.manager.report import later_outcome, presumed_outcome, unchanged_outcome
from ckpt_engine.machines.manager.state import ManagerState
from ckpt_engine.machines.manager.versions import everybody
from ckpt_engine.v1 import manager_pb2, weights_pb2

Problem = weights_pb2.Problem

HEALTH = frozenset(
    {Problem.CODE_UNAVAILABLE, Problem.CODE_DEADLINE_EXCEEDED, Problem.CODE_ABORTED, Problem.CODE_INTERNAL}
)
"""Problems of a prepare that concern a replica's health. All others say that it is unfit: its engine cannot load what
is published. If no replica can, what is published is wrong, and the update is refused."""


Workers: TypeAlias = tuple[manager_pb2.PreparedWorker, ...]
"""The workers of one replica, by rank, with their needs against what is published."""


@dataclass(frozen=True)
class Unprepared:
    """The replica has not said what its workers need."""


@dataclass(frozen=True)
class Prepared:
    """The replica can be installed into."""

    workers: Workers


@dataclass(frozen=True)
class Ordered:
    """The replica was told to install, and has no outcome."""

    workers: Workers


@dataclass(frozen=True)
class Ended:
    """The update has ended for the replica."""

    outcome: manager_pb2.ReplicaOutcome
    workers: Workers | None = None  # None: it was left out
    session: str | None = None  # of the agent that was told to install, if the real outcome is unknown


Recipient: TypeAlias = Unprepared | Prepared | Ordered | Ended
"""The state of one replica in an update, in their order. From any of them it may be left out: then it has ended."""


class Recipients:
    """The replicas that an update is for, and the state of each.

    They are prepared under the fill fence and told to install under the install fence (`decide`), which all outcomes
    carry in the end.
    """

    def __init__(self, state: ManagerState, goal: Goal, fill: Fence) -> None:
        self._state = state
        self._goal = goal
        self._fill = fill
        self._fence = Fence()
        self._recipients: dict[str, Recipient] = dict.fromkeys(goal.replicas, Unprepared())  # by name
        self._asked_twice = False
        self._unfit: dict[str, Unfit] = {}
        self.cut_off: dict[str, Problem] = {}  # why replicas cannot read the sources; relays may bring them the version
        self.awaited: set[str] = set()  # replicas that are away; nothing is asked of them until they are back

    @property
    def outcomes(self) -> dict[str, manager_pb2.ReplicaOutcome]:
        """The outcomes by replica, of those that have one; in the end of all."""
        return {name: each.outcome for name, each in self._recipients.items() if isinstance(each, Ended)}

    @property
    def unresolved(self) -> dict[str, str]:
        """Replicas told to install whose outcome is unknown, with the session of the agent that was told."""
        states = ((name, each) for name, each in self._recipients.items() if isinstance(each, Ended))
        return {name: each.session for name, each in states if each.session is not None}

    def outcome(self, name: str) -> manager_pb2.ReplicaOutcome | None:
        """The outcome of one replica; None: it has none yet, or is not of this update."""
        recipient = self._recipients.get(name)
        return recipient.outcome if isinstance(recipient, Ended) else None

    def is_ordered(self, name: str) -> bool:
        """Whether a replica was told to install, and has no outcome."""
        return isinstance(self._recipients[name], Ordered)

    def _workers(self, name: str) -> Workers | None:
        """The workers of a replica that is prepared, or was until it had an outcome; None: it is not prepared."""
        recipient = self._recipients[name]
        return None if isinstance(recipient, Unprepared) else recipient.workers

    def blobs(self) -> list[manager_pb2.BlobRef]:
        """The needs of all prepared workers."""
        return [worker.needs for name in self._recipients for worker in self._workers(name) or ()]

    # -- preparing

    def unprepared(self) -> list[str]:
        """The replicas that are neither prepared nor left out."""
        return [name for name, each in self._recipients.items() if isinstance(each, Unprepared)]

    def prepared(self) -> list[str]:
        """The replicas that are or were prepared, so that they can be installed into."""
        return sorted(name for name in self._recipients if self._workers(name) is not None)

    @property
    def enough(self) -> bool:
        """Whether the prepared replicas suffice, so that the others are not waited for beyond half of the time."""
        return len(self.prepared()) >= max(1, self._goal.least)

    def prepare(self, seconds: float) -> None:
        """Asks, again, every connected replica with workers that have not answered about this manifest. Leaves out
        replicas that an operator holds."""
        manifest = self._goal.published.manifest
        for name in self.unprepared():
            if (hold := self._state.holds.get(name)) is not None and not self._goal.is_attempt:
                held = self.leave_out(name, precondition(f"it is {hold.describe(name)}", replica=name).problem)
                held.operator_hold = True
                continue
            replica = self._state.members.replicas.get(name)
            workers = None if replica is None else replica.prepared_for(manifest.digest)
            never = None if replica is None else replica.never_loads(manifest.digest)
            if workers is not None:
                self._recipients[name] = Prepared(tuple(workers))
            elif never is not None:
                misfit = self._leave_out_unfit(name, never)
                misfit.cannot_load = everybody(self._goal.pool) in self._goal.selection
            elif name not in self.awaited:
                command = manager_pb2.Prepare(fence=self._fill.message(), manifest=manifest, deadline_seconds=seconds)
                self._state.send_to(name, command)

    def overdue(self, seconds: float) -> None:
        """Leaves out all that are not prepared, `seconds` after the update began."""
        for name in self.unprepared():
            message = f"its engine's loader was not recorded within {seconds:.1f} s{self.says(name)}"
            self.leave_out(name, deadline(message, replica=name).problem)

    def take_prepared(self, replica: Replica, body: manager_pb2.Prepared) -> None:
        """Takes a replica's answer to being asked to prepare."""
        if replica.name not in self.unprepared():
            return
        if not body.HasField("problem"):
            workers = sorted(body.workers, key=lambda worker: worker.rank)
            self._recipients[replica.name] = Prepared(tuple(workers))
            replica.prepared = {worker.rank: worker for worker in body.workers}
        elif body.problem.code in HEALTH:
            self.leave_out(replica.name, body.problem)
        else:
            manifest = (
                self._goal.published.manifest.digest if body.problem.code == Problem.CODE_INVALID_ARGUMENT else b""
            )
            problem = body.problem
            if not problem.kept:  # its dtypes fit
                lineage = self._goal.lineage
                other = (
                    f"lineage {lineage!r} publishes a model that this engine cannot load: start the engine with that"
                )
                problem = with_words(problem, other)
            self._leave_out_unfit(replica.name, Unfit(problem, replica.boot_ids(), manifest))

    def says(self, name: str) -> str:
        """A clause with what a silent replica said last of itself, to append to a message; may be empty."""
        replica = self._state.members.replicas.get(name)
        reason = "" if replica is None else replica.closed_reason
        return f"; its agent said last that it does not serve: {reason}" if reason else ""

    def prepare_again(self, problem: Problem | None) -> bool:
        """Has replicas store what they recorded again if planning failed since this manager lacks a blob. Returns
        whether it does so, only once. A hello may name blobs that its sender stored with a manager that just died."""
        if problem is None or problem.code != Problem.CODE_NOT_FOUND or self._asked_twice:
            return False
        self._asked_twice = True
        for name in self.prepared():
            replica = self._state.members.replicas.get(name)
            if replica is not None:
                replica.prepared.clear()
            self._recipients[name] = Unprepared()
        return True

    def try_shut(self, unplanned: Collection[str], near_relays: Collection[str] = ()) -> bool:
        """Forgets what replicas without a plan could not open, since it may be open by now. Returns whether there was
        any, so that plans are to be compiled again. near_relays: replicas to which relays may bring the version
        instead."""
        others = near_relays if self._goal.prefetch != manager_pb2.PREFETCH_NEVER else ()
        replicas = [self._state.members.replicas.get(name) for name in sorted(unplanned) if name not in others]
        retrying = [replica for replica in replicas if replica is not None and replica.shut.forget()]
        return bool(retrying)

    def take_unplanned(self, problems: Mapping[str, Problem], near_relays: Collection[str]) -> None:
        """Takes the replicas for which no plan can be made. Those near relays may be installed from relays; the others
        are left out."""
        for name, problem in problems.items():
            if name in near_relays:
                self.cut_off[name] = problem
            else:
                self._leave_out_unplanned(name, problem)

    def take_ways(
        self, identity: Version, planned: Collection[str], why: Mapping[str, Problem], otherwise: str, never: str
    ) -> None:
        """Leaves out the replicas that are not installed from relays and cannot, or may not, read the trainer.

        planned: replicas that are installed from relays. why: of others, why they are not; this comes first in what is
        told, since relays are how weights were to get there. otherwise: of those that `why` does not name. never: why
        these may not read the trainer; empty: they may.
        """
        for name in self.lacking(identity):
            if name in planned:
                continue
            if name in self.cut_off:
                problem = self.cut_off[name]
                led = led_by(why[name].message, problem) if name in why else with_words(problem, otherwise)
                self._leave_out_unplanned(name, led)
            elif never:
                message = f"it keeps what it serves, since {never}: {why[name].message if name in why else otherwise}"
                self.leave_out(name, precondition(message, replica=name).problem)

    def refusal(self) -> Problem | None:
        """As `too_few`, and remembers which replicas are unfit, unless what is published is to blame."""
        problem = self.too_few()
        if problem is None or self._goal.is_attempt:
            self._remember_unfit()
        return problem

    def too_few(self) -> Problem | None:
        """Why the update is refused; None: the prepared replicas are enough.

        If none is prepared, and some are unfit, what is published is to blame, and the problem names the first tensor.
        """
        if self._goal.adapts and (problem := self._dtype_refusal()) is not None:
            return problem
        able, least = len(self.prepared()), self._goal.least
        if able >= least and (able or not self._unfit):
            return None
        why = self._why_left_out()
        if able or not self._unfit:
            return precondition(f"{able} replicas can be updated, {least} are required ({why})").problem
        name = min(self._unfit)
        problem = Problem()
        problem.CopyFrom(self._unfit[name].problem)
        problem.message = f"no replica can take what lineage {self._goal.lineage!r} publishes ({why})"
        problem.replica = name
        return problem

    def _dtype_refusal(self) -> Problem | None:
        """The refusal that has the ranks publish in the dtypes that models keep, before anything is sealed; None: no
        need."""
        names = sorted(name for name, unfit in self._unfit.items() if unfit.problem.kept)
        if not names:
            return None
        problem = Problem()
        problem.CopyFrom(self._unfit[names[0]].problem)
        for name in names:
            problem.kept.update(self._unfit[name].problem.kept)
        return problem

    def _remember_unfit(self) -> None:
        """Remembers which replicas are unfit, for the status, and so that what can never work is not tried again."""
        for name in self._goal.replicas:
            replica = self._state.members.replicas.get(name)
            if replica is not None and (name in self._unfit or self._workers(name) is not None):
                replica.unfit = self._unfit.get(name)

    def _why_left_out(self) -> str:
        """Names the replicas left out, with reasons; those with the same reason together."""
        names: dict[str, list[str]] = {}
        for name, outcome in sorted(self.outcomes.items()):
            names.setdefault(outcome.problem.message, []).append(name)
        return "; ".join(f"{', '.join(same_reason)}: {message}" for message, same_reason in names.items())

    def workers(self) -> tuple[PlanWorker, ...]:
        """The workers of prepared replicas that are still registered, for the planner."""
        replicas = [(name, self._state.members.replicas.get(name)) for name in self.prepared()]
        return tuple(
            PlanWorker((name, each.rank), each.needs, each.host, replica.transports, replica.shut.of(each.boot_id))
            for name, replica in replicas
            if replica is not None
            for each in self._workers(name) or ()
        )

    # -- installing

    def lacking(self, identity: Version) -> list[str]:
        """The replicas that are prepared and do not serve this version."""
        return [name for name in self.prepared() if not self._serves(name, identity)]

    def decide(self, fence: Fence, identity: Version, together: frozenset[str] = frozenset()) -> None:
        """Takes the install fence. Replicas that serve this version already are left alone; those of a collective only
        if all of them do. together: the replicas of the collective."""
        apart = frozenset() if all(self._serves(name, identity) for name in together) else together
        self._fence = fence
        for outcome in self.outcomes.values():
            outcome.fence.CopyFrom(fence.message())
        for name in self.prepared():
            if name not in apart and self._serves(name, identity):
                outcome = unchanged_outcome(name, self._fence, identity)
                if self._goal.resumes is not None and (earlier := self._outcome_with(name, identity)) is not None:
                    outcome.CopyFrom(earlier)
                    outcome.fence.CopyFrom(fence.message())
                self._recipients[name] = Ended(outcome, self._workers(name))

    def waiting_for(self) -> list[str]:
        """The replicas that are prepared and have no outcome."""
        return sorted(name for name, each in self._recipients.items() if isinstance(each, Prepared | Ordered))

    def install(
        self,
        identity: Version,
        ways: Mapping[str, Way],
        direct: Way,
        seconds: float,
        add: Callable[[str, manager_pb2.Install], None],
        without: Collection[str] = (),
        waits: bool = False,
    ) -> None:
        """Sends the install, again, to all that have no outcome. ways: by replica; direct: of all others. add: adds to
        the command of a replica that has the direct way. without: replicas that are not told. waits: they only
        get ready, and pause no engine yet."""
        for name in self.waiting_for():
            if name in self.awaited or name in without:
                continue
            way = ways.get(name, direct)
            command = manager_pb2.Install(
                fence=self._fence.message(),
                identity=identity.message(),
                pause_mode=self._goal.pause_mode,
                deadline_seconds=seconds,
                waits=waits,
                probe=self._goal.probe,
            )
            workers = self._workers(name) or ()
            for worker in workers:
                key = (name, worker.rank)
                command.workers.add(rank=worker.rank, plan=way.compiled.plans[key], expected=way.combined.expected[key])
            if name not in ways:
                add(name, command)
            if self._state.send_to(name, command):
                self._recipients[name] = Ordered(workers)

    def abandon(self, reason: str, names: Iterable[str] | None = None) -> None:
        """Asks these, or all that have no outcome, to go back if no byte was written."""
        for name in self.waiting_for() if names is None else names:
            self._state.send_to(name, manager_pb2.Abandon(fence=self._fence.message(), reason=reason))

    def take_outcome(self, outcome: manager_pb2.ReplicaOutcome, name: str) -> None:
        """Takes a replica's outcome; a known one stays, unless it was only presumed."""
        match self._recipients[name]:
            case Prepared(workers) | Ordered(workers) | Ended(workers=workers, session=str()):
                self._recipients[name] = Ended(outcome, workers)

    def resolve(self, identity: Version) -> None:
        """Sets the outcomes of unresolved replicas that are known by now."""
        for name, session in self.unresolved.items():
            outcome = later_outcome(self._state.members.replicas.get(name), self._fence, identity, session)
            if outcome is not None:
                self.take_outcome(outcome, name)

    def leave_out(self, name: str, problem: Problem) -> manager_pb2.ReplicaOutcome:
        """Ends the update for a replica without an outcome, and tells the callers. Returns the presumed outcome."""
        replica = self._state.members.replicas.get(name)
        ordered = self.is_ordered(name)
        outcome = presumed_outcome(name, replica, self._fence, problem, is_ordered=ordered)
        session = "" if replica is None else replica.session_id
        self._recipients[name] = Ended(outcome, session=session if ordered else None)
        for call in self._goal.calls.values():
            progress = manager_pb2.UpdateProgress(replica=name, message=f"left out: {problem.message}")
            self._state.emit(call, manager_pb2.UpdateEvent(progress=progress))
        return outcome

    def _outcome_with(self, name: str, identity: Version) -> manager_pb2.ReplicaOutcome | None:
        """A replica's last outcome, if that brought it to this version; None: another one, or none, is known."""
        replica = self._state.members.replicas.get(name)
        outcome = None if replica is None else replica.last_outcome
        if outcome is None or outcome.outcome != manager_pb2.OUTCOME_NEW_SERVING:
            return None
        return outcome if Version.or_none(outcome.after) == identity else None

    def _serves(self, name: str, identity: Version) -> bool:
        replica = self._state.members.replicas.get(name)
        return replica is not None and replica.holds(identity) and replica.serving

    def _leave_out_unplanned(self, name: str, problem: Problem) -> None:
        replica = self._state.members.replicas.get(name)
        if replica is not None:
            replica.shut.forget()  # no relay brought it, so the next update tries shut ways again
        self._leave_out_unfit(name, Unfit(problem, () if replica is None else replica.boot_ids()))

    def _leave_out_unfit(self, name: str, unfit: Unfit) -> manager_pb2.ReplicaOutcome:
        self._unfit[name] = unfit
        return self.leave_out(name, unfit.problem)


def with_words(problem: Problem, more: str) -> Problem:
    """The problem with the clauses of `more` that its message does not have yet."""
    extended = Problem()
    extended.CopyFrom(problem)
    new = [clause for clause in more.split("; ") if clause and clause not in problem.message]
    extended.message = "; ".join([problem.message, *new])
    return extended


def led_by(cause: str, problem: Problem) -> Problem:
    """The problem with its clauses behind `cause`, without those that `cause` has."""
    led = Problem()
    led.CopyFrom(problem)
    led.message = with_words(Problem(message=cause), problem.message).message
    return led
