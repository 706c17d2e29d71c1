"""Problems: why something was refused or failed, for the person who must act. Pure.

It decides the codes, and how a problem travels as an exception. It does not decide what is a problem.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from types import MappingProxyType
from typing import NamedTuple

from ckpt_engine.core.enums import enum_word
from ckpt_engine.v1 import weights_pb2

Code = weights_pb2.Problem.Code


class ErrorCode(StrEnum):
    """The kind of problem of a CkptEngineError. Statuses of gRPC and HTTP by code: docs/protocol.md, "Errors"."""

    INVALID_ARGUMENT = "INVALID_ARGUMENT"  # the request can never work
    FAILED_PRECONDITION = "FAILED_PRECONDITION"  # it could work in another state of the system
    NOT_FOUND = "NOT_FOUND"  # the thing that was named does not exist
    ABORTED = "ABORTED"  # overtaken by another fence, session or call
    UNAVAILABLE = "UNAVAILABLE"  # a member is gone; trying again may work
    DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"  # took longer than it may
    INTERNAL = "INTERNAL"  # a fault of ours
    DATA_LOSS = "DATA_LOSS"  # bytes differ from what was sealed
    UNAUTHENTICATED = "UNAUTHENTICATED"  # the caller did not prove its identity
    PERMISSION_DENIED = "PERMISSION_DENIED"  # the caller is known, and may not do this under this name


class Statuses(NamedTuple):
    """One code in other systems."""

    grpc: str  # the name of a status
    http: int
    exit: int  # of a command that ends with it


STATUSES: Mapping[ErrorCode, Statuses] = MappingProxyType(
    {
        ErrorCode.INVALID_ARGUMENT: Statuses("INVALID_ARGUMENT", 400, 1),
        ErrorCode.FAILED_PRECONDITION: Statuses("FAILED_PRECONDITION", 409, 1),
        ErrorCode.NOT_FOUND: Statuses("NOT_FOUND", 404, 1),
        ErrorCode.ABORTED: Statuses("ABORTED", 409, 1),
        ErrorCode.UNAVAILABLE: Statuses("UNAVAILABLE", 503, 1),
        ErrorCode.DEADLINE_EXCEEDED: Statuses("DEADLINE_EXCEEDED", 504, 1),
        ErrorCode.INTERNAL: Statuses("INTERNAL", 500, 1),
        ErrorCode.DATA_LOSS: Statuses("DATA_LOSS", 500, 1),
        ErrorCode.UNAUTHENTICATED: Statuses("UNAUTHENTICATED", 401, 1),
        ErrorCode.PERMISSION_DENIED: Statuses("PERMISSION_DENIED", 403, 1),
    }
)
"""Each code in gRPC, HTTP and commands; docs/protocol.md, "Errors", shows this table. A command's exit status says only
that it was refused (2: invalid arguments, 130: interrupted); its JSON has the code."""

_NAMED_TENSORS = 16


class CkptEngineError(Exception):
    """Raised by every public call that is refused or fails; ``problem`` says why, for people and programs."""

    def __init__(self, problem: weights_pb2.Problem) -> None:
        super().__init__(problem.message)
        self.problem = problem

    @property
    def code(self) -> ErrorCode:
        """The kind of problem; INTERNAL for a code that this release does not know."""
        return code_of(self.problem)

    @property
    def exit_status(self) -> int:
        """The exit status of a command that ends with it."""
        return STATUSES[self.code].exit

    def __str__(self) -> str:
        return f"{self.code}: {self.problem.message}"

    def __reduce__(self) -> tuple[object, ...]:
        """Pickles it for frameworks that raise it again in another process (Ray, multiprocessing). Our own code never
        pickles it."""
        return _raised_there, (self.problem.SerializeToString(),)


def code_of(problem: weights_pb2.Problem) -> ErrorCode:
    """The problem's code; INTERNAL if it has none, or one that this release does not know."""
    return ErrorCode.__members__.get(enum_word(Code, problem.code).upper(), ErrorCode.INTERNAL)


def _raised_there(problem: bytes) -> CkptEngineError:
    return CkptEngineError(weights_pb2.Problem.FromString(problem))


def error(
    code: weights_pb2.Problem.Code,
    message: str,
    tensors: Sequence[str] = (),
    ranks: Sequence[int] = (),
    replica: str = "",
) -> CkptEngineError:
    """An error of ``code``; at most 16 tensors are named."""
    tensor_names = [_text(name) for name in list(tensors)[:_NAMED_TENSORS]]
    return CkptEngineError(
        weights_pb2.Problem(
            code=code, message=_text(message), tensors=tensor_names, ranks=list(ranks), replica=_text(replica)
        )
    )


def _text(words: str) -> str:
    """Makes a text valid UTF-8: names of files and tensors come from anywhere, and may have lone surrogates."""
    return words if words.isascii() else words.encode(errors="backslashreplace").decode()


def invalid(message: str, tensors: Sequence[str] = (), ranks: Sequence[int] = (), replica: str = "") -> CkptEngineError:
    """An error for a request that can never work."""
    return error(weights_pb2.Problem.CODE_INVALID_ARGUMENT, message, tensors, ranks, replica)


def precondition(
    message: str, tensors: Sequence[str] = (), ranks: Sequence[int] = (), replica: str = ""
) -> CkptEngineError:
    """An error for a request that could work in another state of the system."""
    return error(weights_pb2.Problem.CODE_FAILED_PRECONDITION, message, tensors, ranks, replica)


def not_found(message: str, replica: str = "") -> CkptEngineError:
    """An error for a name of something that does not exist."""
    return error(weights_pb2.Problem.CODE_NOT_FOUND, message, replica=replica)


def aborted(message: str, ranks: Sequence[int] = (), replica: str = "") -> CkptEngineError:
    """An error for work that was overtaken by a newer fence, session or call."""
    return error(weights_pb2.Problem.CODE_ABORTED, message, (), ranks, replica)


def unavailable(message: str, ranks: Sequence[int] = (), replica: str = "") -> CkptEngineError:
    """An error for a member that is gone; trying again may work."""
    return error(weights_pb2.Problem.CODE_UNAVAILABLE, message, (), ranks, replica)


def deadline(message: str, ranks: Sequence[int] = (), replica: str = "") -> CkptEngineError:
    """An error for work that took longer than it may."""
    return error(weights_pb2.Problem.CODE_DEADLINE_EXCEEDED, message, (), ranks, replica)


def unauthenticated(message: str) -> CkptEngineError:
    """An error for a caller that did not prove its identity."""
    return error(weights_pb2.Problem.CODE_UNAUTHENTICATED, message)


def forbidden(message: str) -> CkptEngineError:
    """An error for a caller that may not do this, or not under this name."""
    return error(weights_pb2.Problem.CODE_PERMISSION_DENIED, message)


def internal(message: str, tensors: Sequence[str] = (), replica: str = "") -> CkptEngineError:
    """An error for a fault of ours."""
    return error(weights_pb2.Problem.CODE_INTERNAL, message, tensors, (), replica)


def data_loss(
    message: str, tensors: Sequence[str] = (), ranks: Sequence[int] = (), replica: str = ""
) -> CkptEngineError:
    """An error for bytes that differ from what was sealed."""
    return error(weights_pb2.Problem.CODE_DATA_LOSS, message, tensors, ranks, replica)
