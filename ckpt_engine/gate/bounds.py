"""Judges whether a replica holds what a request asks for: when it is let in, and as long as its answer is made. Pure.

It does not decide about requests that accept any version (holding.py), and does not speak HTTP (bounded_answer.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from ckpt_engine.core.version_bounds import (
    LINEAGE_CHANGED,
    ROLLED_BACK,
    VERSION_CHANGED,
    VERSION_GONE,
    VERSION_NOT_YET,
    VersionBounds,
)
from ckpt_engine.gate.holding import GateDecision
from ckpt_engine.v1 import weights_pb2


@dataclass(frozen=True, slots=True)
class Unmet:
    """Why a request is not answered: the reason for programs, and words for people."""

    reason: str
    detail: str

    @property
    def may_pass(self) -> bool:
        """Whether the same request may be answered a little later."""
        return self.reason == VERSION_NOT_YET


def unmet_at_entry(
    bounds: VersionBounds, identity: weights_pb2.Identity | None, highest: weights_pb2.Identity | None
) -> Unmet | None:
    """Why a request is not let in under `identity`; None: it is. identity None: the engine has weights of its own.
    highest: the highest version that was seen here, of the lineage that was seen last."""
    wish = bounds.describe() or f"a version of lineage {bounds.lineage!r}"
    if identity is None:
        if bounds.any_version and not bounds.lineage:
            return None
        return Unmet(VERSION_NOT_YET, f"{wish} is asked for, and it serves weights of its own, which are no version")
    held = f"it serves version {identity.version} of lineage {identity.lineage!r}"
    if bounds.lineage and bounds.lineage != identity.lineage:
        return Unmet(VERSION_NOT_YET, f"{wish} is asked for, and {held}")
    if bounds.version is not None and bounds.version < identity.version:
        return Unmet(VERSION_GONE, f"{wish} is asked for, and {held}")
    if bounds.version is not None and bounds.version > identity.version:
        return Unmet(VERSION_NOT_YET, f"{wish} is asked for, and {held}")
    if bounds.min_version is not None and bounds.min_version > identity.version:
        if highest is not None and highest.lineage == identity.lineage and highest.version >= bounds.min_version:
            return Unmet(ROLLED_BACK, f"{wish} is asked for; it served version {highest.version}, and now {held}")
        return Unmet(VERSION_NOT_YET, f"{wish} is asked for, and {held}")
    return None


class BoundedVisit:
    """One request inside the engine, and what the workers held since it was let in.

    An engine's own labels are not needed: as long as no worker has begun an install, all tokens are of the version
    that the request was let in under.
    """

    def __init__(self, bounds: VersionBounds, decision: GateDecision) -> None:
        """Begins it. decision: the one that lets it in."""
        self.bounds = bounds
        self.first = decision.verdict.identity
        self.last = self.first  # the last whole version that the workers held; None: the engine's own weights
        self.unmet: Unmet | None = None  # the first breach of a bound
        self._installs = decision.installs

    def see(self, decision: GateDecision) -> Unmet | None:
        """Takes in what the page says now. Returns the breach, also one that was seen before."""
        if self.unmet is not None or decision.installs == self._installs:
            return self.unmet
        identity = decision.verdict.identity
        if self.bounds.version is not None:
            # What made the tokens since is not known: the install may have begun before them or after them.
            other = "another version" if identity is None else f"version {identity.version}"
            self.unmet = Unmet(
                VERSION_CHANGED, f"the replica went over to {other}, and version {self.bounds.version} was asked for"
            )
        elif identity is not None:  # None: an install writes, so that the engine makes no token
            self._installs, self.last = decision.installs, identity
            self.unmet = self._breach(identity)
        return self.unmet

    def _breach(self, identity: weights_pb2.Identity) -> Unmet | None:
        bounds, first = self.bounds, self.first
        if bounds.any_version and not bounds.lineage:
            return None
        if first is not None and identity.lineage != first.lineage:
            return Unmet(LINEAGE_CHANGED, f"the replica went over to another run ({identity.lineage})")
        if bounds.min_version is not None and identity.version < bounds.min_version:
            detail = f"version {identity.version}, and {bounds.min_version} or a later one was asked for"
            return Unmet(ROLLED_BACK, f"the replica went over to {detail}")
        return None
