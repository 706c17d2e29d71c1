"""Problems as callers see them: a gRPC status with the Problem in its metadata, or an HTTP problem document."""

from __future__ import annotations

from typing import Any, NoReturn

import grpc
import grpc.aio

from ckpt_engine.channel import PROBLEM_METADATA_KEY
from ckpt_engine.core.enums import enum_word
from ckpt_engine.core.names import shortened
from ckpt_engine.core.problems import STATUSES, CkptEngineError, code_of, unavailable
from ckpt_engine.manager.blobs import ResourceExhaustedError
from ckpt_engine.v1 import weights_pb2

METADATA_BYTES = 3072
"""The most that a Problem may take of the trailing metadata, before base64: peers may refuse headers above 8 KiB."""

DETAILS_CHARACTERS = 1000
"""The most of a Problem's message that is repeated in the status's details."""


def stopping() -> CkptEngineError:
    """The error for callers and members of a manager that is stopping."""
    return unavailable("the manager is stopping: try again when it is back")


def grpc_status(problem: weights_pb2.Problem) -> grpc.StatusCode:
    """The gRPC status of a problem; INTERNAL for a problem without a code."""
    return grpc.StatusCode[STATUSES[code_of(problem)].grpc]


def http_status(problem: weights_pb2.Problem) -> int:
    """The HTTP status of a problem."""
    return STATUSES[code_of(problem)].http


def fitted(problem: weights_pb2.Problem) -> weights_pb2.Problem:
    """The problem, cut to fit into trailing metadata: first the dtypes that models keep are dropped, then tensors, then
    ranks, then the ends of texts."""
    if problem.ByteSize() <= METADATA_BYTES:
        return problem
    cut = weights_pb2.Problem()
    cut.CopyFrom(problem)
    cut.kept.clear()
    while cut.ByteSize() > METADATA_BYTES and cut.tensors:
        del cut.tensors[-1]
    if cut.ByteSize() > METADATA_BYTES:
        del cut.ranks[64:]
    if cut.ByteSize() > METADATA_BYTES:
        # A character takes up to four bytes.
        cut.message = shortened(cut.message, METADATA_BYTES // 8)
        cut.replica = shortened(cut.replica, METADATA_BYTES // 16)
    return cut


async def refuse(context: grpc.aio.ServicerContext[Any, Any], error: CkptEngineError) -> NoReturn:
    """Ends a call with the error's status and its Problem in the trailing metadata."""
    problem = fitted(error.problem)
    status = (
        grpc.StatusCode.RESOURCE_EXHAUSTED if isinstance(error, ResourceExhaustedError) else grpc_status(error.problem)
    )
    words = shortened(problem.message, DETAILS_CHARACTERS)
    await context.abort(status, words, ((PROBLEM_METADATA_KEY, problem.SerializeToString()),))


def problem_document(problem: weights_pb2.Problem) -> dict[str, Any]:
    """The body of an ``application/problem+json`` answer (RFC 9457); unset fields are left out."""
    code = enum_word(weights_pb2.Problem.Code, problem.code).upper()
    document: dict[str, Any] = {"title": code.replace("_", " ").capitalize(), "status": http_status(problem)}
    document["detail"] = problem.message
    document["code"] = code
    if problem.tensors:
        document["tensors"] = list(problem.tensors)
    if problem.ranks:
        document["ranks"] = list(problem.ranks)
    if problem.replica:
        document["replica"] = problem.replica
    return document
