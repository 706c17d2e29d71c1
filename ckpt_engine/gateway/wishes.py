"""Parses what a caller asks for in headers, and which versions it asks for in its body. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ckpt_engine.core import version_bounds
from ckpt_engine.core.version_bounds import LINEAGE, MAX_LAG, MIN_VERSION, SESSION, VERSION, bounds_of
from ckpt_engine.gateway.choice import key_of
from ckpt_engine.gateway.fleet import VersionWant
from ckpt_engine.gateway.journey import Wishes
from ckpt_engine.gateway.refusals import bad_request
from ckpt_engine.gateway.settings import GatewaySettings

ROUTING_KEYS = ("x-session-id", "x-smg-routing-key")
QUEUE_SECONDS, RESUME = "x-ckpt-engine-queue-seconds", "x-ckpt-engine-resume"
KNOWN = (VERSION, MIN_VERSION, MAX_LAG, LINEAGE, SESSION, QUEUE_SECONDS, RESUME)

_PASSED = ("traceparent", "tracestate")


def wishes_of(
    headers: Mapping[str, str],
    field: Any,
    session: str,
    prompt: Sequence[int],
    settings: GatewaySettings,
    authorized: bool,
    model: Any = "",
) -> Wishes:
    """Parses a caller's wishes. Raises RefusedError (400).

    headers: with names in lower case. field: the value of the body's `weight_version`; None: it has none. session,
    prompt: from the body. authorized: the gateway itself has checked the caller's token, so the token is not passed on
    to engines. model: from the body, unchecked.
    """
    session_name = next((headers[name] for name in ROUTING_KEYS if headers.get(name)), "") or session
    resume = headers.get(RESUME, "on").lower()
    if resume not in ("on", "off"):
        raise bad_request(f"{RESUME}: {resume!r} must be on or off")
    try:
        bounds = bounds_of(headers, field)
    except ValueError as error:
        raise bad_request(str(error)) from error
    name = model if isinstance(model, str) else ""
    want = VersionWant(bounds.lineage, bounds.version, bounds.min_version, bounds.max_lag, model=name)
    leg_headers = {name: headers[name] for name in _PASSED if name in headers}
    if not authorized and "authorization" in headers:
        leg_headers["authorization"] = headers["authorization"]
    return Wishes(want, key_of(session_name, prompt), _queue_seconds(headers, settings), resume == "on", leg_headers)


def once(headers: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Headers by their names in lower case. Raises RefusedError (400) if one of ours comes twice or is unknown."""
    try:
        return version_bounds.once(headers, KNOWN)
    except ValueError as error:
        raise bad_request(str(error)) from error


def _queue_seconds(headers: Mapping[str, str], settings: GatewaySettings) -> float:
    if QUEUE_SECONDS not in headers:
        return settings.queue_seconds
    try:
        value = float(headers[QUEUE_SECONDS])
    except ValueError:
        value = math.nan
    if not 0 <= value <= settings.most_queue_seconds:
        most = settings.most_queue_seconds
        raise bad_request(f"{QUEUE_SECONDS}: {headers[QUEUE_SECONDS]!r} must be seconds from 0 to {most:g}")
    return value
