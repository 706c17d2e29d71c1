"""What the page asks for each second, kept so that many pages cost the manager hardly more than one."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Protocol

from ckpt_engine.machines.events import OperatorHold
from ckpt_engine.machines.manager.members import Replica
from ckpt_engine.machines.manager.reconcile import Drift
from ckpt_engine.machines.manager.status import Watched
from ckpt_engine.manager.ledger import Ledger
from ckpt_engine.manager.page_views import Asker, Everything, UpdateLine
from ckpt_engine.manager.refusals import Refusals
from ckpt_engine.manager.views import Replica as ReplicaView
from ckpt_engine.manager.views import ReplicaList
from ckpt_engine.security.grants import Caller
from ckpt_engine.v1 import manager_pb2

OVERVIEW_SECONDS = 0.5
"""How old an overview may be that somebody is told."""

LINES_KEPT = 200
"""Updates whose line is kept: the most that one request may ask for."""


class Seen(Protocol):
    """What an overview is made of."""

    @property
    def refusals(self) -> Refusals: ...

    @property
    def dialled(self) -> str: ...

    @property
    def changes(self) -> int: ...

    def status(self, *, replicas: bool = True) -> manager_pb2.GetStatusResponse: ...

    def replicas(self) -> Mapping[str, Replica]: ...

    def watched(self) -> Watched: ...

    def drifts(self) -> Mapping[str, Drift]: ...

    def holds(self) -> Mapping[str, OperatorHold]: ...


class Overviews:
    """The overview as JSON, built once for all who ask within half a second, and for as long as nothing changes. On the
    manager's loop."""

    def __init__(self, manager: Seen, clock: Callable[[], float] = time.monotonic) -> None:
        self._manager = manager
        self._clock = clock
        self._built = b""
        self._until = 0.0
        self._changes = 0

    def told(self, caller: Caller) -> bytes:
        """An `Overview`."""
        now, manager = self._clock(), self._manager
        if not self._built or (now >= self._until and manager.changes != self._changes):
            self._changes = manager.changes
            self._until = now + OVERVIEW_SECONDS
            status = manager.status(replicas=False)
            found = Everything.of(
                status,
                manager.replicas(),
                manager.watched(),
                manager.drifts(),
                manager.holds(),
                manager.dialled,
                manager.refusals.count,
            )
            self._built = found.model_dump_json().encode()
        asker = Asker.of(caller).model_dump_json().encode()
        return b'{"asker":%b,"now":%r,%b' % (asker, time.time(), self._built[1:])


class ReplicaLists:
    """The list of replicas as JSON, built once for as long as nothing changes; if the times of drifts go on, once for
    all who ask within half a second. On the manager's loop."""

    def __init__(self, manager: Seen, clock: Callable[[], float] = time.monotonic) -> None:
        self._manager = manager
        self._clock = clock
        self._built = b""
        self._until = 0.0
        self._changes = 0
        self._drifts = False

    def told(self) -> bytes:
        """A `ReplicaList`."""
        now, manager = self._clock(), self._manager
        if not self._built or manager.changes != self._changes or (self._drifts and now >= self._until):
            self._changes = manager.changes
            self._until = now + OVERVIEW_SECONDS
            replicas = manager.status().replicas
            self._drifts = any(replica.HasField("drift") for replica in replicas)
            self._built = ReplicaList(replicas=[ReplicaView.of(each) for each in replicas]).model_dump_json().encode()
        return self._built


class Lines:
    """Updates in a line each, of which those with a report are kept until the report is corrected. On the manager's
    loop."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._kept: dict[int, UpdateLine] = {}
        ledger.written = lambda epoch: self._kept.pop(epoch, None)

    async def newest(self, limit: int) -> list[UpdateLine]:
        """The last ones, newest first. Raises as `Ledger.history`."""
        known = dict(self._kept)
        lines = []
        for record in await self._ledger.history(None, limit, known):
            line = known.get(record.epoch) or UpdateLine.of(record)
            if record.report is not None:
                self._kept[record.epoch] = line
            lines.append(line)
        for epoch in sorted(self._kept)[:-LINES_KEPT]:
            del self._kept[epoch]
        return lines
