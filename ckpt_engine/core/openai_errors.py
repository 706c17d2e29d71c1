"""Errors as OpenAI's clients read them, for a process that answers in place of an inference server. Pure.

The shape is that of OpenAI's API (its guide "Error codes"): an object `error` with `message`, `type`, `param`, `code`.
Its clients raise by the HTTP status and show the message.
"""

from __future__ import annotations

from typing import Any

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "invalid_request_error",
    422: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


def error_object(status: int, code: str, message: str) -> dict[str, Any]:
    """The content of `error`. status: the HTTP status. code: the reason, for programs."""
    kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"message": message, "type": kind, "param": None, "code": code}
