"""The reader's side of what another relay passes on while it is being filled: one connection, one thread.

Only the calling thread writes to landing memory, and only what was asked for. Any thread may shut the connection, which
wakes that thread up.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

from ckpt_engine.core.problems import CkptEngineError, data_loss, deadline, unavailable
from ckpt_engine.core.rates import Flow
from ckpt_engine.host.forks import forget_in_children
from ckpt_engine.transport.tcp import connection, wire
from ckpt_engine.transport.tcp.fetcher import read_locator
from ckpt_engine.transport.tcp.sockets import HungUp, Silence, receive, receive_some, send, shut, tune, unread
from ckpt_engine.v1.weights_pb2 import Problem, Region

SILENCE_SECONDS = 6.0
"""How long an owner may be silent. An owner that waits says so every second; a host that was stopped for a few seconds
goes on."""

STUCK_SECONDS = 15.0
"""How long an owner may receive nothing itself while we wait for it."""


UNREACHED_SECONDS = 300.0
"""How long an owner that could not be connected to in time is not dialled again: where hosts of replicas cannot dial
each other (a firewall that drops), each filling would wait for that."""

_unreached: dict[bytes, float] = {}
"""By locator, which a relay that starts again changes: until when (monotonic seconds)."""


class ChunkReader:
    """A connection to a relay that is being filled. owner: as messages name it. key: of the filling, 16 bytes. flows:
    bytes received, and when; without those that were in the kernel's memory already.

    Raises UNAVAILABLE, DEADLINE_EXCEEDED, DATA_LOSS, each naming the owner.
    """

    def __init__(self, region: Region, owner: str, key: bytes, stop_at: float) -> None:
        self.owner = owner
        self._key = key
        self.flows: list[Flow] = []
        self._coming: Flow | None = None  # the current chunk, with all of the frame that has begun
        self._leave_reason = ""  # why this reader waits for no more; see `leave`
        now = time.monotonic()
        if now < _unreached.get(region.locator, now):
            raise unavailable(
                f"{owner} did not answer a while ago, and is not asked again before {UNREACHED_SECONDS:g} s are over: "
                "hosts that are filled together must reach each other"
            )
        until = min(stop_at, now + connection.ASK_SECONDS)
        try:
            self._socket = connection.connect(read_locator(region), owner, until)
        except CkptEngineError as error:
            if error.problem.code == Problem.DEADLINE_EXCEEDED and until < stop_at:
                _unreached[region.locator] = time.monotonic() + UNREACHED_SECONDS
            raise
        tune(self._socket, SILENCE_SECONDS)
        forget_in_children(self)

    def ask(self, chunk: int) -> None:
        """Asks for a chunk; chunks come in the order in which they were asked for."""
        self._naming_owner(lambda: send(self._socket, wire.chunk_question(self._key, chunk)), chunk)

    def receive(self, chunk: int, landing: Sequence[memoryview], moved: Callable[[], None]) -> None:
        """Waits for the next chunk that was asked for, and receives it. moved: called whenever bytes have come; after
        an exception of it the connection cannot be used any more."""
        self._naming_owner(lambda: self._receive_chunk(chunk, landing, moved), chunk)

    def at_most(self) -> tuple[int, float] | None:
        """Upper bounds for the current chunk: bytes that are here or about to be, and bytes a second; None between
        chunks. Any thread."""
        coming = self._coming
        if coming is None:
            return None
        return coming.bytes, coming.bytes / max(time.monotonic() - coming.start, 1e-9)

    def leave(self, why: str) -> None:
        """Shuts the connection; a waiting thread raises UNAVAILABLE with this reason. Any thread."""
        self._leave_reason = why
        self.shut()

    def shut(self) -> None:
        """Shuts the connection, which wakes up a waiting thread. Any thread."""
        shut(self._socket)

    def close(self) -> None:
        """Closes the connection, on the thread that uses it. May be repeated."""
        self._socket.close()

    def forget(self) -> None:
        """Closes this process's copy of the socket without telling the peer: for a forked child."""
        if self._socket.fileno() >= 0:
            os.close(self._socket.detach())

    def _naming_owner(self, what: Callable[[], None], chunk: int) -> None:
        try:
            what()
        except Silence as error:
            raise deadline(
                f"{self.owner} said nothing for {SILENCE_SECONDS:g} s while chunk {chunk} was waited for: it is "
                "stopped, or the network is cut"
            ) from error
        except (HungUp, OSError) as error:
            if self._leave_reason:
                raise unavailable(self._leave_reason) from error
            raise unavailable(f"{self.owner} is gone, while chunk {chunk} was waited for: {error}") from error

    def _receive_chunk(self, chunk: int, landing: Sequence[memoryview], moved: Callable[[], None]) -> None:
        remaining = list(reversed(landing))
        pulse, since = -1, time.monotonic()
        began, buffered = 0.0, 0
        while remaining:
            kind, size = self._frame()
            if kind == wire.WAIT:
                (now,) = wire.PULSE.unpack(receive(self._socket, size))
                if now != pulse:
                    pulse, since = now, time.monotonic()
                elif time.monotonic() - since > STUCK_SECONDS:
                    raise deadline(
                        f"{self.owner} has not got chunk {chunk}, nor anything else, for {STUCK_SECONDS:g} s: the "
                        "source that it waits for does not send"
                    )
            elif kind == wire.DATA:
                if not began:
                    began, buffered = time.monotonic(), unread(self._socket)
                before = self._coming.bytes if self._coming else 0
                self._coming = Flow(began, began, before + size)
                self._land(remaining, size, moved)
            elif kind == wire.GONE:
                raise unavailable(f"{self.owner}: {self._words(size)}")
            else:
                raise unavailable(f"{self.owner} ends the connection: {self._words(size)}")
        self._coming = None
        came = sum(map(len, landing)) - buffered
        self.flows.append(Flow(began, time.monotonic(), max(0, came)))

    def _frame(self) -> wire.Frame:
        try:
            return wire.read_frame(receive(self._socket, wire.FRAME.size))
        except CkptEngineError as error:
            raise data_loss(f"{self.owner} does not speak as relays do: {error.problem.message}") from error

    def _land(self, remaining: list[memoryview], size: int, moved: Callable[[], None]) -> None:
        while size:
            if not remaining:
                raise HungUp("it sends more than it was asked for")
            into = remaining.pop()
            got = receive_some(self._socket, into[:size])
            if got < len(into):
                remaining.append(into[got:])
            size -= got
            moved()

    def _words(self, size: int) -> str:
        return receive(self._socket, size).decode("utf-8", "replace") if size else "it gave no reason"
