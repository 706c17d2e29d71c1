"""What an operator asks of one replica: another try, or its end. It decides what is answered, and who is sent away."""

from __future__ import annotations

from ckpt_engine.core.machines.catch_up import CatchUp
from ckpt_engine.core.machines.events import FinishCall, OperatorCall, OperatorRequest, OperatorResponse
from ckpt_engine.core.machines.members import Members, Replica
from ckpt_engine.core.problems import CkptEngineError, precondition
from ckpt_engine.v1 import manager_pb2, weights_pb2

Evicted = tuple[Replica, weights_pb2.Problem]
"""Who is to be forgotten, and what its agent hears. It does not come back by itself: the code is a final one."""


def operate(members: Members, catch_up: CatchUp, event: OperatorCall) -> tuple[FinishCall, Evicted | None]:
    """The answer: NOT_FOUND for a name that nobody has, FAILED_PRECONDITION for a try that cannot work."""
    try:
        response, evicted = _operate(members.replica(event.request.name), catch_up, event.request)
    except CkptEngineError as error:
        return FinishCall(event.call, error.problem), None
    return FinishCall(event.call, response=response), evicted


def _operate(replica: Replica, catch_up: CatchUp, request: OperatorRequest) -> tuple[OperatorResponse, Evicted | None]:
    if isinstance(request, manager_pb2.RetryReplicaRequest):
        if replica.peer is None:
            raise precondition("its agent is not connected: start it, and it is brought up", replica=replica.name)
        return manager_pb2.RetryReplicaResponse(message=catch_up.retry(replica)), None
    why = f": {request.reason}" if request.reason else ""
    problem = precondition(f"replica {replica.name!r} was evicted by an operator{why}", replica=replica.name).problem
    return manager_pb2.EvictReplicaResponse(was_connected=replica.peer is not None), (replica, problem)
