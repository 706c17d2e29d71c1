"""Caches frequently requested views as JSON, so that many open pages cost the manager hardly more than one."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from google.protobuf.message import Message

from ckpt_engine.core.message_json import as_dict, as_json
from ckpt_engine.machines.events import OperatorHold
from ckpt_engine.machines.manager.members import Replica
from ckpt_engine.machines.manager.reconcile import Drift
from ckpt_engine.machines.manager.status import Watched
from ckpt_engine.manager.ledger import Ledger
from ckpt_engine.manager.page_views import asker_of, overview_of, replicas_of, update_line
from ckpt_engine.manager.refusals import Refusals
from ckpt_engine.security.grants import Caller
from ckpt_engine.v1 import manager_pb2, page_pb2

OVERVIEW_SECONDS = 0.5
"""How old a served overview may be."""

LINES_KEPT = 200
"""Cached lines of updates: the most that one request may ask for."""


class OverviewSource(Protocol):
    """The parts of a manager that an overview is made of."""

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


class Texts:
    """The JSON of frequently sent messages, made again only for those that have changed."""

    def __init__(self) -> None:
        self._texts: dict[str, tuple[bytes, str]] = {}

    def of(self, messages: Iterable[tuple[str, Message]]) -> str:
        """All of them as a JSON array. Each message comes with its name, under which it is cached."""
        texts = {}
        for name, message in messages:
            wire, previous = message.SerializeToString(), self._texts.get(name)
            texts[name] = previous if previous is not None and previous[0] == wire else (wire, as_json(message))
        self._texts = texts
        return f"[{','.join(text for _, text in texts.values())}]"


class Overviews:
    """The overview as JSON, built once for all requests within half a second, and for as long as nothing changes. Used
    on the manager's loop."""

    def __init__(self, manager: OverviewSource, clock: Callable[[], float] = time.monotonic) -> None:
        self._manager = manager
        self._clock = clock
        self._holders, self._replicas = Texts(), Texts()
        self._built = ""
        self._until = 0.0
        self._changes = 0

    def text(self, caller: Caller) -> str:
        """A `PageOverview` as JSON."""
        now, manager = self._clock(), self._manager
        if not self._built or (now >= self._until and manager.changes != self._changes):
            self._changes = manager.changes
            self._until = now + OVERVIEW_SECONDS
            self._built = self._everything()
        return f'{{"asker":{as_json(asker_of(caller))},"now":{time.time()!r},{self._built}}}'

    def _everything(self) -> str:
        """The members of the JSON object except the asker and the time, without the braces."""
        manager = self._manager
        status, watched = manager.status(replicas=False), manager.watched()
        replicas = replicas_of(manager.replicas(), watched, manager.drifts(), manager.holds())
        lists = {
            "holders": self._holders.of((f"{each.kind} {each.name}", each) for each in status.holders),
            "replicas": self._replicas.of((each.watched.name, each) for each in replicas),
        }
        found = as_dict(overview_of(status, manager.dialled, manager.refusals.count))
        return ",".join(f'"{name}":{lists.get(name) or json.dumps(value)}' for name, value in found.items())


class ReplicaLists:
    """The list of replicas as JSON, built once for as long as nothing changes. While a replica drifts, so that its time
    grows, it is built once for all requests within half a second. Used on the manager's loop, and built on a thread."""

    def __init__(self, manager: OverviewSource, clock: Callable[[], float] = time.monotonic) -> None:
        self._manager = manager
        self._clock = clock
        self._building = asyncio.Lock()
        self._texts = Texts()
        self._built = ""
        self._until = 0.0
        self._changes = 0
        self._drifts = False

    async def text(self) -> str:
        """A `ListReplicasResponse` as JSON."""
        async with self._building:
            now, manager = self._clock(), self._manager
            if not self._built or manager.changes != self._changes or (self._drifts and now >= self._until):
                self._changes = manager.changes
                self._until = now + OVERVIEW_SECONDS
                replicas = manager.status().replicas
                self._drifts = any(replica.HasField("drift") for replica in replicas)
                messages = [(replica.name, replica) for replica in replicas]
                self._built = f'{{"replicas":{await asyncio.to_thread(self._texts.of, messages)}}}'
            return self._built


class Lines:
    """Updates in a line each. Those with a report are cached until the report is corrected. Used on the manager's
    loop."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._lines: dict[int, page_pb2.PageUpdate] = {}
        ledger.written = lambda epoch: self._lines.pop(epoch, None)

    async def newest(self, limit: int) -> list[page_pb2.PageUpdate]:
        """The last ones, newest first. Raises as `Ledger.history`."""
        lines_by_epoch = dict(self._lines)
        lines = []
        for record in await self._ledger.history(None, limit, lines_by_epoch):
            line = lines_by_epoch.get(record.epoch) or update_line(record)
            if record.report is not None:
                self._lines[record.epoch] = line
            lines.append(line)
        for epoch in sorted(self._lines)[:-LINES_KEPT]:
            del self._lines[epoch]
        return lines
