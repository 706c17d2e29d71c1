"""What the page asks for each second, kept so that many pages cost the manager hardly more than one."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from ckpt_engine.machines.manager.watching import Watched
from ckpt_engine.manager.ledger import Ledger
from ckpt_engine.manager.page_views import Asker, Everything, UpdateLine
from ckpt_engine.manager.refusals import Refusals
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

    def status(self) -> manager_pb2.GetStatusResponse: ...

    def watched(self) -> Watched: ...


class Overviews:
    """The overview as JSON, built once for all who ask within half a second. On the manager's loop."""

    def __init__(self, manager: Seen, clock: Callable[[], float] = time.monotonic) -> None:
        self._manager = manager
        self._clock = clock
        self._built = b""
        self._until = 0.0

    def told(self, caller: Caller) -> bytes:
        """An `Overview`."""
        now = self._clock()
        if not self._built or now >= self._until:
            manager = self._manager
            found = Everything.of(manager.status(), manager.watched(), manager.dialled, manager.refusals.count)
            self._built = found.model_dump_json().encode()
            self._until = now + OVERVIEW_SECONDS
        return b'{"asker":%b,%b' % (Asker.of(caller).model_dump_json().encode(), self._built[1:])


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
