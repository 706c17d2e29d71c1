"""Explains failures on the way to the manager, each in one sentence with the remedy. Pure.

The only place that knows gRPC's own words. Its error code says whether another attempt could succeed.
"""

from __future__ import annotations

import re

import grpc

from ckpt_engine.addresses import MANAGER
from ckpt_engine.core.problems import invalid
from ckpt_engine.leader import addresses_of
from ckpt_engine.security.client import AUTHORITY, CERTIFICATE, KEY, SERVER_NAME, TOKEN_FILE
from ckpt_engine.v1 import weights_pb2

Problem = weights_pb2.Problem

_TARGET = re.compile(r"unix(-abstract)?:.+|dns:///.+:\d+|ipv[46]:.+:\d+")
_HOST_AND_PORT = re.compile(r"(\[[^\]\s]+\]|[^\s:/\[\]]+):(\d+)")

_NO_GRPC = (
    "what listens there does not speak gRPC: name the port of `ckpt-engine manager --listen` (50051 unless told "
    "otherwise), not the one of --http"
)
_NO_TLS = f"the manager does not speak TLS: unset {AUTHORITY}, or start it with --certificate and --key"
_NO_NAME = "this host name is not known here: check its spelling, and DNS"
_NO_WAY = "no way leads to this host from here: check the address, and firewalls"
_CUT = "the connection was lost before an answer came: the manager ended, or the network was cut; try again"

_BY_TEXT = (
    (
        "backend unhealthy",
        Problem.CODE_UNAVAILABLE,
        "none of the managers that are named leads: they stand by, stop, or have just been started; try again in a "
        "moment",
    ),
    ("http1.x server", Problem.CODE_INVALID_ARGUMENT, _NO_GRPC),
    ("Failed parsing HTTP/2", Problem.CODE_UNAVAILABLE, _NO_GRPC),
    (
        "SETTINGS frame",
        Problem.CODE_UNAVAILABLE,
        f"connections are accepted there, but nothing answers: the manager is stopped or overloaded, or {_NO_GRPC}",
    ),
    ("Handshake read failed", Problem.CODE_UNAVAILABLE, f"the TLS handshake got no answer; if it stays so, {_NO_GRPC}"),
    (
        "CERTIFICATE_VERIFY_FAILED",
        Problem.CODE_UNAUTHENTICATED,
        f"the manager's certificate is not one that {AUTHORITY} signed for this address, or is not valid now by this "
        f"host's clock: look at both; if it names another host, set {SERVER_NAME}",
    ),
    (
        "not in peer certificate",
        Problem.CODE_UNAUTHENTICATED,
        f"the manager's certificate is not one that {AUTHORITY} signed for this address; if it names another host, "
        f"set {SERVER_NAME}",
    ),
    ("WRONG_VERSION_NUMBER", Problem.CODE_UNAUTHENTICATED, _NO_TLS),
    ("PACKET_LENGTH_TOO_LONG", Problem.CODE_UNAUTHENTICATED, _NO_TLS),
    (
        "CERTIFICATE_REQUIRED",
        Problem.CODE_UNAUTHENTICATED,
        f"the manager asks for a certificate: set {CERTIFICATE} and its key",
    ),
    (
        "Connection refused",
        Problem.CODE_UNAVAILABLE,
        "nothing listens there: start the manager (`ckpt-engine manager`), or name its address (--manager or "
        "CKPT_ENGINE_MANAGER)",
    ),
    ("C-ares", Problem.CODE_UNAVAILABLE, _NO_NAME),
    ("DNS resolution failed", Problem.CODE_UNAVAILABLE, _NO_NAME),
    ("No route to host", Problem.CODE_UNAVAILABLE, _NO_WAY),
    ("Network is unreachable", Problem.CODE_UNAVAILABLE, _NO_WAY),
    (
        "onnection timed out",
        Problem.CODE_UNAVAILABLE,
        "the host does not answer: check the address, and firewalls between here and there",
    ),
    (
        "failed to connect",
        Problem.CODE_UNAVAILABLE,
        "the connection was closed before anything was said over it: the manager has just ended, or it serves TLS "
        f"(then set {AUTHORITY}) or asks callers for a certificate (then set {CERTIFICATE} and {KEY} as well)",
    ),
    (
        "header with status: 5",
        Problem.CODE_UNAVAILABLE,
        "a proxy or web server answers in the manager's place: check that it reaches the manager, or name the "
        "manager's own address",
    ),
    ("header with status", Problem.CODE_INVALID_ARGUMENT, _NO_GRPC),
    (
        "deserializ",
        Problem.CODE_INTERNAL,
        "a message of this call cannot be read: bring caller and manager to one version of ckpt-engine",
    ),
    (
        "larger than max",
        Problem.CODE_FAILED_PRECONDITION,
        "a message of this call is larger than caller and manager accept: ask for less at once",
    ),
)
"""A part of gRPC's text, with our code and words for it; the first match counts."""

_BY_STATUS = {
    grpc.StatusCode.UNIMPLEMENTED: (
        Problem.CODE_FAILED_PRECONDITION,
        "the server there does not know this call: it is not a manager of ckpt-engine, or an older one",
    ),
    grpc.StatusCode.DEADLINE_EXCEEDED: (
        Problem.CODE_DEADLINE_EXCEEDED,
        "no answer came in time: the manager is busy or stopped, or the network between was cut; try again, with more "
        "time if it is busy",
    ),
    grpc.StatusCode.CANCELLED: (Problem.CODE_ABORTED, "the call was cancelled before an answer came"),
    grpc.StatusCode.UNAVAILABLE: (Problem.CODE_UNAVAILABLE, _CUT),
    grpc.StatusCode.INTERNAL: (Problem.CODE_UNAVAILABLE, _CUT),  # as gRPC calls a stream that broke
    grpc.StatusCode.RESOURCE_EXHAUSTED: (
        Problem.CODE_UNAVAILABLE,
        "more is asked there than it takes: try again later",
    ),
    grpc.StatusCode.UNAUTHENTICATED: (Problem.CODE_UNAUTHENTICATED, f"the caller is not known there: set {TOKEN_FILE}"),
    grpc.StatusCode.PERMISSION_DENIED: (Problem.CODE_PERMISSION_DENIED, "this caller may not make this call there"),
}
"""Code and words by gRPC's status, if no text matches."""


def checked_address(address: str) -> str:
    """Returns the address, or several with commas between them, if channels can be opened to all of it. Raises
    INVALID_ARGUMENT saying how to write it."""
    for each in addresses_of(address):
        _check_one(each)
    return address


def _check_one(address: str) -> None:
    if "://" in address:
        rest = address.partition("://")[2].partition("/")[0]
        if not _TARGET.fullmatch(address):
            raise invalid(
                f"the manager's address must be HOST:PORT, not the URL {address!r}: try {rest or MANAGER!r}, with the "
                "port of `ckpt-engine manager --listen`, not the one of --http"
            )
        return
    found = _HOST_AND_PORT.fullmatch(address)
    if _TARGET.fullmatch(address) or (found is not None and 0 < int(found[2]) < 65536):
        return
    if address.count(":") > 1 and not address.startswith("["):
        raise invalid(f"the manager's address must be HOST:PORT, not {address!r}; an IPv6 host stands in brackets")
    raise invalid(f"the manager's address must be HOST:PORT, not {address!r}; such as {MANAGER}")


def connection_problem(code: grpc.StatusCode, details: str) -> weights_pb2.Problem:
    """The problem behind a failure that gRPC reports and not the manager. Does not repeat gRPC's text."""
    if code is not grpc.StatusCode.UNIMPLEMENTED:
        for text, kind, words in _BY_TEXT:
            if text in details:
                return Problem(code=kind, message=words)
    kind, words = _BY_STATUS.get(
        code, (Problem.CODE_INTERNAL, f"the call failed (gRPC status {code.name}): the manager's log says why")
    )
    return Problem(code=kind, message=words)
