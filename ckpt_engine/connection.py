"""What is wrong on the way to the manager, in one sentence with the remedy. Pure.

The only place that knows gRPC's own words. The code that it gives says whether another attempt could mend it.
"""

from __future__ import annotations

import re

import grpc

from ckpt_engine.addresses import MANAGER
from ckpt_engine.core.problems import invalid
from ckpt_engine.security.client import AUTHORITY, CERTIFICATE, SERVER_NAME
from ckpt_engine.v1 import weights_pb2

Problem = weights_pb2.Problem

_TARGET = re.compile(r"unix(-abstract)?:.+|dns:///.+:\d+|ipv[46]:.+:\d+")
_HOST_AND_PORT = re.compile(r"(\[[^\]\s]+\]|[^\s:/\[\]]+):(\d+)")

_NO_GRPC = (
    "what listens there does not speak gRPC: name the port of `ckpt-engine serve --listen` (50051 unless told "
    "otherwise), not the one of --http"
)

_SAID = (
    ("http1.x server", Problem.INVALID_ARGUMENT, _NO_GRPC),
    ("Failed parsing HTTP/2", Problem.UNAVAILABLE, _NO_GRPC),
    (
        "SETTINGS frame",
        Problem.UNAVAILABLE,
        f"nothing was said over the connection; if that stays so, {_NO_GRPC}",
    ),
    ("Handshake read failed", Problem.UNAVAILABLE, f"the TLS handshake got no answer; if it stays so, {_NO_GRPC}"),
    (
        "CERTIFICATE_VERIFY_FAILED",
        Problem.UNAUTHENTICATED,
        f"the manager's certificate is not one that {AUTHORITY} signed for this address, or has expired; if it names "
        f"another host, set {SERVER_NAME}",
    ),
    (
        "not in peer certificate",
        Problem.UNAUTHENTICATED,
        f"the manager's certificate is not one that {AUTHORITY} signed for this address; if it names another host, "
        f"set {SERVER_NAME}",
    ),
    (
        "WRONG_VERSION_NUMBER",
        Problem.UNAUTHENTICATED,
        f"the manager does not speak TLS: unset {AUTHORITY}, or start it with --certificate and --key",
    ),
    (
        "PACKET_LENGTH_TOO_LONG",
        Problem.UNAUTHENTICATED,
        f"the manager does not speak TLS: unset {AUTHORITY}, or start it with --certificate and --key",
    ),
    (
        "CERTIFICATE_REQUIRED",
        Problem.UNAUTHENTICATED,
        f"the manager asks for a certificate: set {CERTIFICATE} and its key",
    ),
    (
        "Connection refused",
        Problem.UNAVAILABLE,
        "nothing listens there: start the manager (`ckpt-engine serve`), or name its address (--manager or "
        "CKPT_ENGINE_MANAGER)",
    ),
    ("C-ares", Problem.UNAVAILABLE, "this host name is not known here: check its spelling, and DNS"),
    ("DNS resolution failed", Problem.UNAVAILABLE, "this host name is not known here: check its spelling, and DNS"),
    ("No route to host", Problem.UNAVAILABLE, "no way leads to this host from here: check the address, and firewalls"),
    (
        "Network is unreachable",
        Problem.UNAVAILABLE,
        "no way leads to this host from here: check the address, and firewalls",
    ),
    (
        "onnection timed out",
        Problem.UNAVAILABLE,
        "the host does not answer: check the address, and firewalls between here and there",
    ),
    (
        "Socket closed",
        Problem.UNAVAILABLE,
        "the connection was closed before an answer came: the manager has just ended, or it serves TLS; then set "
        f"{AUTHORITY}",
    ),
    (
        "Connection reset",
        Problem.UNAVAILABLE,
        "the connection was closed before an answer came",
    ),
)
"""What gRPC's text holds, with the code and the words for it; the first that fits."""


def checked_address(address: str) -> str:
    """The address, if a channel can be opened to it. Raises INVALID_ARGUMENT saying how to write it."""
    if "://" in address:
        rest = address.partition("://")[2].partition("/")[0]
        if not _TARGET.fullmatch(address):
            raise invalid(
                f"the manager's address must be HOST:PORT, not the URL {address!r}: try {rest or MANAGER!r}, with the "
                "port of `ckpt-engine serve --listen`, not the one of --http"
            )
        return address
    found = _HOST_AND_PORT.fullmatch(address)
    if _TARGET.fullmatch(address) or (found is not None and 0 < int(found[2]) < 65536):
        return address
    if address.count(":") > 1 and not address.startswith("["):
        raise invalid(f"the manager's address must be HOST:PORT, not {address!r}; an IPv6 host stands in brackets")
    raise invalid(f"the manager's address must be HOST:PORT, not {address!r}; such as {MANAGER}")


def connection_problem(code: grpc.StatusCode, details: str) -> weights_pb2.Problem | None:
    """What stands behind a failure that is gRPC's own and not the manager's answer; None: something else."""
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return Problem(
            code=Problem.FAILED_PRECONDITION,
            message="the server there does not know this call: it is no manager of ckpt-engine, or an older one",
        )
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNKNOWN):
        for said, kind, words in _SAID:
            if said in details:
                return Problem(code=kind, message=words)
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return Problem(code=Problem.DEADLINE_EXCEEDED, message="no answer came in time")
    return None
