"""Operators' calls: retry, evict, hold or release a replica; evict a run.

Decides the answers, and which members are sent away. While a replica is held nothing brings it to what it is to serve.
A hold or a release counts once it is on the disk, so what was answered outlives the manager. A hold is of a name, and
stays while the replica is away, until it is released or evicted. It cuts a running attempt short; what an update has
begun with the replica goes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ckpt_engine.core.problems import CkptEngineError, aborted, invalid, precondition
from ckpt_engine.machines.calls import HoldRequest, MemberRequest
from ckpt_engine.machines.events import (
    Call,
    Done,
    FinishCall,
    OperatorHold,
    OperatorResponse,
    RecordHold,
    RecordRelease,
)
from ckpt_engine.machines.manager.lineages import known_lineage, lineages
from ckpt_engine.machines.manager.members import Replica, TrainerRank
from ckpt_engine.machines.manager.reconcile import CatchUp, LateReplicas
from ckpt_engine.machines.manager.state import ManagerState
from ckpt_engine.v1 import manager_pb2, weights_pb2

Members = Sequence[Replica | TrainerRank]


def operate(
    state: ManagerState, catch_up: CatchUp, call: Call, request: MemberRequest
) -> tuple[FinishCall, Members, weights_pb2.Problem | None]:
    """Carries out a call. Returns the answer, the members that are to be forgotten, and the problem with which their
    sessions end for good.

    The answer is NOT_FOUND for an unknown name, FAILED_PRECONDITION for a retry that cannot work.
    """
    try:
        if isinstance(request, manager_pb2.EvictLineageRequest):
            response, evicted, problem = _evict_run(state, request)
        else:
            response, evicted, problem = _operate(state.members.replica(request.name), catch_up, request)
    except CkptEngineError as error:
        return FinishCall(call, error.problem), (), None
    return FinishCall(call, response=response), evicted, problem


def _operate(
    replica: Replica, catch_up: CatchUp, request: manager_pb2.RetryReplicaRequest | manager_pb2.EvictReplicaRequest
) -> tuple[OperatorResponse, Members, weights_pb2.Problem | None]:
    if isinstance(request, manager_pb2.RetryReplicaRequest):
        if replica.peer is None:
            raise precondition("its agent is not connected: start it, and it is brought up", replica=replica.name)
        return manager_pb2.RetryReplicaResponse(message=catch_up.retry(replica)), (), None
    _check_reason(request.reason)
    problem = precondition(f"replica {replica.name!r} was evicted{_why(request.reason)}", replica=replica.name).problem
    return manager_pb2.EvictReplicaResponse(was_connected=replica.peer is not None), (replica,), problem


def _evict_run(
    state: ManagerState, request: manager_pb2.EvictLineageRequest
) -> tuple[OperatorResponse, Members, weights_pb2.Problem | None]:
    """Evicts the ranks of a run, and what it published no longer serves late replicas."""
    _check_reason(request.reason)
    lineage = request.lineage
    ranks = list(state.members.ranks(lineage).values())
    contents = [each for each in state.versions.contents.values() if each.identity.lineage == lineage]
    if not ranks and not any(each.published for each in contents):
        known_lineage(lineages(state), lineage)
        raise precondition(
            f"no rank of lineage {lineage!r} is known, so there is none to evict; to forget the lineage, "
            f"`ckpt-engine lineage forget {lineage}`"
        )
    for content in contents:
        content.published = content.record = None
    connected = sum(trainer.peer is not None for trainer in ranks)
    problem = aborted(f"the run of lineage {lineage!r} was evicted{_why(request.reason)}").problem
    return manager_pb2.EvictLineageResponse(ranks=len(ranks), connected=connected), ranks, problem


def _check_reason(reason: str) -> None:
    if len(reason) > REASON_CHARACTERS:
        raise invalid(f"a reason has at most {REASON_CHARACTERS} characters, got {len(reason)}")


def _why(reason: str) -> str:
    return " by an operator" + (f": {reason}" if reason else "")


REASON_CHARACTERS = 500
"""The most characters of a reason."""


@dataclass(frozen=True, slots=True)
class HoldWrite:
    """Key of the task that makes a hold, or the end of one, durable."""

    replica: str


@dataclass
class OperatorHolds:
    """Changes `ManagerState.holds`, with one write at a time for each replica."""

    state: ManagerState
    catch_up: CatchUp
    late_replicas: LateReplicas
    writing: dict[str, Call | None] = field(default_factory=dict)  # by replica, the call that waits; None: no call

    def join(self, call: Call, request: HoldRequest) -> None:
        """Answers a call, at once or when the ledger has written."""
        try:
            response = self._begin(call, request)
        except CkptEngineError as error:
            self.state.finish(call, error.problem)
            return
        if response is not None:
            self.state.out.append(FinishCall(call, response=response))

    def evicted(self, name: str) -> None:
        """Ends the hold of an evicted replica: its name is free. The eviction does not wait for the disk."""
        if self.state.holds.pop(name, None) is not None and name not in self.writing:
            self._write(name, None, RecordRelease(name, self.state.deadlines.ledger))

    def written(self, key: HoldWrite, done: Done, now: float) -> None:
        """Answers the call when the ledger has written; if it could not, nothing has changed."""
        name, call = key.replica, self.writing.pop(key.replica)
        if done.problem is not None:
            if call is not None:
                self.state.finish(call, done.problem)
            return
        response: manager_pb2.HoldReplicaResponse | manager_pb2.ReleaseReplicaResponse
        if isinstance(done.result, OperatorHold):
            self.state.holds[name] = done.result
            self.late_replicas.cut_short(lambda goal: name in goal.replicas, "an operator holds it", now)
            response = manager_pb2.HoldReplicaResponse(hold=done.result.message())
        else:
            self.state.holds.pop(name, None)
            response = manager_pb2.ReleaseReplicaResponse(message=self._after_release(name, now))
        if call is not None:
            self.state.out.append(FinishCall(call, response=response))

    def warnings(self) -> list[str]:
        """Sentences for the status: names that are held and that no registered replica has."""
        return [
            f"no replica {name!r} is registered, and its name is {self.state.holds[name].describe(name)}"
            for name in sorted(self.state.holds.keys() - self.state.members.replicas.keys())
        ]

    def _begin(
        self, call: Call, request: HoldRequest
    ) -> manager_pb2.HoldReplicaResponse | manager_pb2.ReleaseReplicaResponse | None:
        """Starts writing a hold or a release to the ledger. Returns the answer if nothing has to be written, else
        None."""
        name, seconds = request.name, self.state.deadlines.ledger
        hold = self.state.holds.get(name)
        replica = None if hold is not None else self.state.members.replica(name)
        if name in self.writing:
            raise aborted("another call that holds or releases it is being written: try again", replica=name)
        if isinstance(request, manager_pb2.ReleaseReplicaRequest):
            if hold is None:
                return manager_pb2.ReleaseReplicaResponse(message="nothing is to be done: it is not held")
            self._write(name, call, RecordRelease(name, seconds))
            return None
        _check_reason(request.reason)
        if replica is not None and not replica.receives:
            raise precondition("it is colocated: it receives no weights, so nothing is to be held", replica=name)
        if hold is not None and request.reason in ("", hold.reason):
            return manager_pb2.HoldReplicaResponse(hold=hold.message())
        self._write(name, call, RecordHold(name, request.reason, seconds))
        return None

    def _write(self, name: str, call: Call | None, task: RecordHold | RecordRelease) -> None:
        self.writing[name] = call
        self.state.run(HoldWrite(name), task)

    def _after_release(self, name: str, now: float) -> str:
        replica, content = self.state.members.replicas.get(name), self.state.versions.of(name)
        if replica is None:
            return "released; no replica of that name is registered now"
        if content is None or replica.holds(content.identity):
            return "released; it holds what it is to serve" if content else "released; nothing is meant for it yet"
        sources = self.catch_up.sources(content.identity.lineage)
        reason, _ = self.catch_up.standstill(replica, content, sources, now)
        return f"released; it is to serve {content.identity}: {reason}"
