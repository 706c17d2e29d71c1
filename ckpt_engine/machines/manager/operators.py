"""What an operator asks of one replica (another try, or its end) or of one run (its end).

It decides what is answered, and which members are sent away. Holding a replica: `operator_holds`.
"""

from __future__ import annotations

from collections.abc import Sequence

from ckpt_engine.core.problems import CkptEngineError, aborted, not_found, precondition
from ckpt_engine.machines.calls import MemberRequest
from ckpt_engine.machines.events import Call, FinishCall, OperatorResponse
from ckpt_engine.machines.manager.catch_up import CatchUp
from ckpt_engine.machines.manager.members import Replica, Trainer
from ckpt_engine.machines.manager.state import State
from ckpt_engine.v1 import manager_pb2, weights_pb2

Members = Sequence[Replica | Trainer]


def operate(
    state: State, catch_up: CatchUp, call: Call, request: MemberRequest
) -> tuple[FinishCall, Members, weights_pb2.Problem | None]:
    """The answer, the members that are to be forgotten, and what they hear: their sessions end for good.

    The answer is NOT_FOUND for an unknown name, FAILED_PRECONDITION for a try that cannot work.
    """
    try:
        if isinstance(request, manager_pb2.EvictTrainerRequest):
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
    problem = precondition(f"replica {replica.name!r} was evicted{_why(request.reason)}", replica=replica.name).problem
    return manager_pb2.EvictReplicaResponse(was_connected=replica.peer is not None), (replica,), problem


def _evict_run(
    state: State, request: manager_pb2.EvictTrainerRequest
) -> tuple[OperatorResponse, Members, weights_pb2.Problem | None]:
    """Also what the run has left for late replicas is let go."""
    lineage = request.lineage
    ranks = list(state.members.ranks(lineage).values())
    contents = [each for each in state.versions.contents.values() if each.identity.lineage == lineage]
    if not ranks and not any(each.published for each in contents):
        known = sorted({lineage for lineage, _ in state.members.trainers})
        raise not_found(f"there is no run {lineage!r} ({', '.join(known[:8]) or 'none is known'})")
    for content in contents:
        content.published = content.record = None
    connected = sum(trainer.peer is not None for trainer in ranks)
    problem = aborted(f"the run of lineage {lineage!r} was evicted{_why(request.reason)}").problem
    return manager_pb2.EvictTrainerResponse(ranks=len(ranks), connected=connected), ranks, problem


def _why(reason: str) -> str:
    return " by an operator" + (f": {reason}" if reason else "")
