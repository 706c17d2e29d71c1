"""What a caller is told when there is no answer, or no whole one: a status, a reason for programs, words for people."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from ckpt_engine.core.openai_errors import error_object

BAD_REQUEST = "bad_request"
TOO_LARGE = "too_large"
TOO_SLOW = "too_slow"
"""Its body did not come."""
TOO_MANY = "too_many"
"""The gateway carries as many requests as it may."""
NO_REPLICA = "no_replica"
"""Nobody could serve it for as long as it may wait."""
NO_DIALECT = "no_dialect"
"""No replica's engine speaks the route that was asked for."""
NO_ROUTE = "no_route"
VERSION_GONE = "version_gone"
VERSION_NOT_YET = "version_not_yet"
ROLLED_BACK = "rolled_back"
VERSION_CHANGED = "version_changed"
LINEAGE_CHANGED = "lineage_changed"
NOT_RESUMABLE = "not_resumable"
"""It broke after its first token, and a field of it (named) keeps it from being resumed."""
RESUME_OFF = "resume_off"
POISONED = "poisoned"
"""It was inside so many engines that died."""
NO_PROGRESS = "no_progress"
TOO_MANY_RESUMES = "too_many_resumes"
ENGINE_REFUSED = "engine_refused"
STOPPING = "stopping"
INTERNAL = "internal"


class RefusedError(Exception):
    """Raised where a request, or what is left of it, cannot be answered. headers: for the answer."""

    def __init__(self, status: int, reason: str, detail: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(detail)
        self.status, self.reason, self.detail = status, reason, detail
        self.headers = dict(headers or {})

    def problem(self, **more: Any) -> dict[str, Any]:
        """A problem as RFC 9457 has it, with the reason and whatever else is known, and as OpenAI's clients read it."""
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
        """The same in a stream, after a status of 200."""
        error = error_object(self.status, self.reason, self.detail)
        return {"error": {**error, "status": self.status, "reason": self.reason, **more}}


def bad_request(detail: str) -> RefusedError:
    """The request can never be answered."""
    return RefusedError(400, BAD_REQUEST, detail)
