"""Sends news of replicas to the streams that watch them: each gets a snapshot, then changes, gathered for some
milliseconds.

Runs on the manager's event loop thread. The content is decided in ``machines/manager/status.py``.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from itertools import count

from ckpt_engine.core.problems import unavailable
from ckpt_engine.machines.manager.status import Watched, changes, snapshot
from ckpt_engine.shell.outbox import Outbox
from ckpt_engine.v1 import manager_pb2, weights_pb2

GATHER_SECONDS = 0.005
"""How long changes are gathered before they are sent together: an update changes all replicas within milliseconds. A
longer time would hide that a replica was updated at all."""

BEAT_SECONDS = 0.1
"""The same after a heartbeat: there are many, and hardly any changes something."""

WATCHERS = 256
"""Streams at most."""

QUEUE = 256
"""Messages that may wait for one watcher before it counts as stuck."""

WatchOutbox = Outbox[manager_pb2.WatchReplicasResponse]


class Watchers:
    """Sends all streams that watch replicas what has changed."""

    def __init__(self, look: Callable[[], Watched]) -> None:
        """look: returns the state to send now."""
        self._look = look
        self._run = uuid.uuid4().hex
        self._sequence = 0
        self._outboxes: dict[int, WatchOutbox] = {}
        self._numbers = count(1)
        self._last_watched: Watched | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._problem: weights_pb2.Problem | None = None

    def open(self, watcher: str) -> tuple[int, WatchOutbox]:
        """Begins a stream, with its first message queued. Raises UNAVAILABLE if there are too many."""
        if len(self._outboxes) >= WATCHERS:
            raise unavailable(f"{WATCHERS} streams watch the replicas already, and this manager carries no more")
        self._tell()
        self._last_watched = self._last_watched or self._look()
        number, outbox = next(self._numbers), Outbox[manager_pb2.WatchReplicasResponse](f"watcher {watcher!r}", QUEUE)
        outbox.put(self._numbered(snapshot(self._last_watched)))
        if self._problem is not None:
            outbox.close(self._problem)
        self._outboxes[number] = outbox
        return number, outbox

    def close(self, number: int) -> None:
        """Ends a stream."""
        self._outboxes.pop(number, None)
        if not self._outboxes:
            self._last_watched = None

    def changed(self, beat: bool) -> None:
        """Schedules a message, since something may have changed. It costs nothing without streams. beat: because of a
        heartbeat."""
        if not self._outboxes:
            return
        loop = asyncio.get_running_loop()
        when = loop.time() + (BEAT_SECONDS if beat else GATHER_SECONDS)
        if self._timer is None or self._timer.when() > when:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = loop.call_at(when, self._tell)

    def beat(self) -> manager_pb2.WatchReplicasResponse:
        """A message without news."""
        assert self._last_watched is not None
        watched = self._last_watched
        return self._numbered(
            manager_pb2.WatchReplicasResponse(
                fence=watched.fence.message(),
                settling=watched.settling,
                latest=[each.message() for each in watched.latest.values()],
            )
        )

    def stop(self, problem: weights_pb2.Problem) -> None:
        """Ends all streams with this problem."""
        self._problem = problem
        if self._timer is not None:
            self._timer.cancel()
        for outbox in self._outboxes.values():
            outbox.close(problem)

    def _tell(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._last_watched is None:
            return
        before, self._last_watched = self._last_watched, self._look()
        message = changes(before, self._last_watched)
        if message is not None:
            self._sequence += 1
            for outbox in self._outboxes.values():
                outbox.put(self._numbered(message))

    def _numbered(self, message: manager_pb2.WatchReplicasResponse) -> manager_pb2.WatchReplicasResponse:
        message.run, message.sequence = self._run, self._sequence
        return message
