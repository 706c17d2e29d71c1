"""Access to a gateway: with a tokens file, a caller needs a token with the grant `client`."""

from __future__ import annotations

from collections.abc import Mapping

from ckpt_engine.core.problems import CkptEngineError, unauthenticated
from ckpt_engine.security.server import ServerSecurity
from ckpt_engine.v1 import weights_pb2

BEARER = "bearer "


class GatewayDoor:
    """Checks callers' tokens. Raises INVALID_ARGUMENT if the tokens file cannot be parsed."""

    def __init__(self, security: ServerSecurity) -> None:
        self._tokens = security.known_tokens()

    def check(self, headers: Mapping[str, str], look: bool = False) -> bool:
        """Checks a caller's token; false: this gateway needs none. look: any grant is enough.

        Raises UNAUTHENTICATED and PERMISSION_DENIED."""
        if self._tokens is None:
            return False
        credentials = headers.get("authorization", "")
        if not credentials.lower().startswith(BEARER):
            raise unauthenticated("this gateway requires a token: send it as a bearer token")
        caller = self._tokens.caller(credentials[len(BEARER) :].strip())
        if caller is None:
            raise unauthenticated("this gateway does not know this token: its SHA-256 is not in the file of --tokens")
        if not look:
            caller.require_any("client")
        return True

    @staticmethod
    def status_of(error: CkptEngineError) -> int:
        """The HTTP status of an error that `check` raises."""
        return 401 if error.problem.code == weights_pb2.Problem.CODE_UNAUTHENTICATED else 403
