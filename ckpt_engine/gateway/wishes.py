"""Parses what a caller asks for in headers. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches

from ckpt_engine.core.names import some
from ckpt_engine.gateway.choice import key_of
from ckpt_engine.gateway.fleet import VersionWant
from ckpt_engine.gateway.journey import Wishes
from ckpt_engine.gateway.refusals import bad_request
from ckpt_engine.gateway.settings import GatewaySettings

SESSION = ("x-session-id", "x-smg-routing-key")
VERSION, MIN_VERSION, MAX_LAG = "x-ckpt-engine-version", "x-ckpt-engine-min-version", "x-ckpt-engine-max-lag"
LINEAGE, QUEUE_SECONDS = "x-ckpt-engine-lineage", "x-ckpt-engine-queue-seconds"
RESUME = "x-ckpt-engine-resume"
OURS = "x-ckpt-engine-"
KNOWN = (VERSION, MIN_VERSION, MAX_LAG, LINEAGE, QUEUE_SECONDS, RESUME)

MOST_DIGITS = 20
"""Most digits of a number; versions have 64 bits."""

_PASSED = ("traceparent", "tracestate")


def wishes_of(
    headers: Mapping[str, str], session: str, prompt: Sequence[int], settings: GatewaySettings, authorized: bool
) -> Wishes:
    """Parses a caller's wishes. Raises RefusedError (400).

    headers: with names in lower case. session, prompt: from the body. authorized: the gateway itself has checked the
    caller's token, so the token is not passed on to engines.
    """
    session_name = next((headers[name] for name in SESSION if headers.get(name)), "") or session
    resume = headers.get(RESUME, "on").lower()
    if resume not in ("on", "off"):
        raise bad_request(f"{RESUME}: {resume!r} must be on or off")
    want = VersionWant(
        lineage=headers.get(LINEAGE, ""),
        version=_number(headers, VERSION),
        min_version=_number(headers, MIN_VERSION),
        max_lag=_number(headers, MAX_LAG),
    )
    if want.version is not None and want.min_version is not None and want.version < want.min_version:
        raise bad_request(f"{VERSION} {want.version} is below {MIN_VERSION} {want.min_version}: no version is both")
    leg_headers = {name: headers[name] for name in _PASSED if name in headers}
    if not authorized and "authorization" in headers:
        leg_headers["authorization"] = headers["authorization"]
    return Wishes(want, key_of(session_name, prompt), _queue_seconds(headers, settings), resume == "on", leg_headers)


def once(headers: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Headers by their names in lower case. Raises RefusedError (400) if one of ours comes twice or is unknown, since
    the caller's wish would silently be ignored."""
    by_name: dict[str, str] = {}
    for header, value in headers:
        name = header.lower()
        if (bare := name.replace("_", "-")).startswith(OURS):
            if name not in KNOWN:
                raise bad_request(f"{header}: there is no such header; {_suggestion(bare.removeprefix(OURS))}")
            if name in by_name:
                raise bad_request(f"{header}: it is given twice, {by_name[name]!r} and {value!r}; give it once")
        by_name[name] = value
    return by_name


def _suggestion(name: str) -> str:
    """Suggests a header for a misspelt one of ours."""
    near = get_close_matches(name[:40], [each.removeprefix(OURS) for each in KNOWN], 1)
    return f"did you mean {OURS}{near[0]}?" if near else f"there are {some(KNOWN, len(KNOWN))}"


def _number(headers: Mapping[str, str], name: str) -> int | None:
    if name not in headers:
        return None
    value = headers[name]
    if not (value.isascii() and value.isdecimal() and len(value) <= MOST_DIGITS):
        raise bad_request(f"{name}: {value!r} must be an integer of 0 or more")
    return int(value)


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
