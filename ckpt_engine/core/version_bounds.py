"""The versions that a caller accepts for one request, parsed from its headers and from a field of its body. Pure.

It does not decide what becomes of a request whose version is not there: gates (gate/bounds.py) and the gateway
(gateway/fleet.py) do, with the reasons that are named here.

The field is `weight_version`, an object; with OpenAI's client `extra_body={"weight_version": {"exact_version": 3}}`.
Its names are those that slime sends to external servers (THUDM/slime, pull request 2071) and that the service beside
Miles reads (modal-projects/stitch), so that their clients need no change.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from ckpt_engine.core.labels import parsed_label
from ckpt_engine.core.names import some

PREFIX = "x-ckpt-engine-"
VERSION, MIN_VERSION = "x-ckpt-engine-version", "x-ckpt-engine-min-version"
MAX_LAG, LINEAGE = "x-ckpt-engine-max-lag", "x-ckpt-engine-lineage"
SESSION = "x-ckpt-engine-session"
"""Headers that name versions, in lower case."""

FIELD = "weight_version"
"""The field of a body that names versions. Servers take it out before the engine reads the body."""

NEW_SESSION = "new"
"""The session of a conversation's first request. An answer of the gateway names the one for the next request: the label
(labels.py) of the version that made its last token."""

_NUMBERS = {
    "exact_version": "version",
    "min_version": "min_version",
    "min_required_version": "min_version",
    "max_lag": "max_lag",
}
_MEMBERS = (*_NUMBERS, "lineage", "session")
_HEADERS = {"version": VERSION, "min_version": MIN_VERSION, "max_lag": MAX_LAG, "lineage": LINEAGE}

MOST_DIGITS = 20
"""Most digits of a number; versions have 64 bits."""

VERSION_NOT_YET = "version_not_yet"
"""The version has not come: it may."""
VERSION_GONE = "version_gone"
"""The version was replaced."""
ROLLED_BACK = "rolled_back"
"""The version was taken back, before the request or in the middle of its answer."""
VERSION_CHANGED = "version_changed"
"""In the middle of the answer the replica went over to another version than the one that was asked for."""
LINEAGE_CHANGED = "lineage_changed"
"""In the middle of the answer the replica went over to another run."""
REASONS = frozenset({VERSION_NOT_YET, VERSION_GONE, ROLLED_BACK, VERSION_CHANGED, LINEAGE_CHANGED})


@dataclass(frozen=True)
class VersionBounds:
    """The versions that a request accepts."""

    lineage: str = ""  # empty: any
    version: int | None = None  # exactly this one
    min_version: int | None = None  # this one or a later one
    max_lag: int | None = None  # versions that the replica may be behind the last one of its lineage

    @property
    def any_version(self) -> bool:
        """Whether it accepts every version of its lineage."""
        return self.version is None and self.min_version is None and self.max_lag is None

    def gate_headers(self) -> dict[str, str]:
        """The headers with which a replica's gate is asked for the same. It knows no lag. A lineage whose name does not
        fit into a header is left out."""
        lineage = self.lineage if self.lineage.isascii() and self.lineage.isprintable() else ""
        values = {VERSION: self.version, MIN_VERSION: self.min_version, LINEAGE: lineage or None}
        return {name: str(value) for name, value in values.items() if value is not None}

    def describe(self) -> str:
        """The version that it asks for, in words; empty: any."""
        parts = []
        if self.version is not None:
            parts.append(f"version {self.version}")
        if self.min_version is not None:
            parts.append(f"version {self.min_version} or a later one")
        if self.max_lag is not None:
            parts.append(f"a version at most {self.max_lag} behind the last")
        return " and ".join(parts) + (f" of lineage {self.lineage!r}" if parts and self.lineage else "")


def bounds_of(headers: Mapping[str, str], field: Any = None) -> VersionBounds:
    """Parses the versions that a request accepts.

    headers: with names in lower case. field: the value of the body's FIELD; None: it has none. Raises ValueError that
    names header or field, also if the two contradict each other.
    """
    found: dict[str, Any] = {"lineage": headers.get(LINEAGE) or None, "session": headers.get(SESSION)}
    for name in ("version", "min_version", "max_lag"):
        found[name] = _header_number(headers, _HEADERS[name])
    for name, value in _members(field):
        bound = _NUMBERS.get(name, name)
        if found[bound] is not None and found[bound] != value:
            raise ValueError(
                f"{FIELD}.{name}: {value!r}, and {found[bound]!r} is asked for beside it; give one of them"
            )
        found[bound] = value
    session = found.pop("session")
    _go_on(found, session)
    if found["version"] is not None and found["min_version"] is not None and found["version"] < found["min_version"]:
        version, least = found["version"], found["min_version"]
        name = MIN_VERSION if session in (None, NEW_SESSION) else f"{MIN_VERSION} or the session's"
        raise ValueError(f"{VERSION} {version} is below {name} {least}: no version is both")
    return VersionBounds(found["lineage"] or "", found["version"], found["min_version"], found["max_lag"])


def _go_on(found: dict[str, Any], session: str | None) -> None:
    """Adds what a session asks for: weights of its run that are not older than those of its last turn."""
    if session is None or session == NEW_SESSION:
        return
    parsed = parsed_label(session)
    if parsed is None or parsed[0] >= 10**MOST_DIGITS:
        example = f"{NEW_SESSION!r} or what the last answer names, such as '7:1f9c02ab:run-5'"
        raise ValueError(f"{SESSION}: {session[:80]!r} must be {example}")
    version, _, lineage = parsed
    if lineage and found["lineage"] not in (None, lineage):
        raise ValueError(
            f"{SESSION}: {session[:80]!r} is a conversation with lineage {lineage!r}, and {found['lineage']!r} is "
            f"asked for beside it; begin another one ({NEW_SESSION!r})"
        )
    found["lineage"] = lineage or found["lineage"]
    found["min_version"] = max(version, found["min_version"] or 0)


def once(headers: Iterable[tuple[str, str]], known: Sequence[str], where: str = "") -> dict[str, str]:
    """Headers by their names in lower case. Raises ValueError if one that begins with PREFIX comes twice or is not
    `known`, since the caller's wish would silently be ignored. where: the place that takes only these, for the text."""
    by_name: dict[str, str] = {}
    for header, value in headers:
        name = header.lower()
        if (bare := name.replace("_", "-")).startswith(PREFIX):
            if name not in known:
                suggestion = _suggestion(bare.removeprefix(PREFIX), known)
                raise ValueError(f"{header}: there is no such header{where}; {suggestion}")
            if name in by_name:
                raise ValueError(f"{header}: it is given twice, {by_name[name]!r} and {value!r}; give it once")
        by_name[name] = value
    return by_name


def _suggestion(name: str, known: Sequence[str]) -> str:
    """Suggests a header for a misspelt one of ours."""
    near = get_close_matches(name[:40], [each.removeprefix(PREFIX) for each in known], 1)
    return f"did you mean {PREFIX}{near[0]}?" if near else f"there are {some(known, len(known))}"


def _header_number(headers: Mapping[str, str], name: str) -> int | None:
    if name not in headers:
        return None
    value = headers[name]
    if not (value.isascii() and value.isdecimal() and len(value) <= MOST_DIGITS):
        raise ValueError(f"{name}: {value!r} must be an integer of 0 or more")
    return int(value)


def _members(field: Any) -> Iterable[tuple[str, Any]]:
    """The members of the field that ask for something."""
    if field is None:
        return
    if not isinstance(field, dict):
        example = '{"exact_version": 3} or {"min_version": 3}'
        raise ValueError(f"{FIELD}: {str(field)[:40]!r} must be an object such as {example}")
    for name, value in field.items():
        if name not in _MEMBERS:
            raise ValueError(f"{FIELD}.{str(name)[:40]}: there is no such member; there are {some(_MEMBERS, 9)}")
        if value is None:
            continue
        if name in ("lineage", "session"):
            if not isinstance(value, str) or not value:
                form = "the name of a lineage" if name == "lineage" else "a text, as the last answer names it"
                raise ValueError(f"{FIELD}.{name}: {str(value)[:40]!r} must be {form}")
        elif type(value) is not int or value < 0 or len(str(value)) > MOST_DIGITS:
            raise ValueError(f"{FIELD}.{name}: {str(value)[:40]!r} must be an integer of 0 or more")
        yield name, value
