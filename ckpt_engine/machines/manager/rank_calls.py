"""Updates that were called and have not begun: the ranks' calls of each lineage are gathered, side by side.

Decides which calls belong together, when they are complete, which version they mean and which replicas it is for. Also
which calls wait, for how long, and in which order they begin:
- A lineage of which this manager knows no rank is refused at once; after a restart, once members have had time to dial
  in again. A lineage of which all ranks have lost their sessions has a lease to come back.
- A gather that lacks ranks blocks nothing: no other lineage, no late replica, no sleep or wake.
- Complete gathers take turns in the order in which they were completed, in each pool. So a lineage that calls again at
  once comes after those that waited.
Changes no member: the result is a Goal, a Problem, or to wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from ckpt_engine.core.problems import CkptEngineError, aborted, deadline, invalid, precondition
from ckpt_engine.core.version import Fence
from ckpt_engine.machines.events import Call
from ckpt_engine.machines.manager.goal import Goal, QueuedGoal
from ckpt_engine.machines.manager.publications import Publications
from ckpt_engine.machines.manager.staging import stage
from ckpt_engine.machines.manager.state import ManagerState
from ckpt_engine.machines.manager.update_options import (
    complete,
    difference,
    min_replicas_of,
    replicas_for,
    selection_of,
)
from ckpt_engine.v1 import manager_pb2, weights_pb2

MOST_NAMED = 8
"""Versions that a refusal names, if ranks ask for different ones."""

MOST_DESCRIBED = 4
"""Gathers that the status describes; more are counted."""

MOST_RUNS = 8
"""Runs of consecutive ranks that are named to people; ranks beyond are counted."""


@dataclass(frozen=True, slots=True)
class GatherEnd:
    """Key of the timer that ends a lineage's gather."""

    lineage: str


@dataclass(frozen=True, slots=True)
class SessionsAbsent:
    """Key of the timer that ends waiting for any session of a lineage that calls."""

    lineage: str


@dataclass
class Gather:
    """The calls of one lineage. Moments are monotonic seconds."""

    state: ManagerState
    publications: Publications
    lineage: str
    started: float
    end: float = float("inf")  # by when the update must have reported, for the caller with the shortest timeout
    calls: dict[int, Call] = field(default_factory=dict)  # by rank
    requests: dict[int, manager_pb2.UpdateWeightsRequest] = field(default_factory=dict)  # by rank, options complete

    def join(self, call: Call, request: manager_pb2.UpdateWeightsRequest, now: float) -> None:
        """Takes a rank's call in. Raises ABORTED (for this call alone) if it cannot be part of this update."""
        rank = request.rank
        full_request = manager_pb2.UpdateWeightsRequest()
        full_request.CopyFrom(request)
        full_request.options.CopyFrom(complete(request.options))
        if rank in self.calls:
            raise aborted(f"rank {rank} of lineage {self.lineage!r} has called already", ranks=(rank,))
        trainer = self.state.members.trainers.get((self.lineage, rank))
        if trainer is not None and request.session_id and trainer.session_id != request.session_id:
            raise aborted(
                f"rank {rank} of lineage {self.lineage!r} is another process on host {trainer.host.name!r}",
                ranks=(rank,),
            )
        self.calls[rank] = call
        self.requests[rank] = full_request
        self.end = min(self.end, now + (full_request.options.timeout_seconds or self.state.deadlines.update))

    def seconds(self, now: float) -> float:
        """Seconds that it may still go on: until all calls must have come, then until its turn must have come."""
        begun_by = self.end - self.state.deadlines.report
        return (begun_by if self.complete() else min(self.started + self.state.deadlines.gather, begun_by)) - now

    def leave(self, rank: int) -> None:
        """Removes a rank's call, which was cancelled; the rank may call again."""
        del self.calls[rank]
        del self.requests[rank]

    def describe(self) -> str:
        """One line for blocked callers: what it waits for."""
        why = self._deployment()
        lacks = "; ".join(self._missing()) or "all are there" + (f", and wait for {why}" if why else "")
        return f"gathering ranks of lineage {self.lineage!r}: {lacks}"

    def known(self) -> bool:
        """Whether any rank has ever said hello and not left."""
        return any(lineage == self.lineage for lineage, _ in self.state.members.trainers)

    def connected(self) -> bool:
        """Whether any rank has a session now."""
        return any(trainer.peer is not None for trainer in self.state.members.ranks(self.lineage).values())

    def no_session(self) -> CkptEngineError:
        """The refusal of a call for a lineage without ranks that could update it."""
        return precondition(
            f"no rank of lineage {self.lineage!r} has a session with this manager: a rank calls while it has one, "
            "and for the lineage of that session",
            ranks=sorted(self.calls),
        )

    def complete(self) -> bool:
        """Whether every rank has a session, has published and has called, and the tables are merged or refused."""
        ranks = self.state.members.ranks(self.lineage)
        if not ranks or len(self.calls) < next(iter(ranks.values())).world_size:
            return False
        publication = self.publications.get(self.lineage)
        return (publication.published or publication.problem) is not None and not self._missing_ranks()

    def goal(self, now: float) -> Goal | None:
        """The goal of the update, once all ranks have called; None: wait. Raises CkptEngineError if it is refused."""
        self._check_agreement()
        if not self.complete():
            return None
        publication = self.publications.get(self.lineage)
        if publication.problem is not None:
            raise CkptEngineError(publication.problem)
        assert publication.published is not None
        options = self._request.options
        goal = Goal(
            lineage=self.lineage,
            version=self._version(),
            published=publication.published,
            replicas=replicas_for(self.state, options, now),
            calls=self.calls,
            pause_mode=options.pause_mode,
            min_replicas=min_replicas_of(options),
            selection=selection_of(options),
            end=self.end,
            before=self.state.versions.highest.get(self.lineage),
            prefetch=options.prefetch,
            until=options.until,
            pool=options.pool,
            called=self.started,
            dry_run=options.dry_run,
            adapts=all(each.adapts for each in self.requests.values()),
            keeps_draft=options.draft == manager_pb2.DRAFT_KEEP,
            probe=self._request.probe if self._request.HasField("probe") else None,
            fill=self._fill(),
        )
        if not goal.dry_run:
            goal.resumes = self.state.versions.resumed(goal)
        return stage(self.state, goal, options)

    def overdue(self) -> CkptEngineError:
        """The refusal when ranks did not come in time; names them."""
        if self.complete():
            why = self._deployment()
            why = f"it waited for {why}" if why else "others went first"
            return deadline(f"the turn of lineage {self.lineage!r} did not come in its callers' time: {why}")
        missing = self._missing()
        reason = "; ".join(missing) if missing else "the tables of its ranks are still being merged"
        return precondition(
            f"the update of lineage {self.lineage!r} cannot begin: {reason}", ranks=self._missing_ranks()
        )

    @property
    def _request(self) -> manager_pb2.UpdateWeightsRequest:
        """The request of the lowest rank that has called, which speaks for all."""
        return self.requests[min(self.requests)]

    def _deployment(self) -> str:
        """The undecided deployment that it waits for, for people; empty: none."""
        return self.state.undecided(self._request.options.pool, self.lineage)

    def _missing(self) -> list[str]:
        """Sentences for people: what is missing, and of which ranks."""
        ranks = self.state.members.ranks(self.lineage)
        if not ranks:
            return ["no rank has a session"]
        absent, unpublished, silent = [], [], []
        for rank in self._missing_ranks():
            trainer = ranks.get(rank)
            if trainer is None or trainer.peer is None:
                absent.append(rank)
            elif trainer.table is None:
                unpublished.append(rank)
            else:
                silent.append(rank)
        return [
            f"{ranks_named(group)} {'has' if len(group) == 1 else 'have'} {what}"
            for group, what in (
                (absent, "no session"),
                (unpublished, "not published"),
                (silent, "not called update_weights"),
            )
            if group
        ]

    def _missing_ranks(self) -> Sequence[int]:
        ranks = self.state.members.ranks(self.lineage)
        world_size = next(iter(ranks.values())).world_size if ranks else 0
        return [
            rank
            for rank in range(world_size)
            if rank not in ranks or ranks[rank].peer is None or ranks[rank].table is None or rank not in self.calls
        ]

    def _check_agreement(self) -> None:
        """Raises INVALID_ARGUMENT if the ranks do not all ask for the same."""
        versions = {rank: self._requested_version(request) for rank, request in self.requests.items()}
        if len(set(versions.values())) > 1:
            ranks_by_version: dict[int, list[int]] = {}
            for rank in sorted(versions):
                ranks_by_version.setdefault(versions[rank], []).append(rank)
            wishes = ", ".join(
                f"{ranks_named(ranks_by_version[version])}: {version}"
                for version in sorted(ranks_by_version)[:MOST_NAMED]
            )
            raise invalid(f"the ranks ask for different versions: {wishes}", ranks=sorted(versions))
        if names := difference(each.options for each in self.requests.values()):
            raise invalid(f"the ranks differ in {' and '.join(names)}", ranks=sorted(self.requests))

    def _requested_version(self, request: manager_pb2.UpdateWeightsRequest) -> int:
        """The version that a request asks for: the one that it names, or the lineage's next, from 0 on."""
        if request.HasField("version"):
            return request.version
        return self.state.versions.next_number(self.lineage)

    def _fill(self) -> int:
        """Epoch of the fill fence under which all ranks have sealed for a manager that led before; 0: they have not."""
        fences = {Fence.of(request.sealed) for request in self.requests.values()}
        epoch = next(iter(fences)).epoch
        return epoch if fences == {self.state.fence(epoch)} else 0

    def _version(self) -> int:
        version = self._requested_version(self._request)
        if version < 0:
            raise invalid(f"version {version} is negative")
        self.state.versions.check_rises(self.lineage, version)
        return version


@dataclass
class Gathers:
    """The calls that wait for their update, in one gather for each lineage."""

    state: ManagerState
    publications: Publications
    by_lineage: dict[str, Gather] = field(default_factory=dict)  # oldest first
    turns: dict[str, Goal] = field(default_factory=dict)  # goals of complete gathers by lineage, in their order
    without_session: set[str] = field(default_factory=set)  # lineages that call while none of their ranks has a session

    def join(self, call: Call, request: manager_pb2.UpdateWeightsRequest, now: float) -> None:
        """Takes a rank's call in. Raises ABORTED (for this call alone) if it cannot be part of the update."""
        gather = self.by_lineage.get(request.lineage)
        if gather is None:
            gather = Gather(self.state, self.publications, request.lineage, now)
        gather.join(call, request, now)
        self.by_lineage[request.lineage] = gather
        self._wait(gather, now)

    def cancelled(self, call: Call) -> None:
        """Forgets a rank's call that was cancelled; the other ranks wait on, and it may call again."""
        for gather in list(self.by_lineage.values()):
            for rank in [rank for rank, other in gather.calls.items() if other == call]:
                gather.leave(rank)
            if not gather.calls:
                self._end(gather)

    def look(self, settled: bool, now: float) -> None:
        """Refuses gathers that cannot begin, and queues those that are complete. Called after every event."""
        for gather in list(self.by_lineage.values()):
            try:
                self.state.check_ledger()
                if not settled:
                    continue
                self._look_for_ranks(gather)
                goal = gather.goal(now)
            except CkptEngineError as error:
                self._refuse(gather, error.problem)
                continue
            if goal is None:
                self.turns.pop(gather.lineage, None)
            else:
                first = gather.lineage not in self.turns
                self.turns[gather.lineage] = goal
                if first:
                    self._wait(gather, now)

    def coming(self) -> list[QueuedGoal]:
        """The complete gathers, in the order of their turns."""
        return [
            QueuedGoal(f"update of lineage {lineage!r}", goal, partial(self._end, self.by_lineage[lineage]))
            for lineage, goal in self.turns.items()
        ]

    def answer(self, lineage: str, version: int, report: manager_pb2.UpdateReport) -> None:
        """Ends the calls that are complete and wait for this version, with its report."""
        goal = self.turns.get(lineage)
        if goal is None or goal.version != version or goal.dry_run:
            return
        for call in self.by_lineage[lineage].calls.values():
            self.state.emit(call, manager_pb2.UpdateEvent(report=report))
            self.state.finish(call)
        self._end(self.by_lineage[lineage])

    def timer(self, key: GatherEnd | SessionsAbsent, now: float) -> None:
        """Refuses a gather when its time, or that of a lineage without sessions, has ended."""
        gather = self.by_lineage.get(key.lineage)
        if gather is None:
            return
        if isinstance(key, SessionsAbsent):
            if gather.lineage in self.without_session:
                self._refuse(gather, gather.no_session().problem)
        elif gather.seconds(now) > 0:
            self._wait(gather, now)  # it lacked something meanwhile
        else:
            self._refuse(gather, gather.overdue().problem)

    def describe(self) -> str:
        """What gathers wait for, for people; empty: there are none."""
        gathers = list(self.by_lineage.values())
        lines = [gather.describe() for gather in gathers[:MOST_DESCRIBED]]
        if len(gathers) > MOST_DESCRIBED:
            lines.append(f"and {len(gathers) - MOST_DESCRIBED} more lineages")
        return " | ".join(lines)

    def _look_for_ranks(self, gather: Gather) -> None:
        if not gather.known():
            raise gather.no_session()
        alone, key = not gather.connected(), SessionsAbsent(gather.lineage)
        if alone and gather.lineage not in self.without_session:
            self.without_session.add(gather.lineage)
            self.state.set_timer(key, self.state.deadlines.lease)
        elif not alone and gather.lineage in self.without_session:
            self.without_session.remove(gather.lineage)
            self.state.cancel_timer(key)

    def _wait(self, gather: Gather, now: float) -> None:
        self.state.set_timer(GatherEnd(gather.lineage), gather.seconds(now))

    def _refuse(self, gather: Gather, problem: weights_pb2.Problem) -> None:
        for call in gather.calls.values():
            self.state.finish(call, problem)
        self._end(gather)

    def _end(self, gather: Gather) -> None:
        del self.by_lineage[gather.lineage]
        self.turns.pop(gather.lineage, None)
        self.without_session.discard(gather.lineage)
        self.state.cancel_timer(GatherEnd(gather.lineage))
        self.state.cancel_timer(SessionsAbsent(gather.lineage))


def ranks_named(ranks: Sequence[int]) -> str:
    """Such as "rank 3", "ranks 0-2, 7" or "ranks 0, 2, 4, 6, 8, 10, 12, 14 and 32760 more"."""
    runs: list[tuple[int, int]] = []
    for rank in sorted(ranks):
        if runs and runs[-1][1] == rank - 1:
            runs[-1] = runs[-1][0], rank
        else:
            runs.append((rank, rank))
    first_runs = runs[:MOST_RUNS]
    ranges = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in first_runs)
    more = len(ranks) - sum(last - first + 1 for first, last in first_runs)
    return f"rank{'' if len(ranks) == 1 else 's'} {ranges}" + (f" and {more} more" if more else "")
