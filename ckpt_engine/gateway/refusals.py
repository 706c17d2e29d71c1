"""Refusals, for callers that get no whole answer: a status, a reason for programs, a detail for people."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from ckpt_engine.core.adapters import NOT_HERE as NOT_HERE
from ckpt_engine.core.openai_errors import error_object
from ckpt_engine.core.version_bounds import LINEAGE_CHANGED as LINEAGE_CHANGED
from ckpt_engine.core.version_bounds import ROLLED_BACK as ROLLED_BACK
from ckpt_engine.core.version_bounds import VERSION_CHANGED as VERSION_CHANGED
from ckpt_engine.core.version_bounds import VERSION_GONE as VERSION_GONE
from ckpt_engine.core.version_bounds import VERSION_NOT_YET as VERSION_NOT_YET

BAD_REQUEST = "bad_request"
TOO_LARGE = "too_large"
TOO_SLOW = "too_slow"
"""The body did not arrive in time."""
TOO_MANY = "too_many"
"""The gateway carries as many requests as it may."""
NO_REPLICA = "no_replica"
"""No replica could serve it for as long as it may wait."""
NO_DIALECT = "no_dialect"
"""No replica's engine has the route."""
NO_ROUTE = "no_route"
NO_MODEL = "no_model"
NOT_RESUMABLE = "not_resumable"
"""It broke after its first token, and a field that the detail names prevents resuming."""
RESUME_OFF = "resume_off"
POISONED = "poisoned"
"""Too many engines died while it was inside."""
NO_PROGRESS = "no_progress"
TOO_MANY_RESUMES = "too_many_resumes"
ENGINE_REFUSED = "engine_refused"
STOPPING = "stopping"
INTERNAL = "internal"


class RefusedError(Exception):
    """A request, or the rest of it, cannot be answered. headers: of the answer."""

    def __init__(self, status: int, reason: str, detail: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(detail)
        self.status, self.reason, self.detail = status, reason, detail
        self.headers = dict(headers or {})

    def problem(self, **more: Any) -> dict[str, Any]:
        """The problem object of RFC 9457, with the reason, `more`, and the error object that OpenAI's clients read."""
        title = HTTPStatus(self.status).phrase
        return {
            "type": "about:blank",
            "title": title,
            "status": self.status,
            "detail": self.detail,
            "reason": self.reason,
            "error": error_object(self.status, self.reason, self.detail),
            **more,
        }

    def event(self, **more: Any) -> dict[str, Any]:
        """The same as an event of a stream, after a status of 200."""
        error = error_object(self.status, self.reason, self.detail)
        return {"error": {**error, "status": self.status, "reason": self.reason, **more}}


def bad_request(detail: str) -> RefusedError:
    """A refusal of a request that can never be answered."""
    return RefusedError(400, BAD_REQUEST, detail)
