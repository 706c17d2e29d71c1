"""Finds the `Caller` of a connection from the proof that it presents.

It decides which proof counts. `security/grants.py` decides what a grant covers, and the servicer what a call needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import grpc.aio

from ckpt_engine.core.problems import CkptEngineError, unauthenticated
from ckpt_engine.security.grants import EVERYBODY, Caller, Grant
from ckpt_engine.security.server import ServerSecurity

BEARER = "bearer "


class Access:
    """Identifies the manager's callers. Used on its event loop thread."""

    def __init__(self, security: ServerSecurity) -> None:
        """Raises INVALID_ARGUMENT if the tokens file is malformed."""
        self._tokens = security.known_tokens()
        self._certificates = security.authority is not None

    @property
    def asks(self) -> bool:
        """Whether callers must prove their identity."""
        return self._tokens is not None or self._certificates

    def of_call(self, context: grpc.aio.ServicerContext[Any, Any]) -> Caller:
        """The caller of a gRPC call. Raises UNAUTHENTICATED."""
        if self._tokens is not None or not self._certificates:
            return self.of_metadata(context.invocation_metadata() or ())
        properties: Mapping[str, Iterable[bytes]] = context.auth_context()
        name = next(iter(properties.get("x509_common_name", ())), b"").decode(errors="replace")
        try:
            return Caller(f"the holder of certificate {name!r}", (Grant.parse(name),))
        except CkptEngineError as error:
            raise unauthenticated(f"the certificate's common name must be a grant: {error.problem.message}") from error

    def of_metadata(self, metadata: Iterable[Any]) -> Caller:
        """The caller of a gRPC call, as far as its metadata say. Raises UNAUTHENTICATED."""
        return EVERYBODY if self._tokens is None else self._by_token(_first("authorization", metadata))

    def of_request(self, authorization: str) -> Caller:
        """The caller of an HTTP request. A certificate was checked when the connection was made, but its name is not
        known here, so it grants nothing. Raises UNAUTHENTICATED."""
        if self._tokens is not None:
            return self._by_token(authorization)
        return Caller("a caller with a certificate but no token over HTTP") if self._certificates else EVERYBODY

    def _by_token(self, authorization: str) -> Caller:
        assert self._tokens is not None
        if not authorization.lower().startswith(BEARER):
            raise unauthenticated("this manager asks for a token: set CKPT_ENGINE_TOKEN_FILE, or send it as a bearer")
        caller = self._tokens.caller(authorization[len(BEARER) :].strip())
        if caller is None:
            raise unauthenticated(
                "the token is none of this manager's: show another one, or add its digest to the tokens file"
            )
        return caller


def _first(key: str, metadata: Iterable[Any]) -> str:
    for name, value in metadata:
        if name == key:
            return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
    return ""
