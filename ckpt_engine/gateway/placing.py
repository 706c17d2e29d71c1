"""Finds a replica for each leg, and waits until there is one. On the gateway's loop."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from ckpt_engine.gateway import refusals
from ckpt_engine.gateway.choice import choose
from ckpt_engine.gateway.engines import Engines
from ckpt_engine.gateway.fleet import NONE, Fleet, FleetReplica, ReplicaNews, VersionWant, Visit
from ckpt_engine.gateway.metrics import GatewayMetrics
from ckpt_engine.gateway.refusals import RefusedError
from ckpt_engine.gateway.settings import GatewaySettings
from ckpt_engine.gateway.upstream import NotAdmittedError, Upstream
from ckpt_engine.gateway.versions import GatewayVersion

LOOK_SECONDS = 0.1
"""How often a waiting request looks again: a replica may become available by time alone."""

BRING_SECONDS = 1.0
"""How long a request does not go to a replica that lacks its adapter: it may be brought there meanwhile."""


class UnsuitedError(Exception):
    """A gate let the request in under a version that the request does not accept."""

    def __init__(self, news: ReplicaNews) -> None:
        super().__init__(f"{news.name} serves another version than the one that was asked for")
        self.news = news  # of the replica, at that time


@dataclass(frozen=True)
class Patience:
    """How long a request waits for a replica that lets it in."""

    seconds: float
    end: float  # monotonic seconds
    lacking: str = ""  # what a replica said that lacks the adapter that is asked for; empty: none said so


class Placing:
    """Finds replicas for this gateway's requests. Call `changed` after each change of the fleet."""

    def __init__(
        self, settings: GatewaySettings, fleet: Fleet, upstream: Upstream, metrics: GatewayMetrics, engines: Engines
    ) -> None:
        self.settings, self.fleet, self.upstream, self.metrics = settings, fleet, upstream, metrics
        self.engines = engines
        self._news = asyncio.Event()

    def changed(self) -> None:
        """Wakes the requests that wait for a replica."""
        self._news.set()
        self._news = asyncio.Event()

    def patience(self, seconds: float) -> Patience:
        """The patience of a request that begins to wait now."""
        return Patience(seconds, time.monotonic() + seconds)

    async def place(
        self,
        want: VersionWant,
        key: bytes,
        patience: Patience,
        resumed: bool = False,
        unsuited: Mapping[str, ReplicaNews] = NONE,
    ) -> FleetReplica:
        """Waits for a replica for a leg. unsuited: see `Fleet.candidates`. Raises RefusedError if waiting cannot help,
        or when the request's patience ends."""
        while True:
            now = time.monotonic()
            able = self.fleet.candidates(want, now, unsuited)
            if resumed:
                able = [member for member in able if member.prefills < self.settings.prefills]
            if able:
                return self.fleet.members[choose(key, {member.name: member.load for member in able})]
            self.check(want, patience)
            await self.look()

    async def look(self) -> None:
        """Waits until the fleet may look different: a replica may become available by time alone."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOOK_SECONDS):
                await self._news.wait()

    def check(self, want: VersionWant, patience: Patience) -> None:
        """Raises RefusedError if a request has waited as long as it may."""
        now = time.monotonic()
        if now >= patience.end:
            why = patience.lacking or self.fleet.why_unplaced(want, now)
            reason = refusals.NO_REPLICA if want.any_version else refusals.VERSION_NOT_YET
            reason = refusals.NOT_HERE if patience.lacking else reason
            wish = f", which asks for {want.describe()}," if want.describe() else ""
            detail = f"no replica could serve this request{wish} for {patience.seconds:g} s: {why}"
            raise RefusedError(503, reason, detail, {"retry-after": "1"})

    @contextlib.contextmanager
    def inside(self, member: FleetReplica, resumed: bool) -> Iterator[Visit]:
        """Counts a leg as inside its replica while it runs."""
        visit = Visit(member, resumed)
        try:
            yield visit
        finally:
            visit.end()

    def let_in(
        self, member: FleetReplica, visit: Visit, gate_version: GatewayVersion | None, want: VersionWant
    ) -> GatewayVersion | None:
        """Notes that a replica let a request in, under the version that its gate named. Returns that version, with its
        lineage if known. Raises UnsuitedError."""
        admitted = self.fleet.answered(member, gate_version)
        visit.let_in(admitted, want)
        if not self.fleet.suits(want, admitted):
            raise UnsuitedError(member.news)
        return admitted

    def has_other(self, want: VersionWant, unsuited: Mapping[str, ReplicaNews]) -> bool:
        """Whether another replica than these can take the request now."""
        with contextlib.suppress(RefusedError):
            return bool(self.fleet.candidates(want, time.monotonic(), unsuited))
        return False

    def refused(
        self, member: FleetReplica, error: NotAdmittedError, patience: Patience, unsuited: dict[str, ReplicaNews]
    ) -> Patience:
        """Notes that a replica did not let a request in, and returns what patience it has now. All requests shun the
        replica for a moment; if it lacks an adapter, only this one does. unsuited: of this request."""
        if error.reason == refusals.NOT_HERE:
            unsuited[member.name] = member.news
            asyncio.get_running_loop().call_later(BRING_SECONDS, unsuited.pop, member.name, None)
            return replace(patience, lacking=f"{member.name}: {error}")
        if error.unreachable:
            member.died()
        self.failed(member, str(error), error.wait)
        return patience

    def failed(self, member: FleetReplica, why: str, wait: float = 0.0) -> None:
        """Shuns a replica for a moment."""
        self.fleet.failed(member, time.monotonic(), why, wait)
