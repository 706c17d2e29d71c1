"""The listener behind CKPT_ENGINE_TRACE: sees every named point of every process, and holds the one that was asked for.

Processes connect to a Unix socket (a connection for each of their threads), name a point, and wait for one byte. All
answers are given at once, except to the point that a `Held` waits for: that process then stands still, exactly there,
until it is let go (or is killed).
"""

from __future__ import annotations

import json
import os
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


class Held:
    """Waits for one process to reach one point, and keeps it there. Used once."""

    def __init__(self, point: str, is_wanted: Callable[[int], bool]) -> None:
        self.point = point
        self.pid = 0
        self._is_wanted = is_wanted
        self._reached, self._go = threading.Event(), threading.Event()

    def take(self, pid: int, point: str) -> bool:
        """Whether this is what was waited for. Called under the listener's lock, so only one process is taken."""
        if point != self.point or self._reached.is_set() or self._go.is_set() or not self._is_wanted(pid):
            return False
        self.pid = pid
        self._reached.set()
        return True

    def hold(self) -> None:
        """On the connection's thread: returns when the process may go on."""
        self._go.wait()

    def wait(self, seconds: float) -> bool:
        """Whether a process has reached the point, and stands there now."""
        return self._reached.wait(seconds)

    def let_go(self) -> None:
        self._go.set()


class Listener:
    """Use as a context manager; `path` goes into the environment of the processes that are to tell."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.seen: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._held: list[Held] = []
        self._closing = False
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(str(path))
        os.chmod(path, 0o600)
        self._socket.listen(64)
        self._connections: set[socket.socket] = set()
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *_: object) -> None:
        self._closing = True
        with self._lock:
            for held in self._held:
                held.let_go()
            for connection in self._connections:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    @contextmanager
    def holding(self, point: str, is_wanted: Callable[[int], bool] = lambda _: True) -> Iterator[Held]:
        """From now on the first process (of those wanted, by pid) that reaches `point` is held; let go at the end."""
        held = Held(point, is_wanted)
        with self._lock:
            self._held.append(held)
        try:
            yield held
        finally:
            held.let_go()
            with self._lock:
                self._held.remove(held)

    def _accept(self) -> None:
        while not self._closing:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            with self._lock:
                self._connections.add(connection)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with suppress(OSError, ValueError), connection, connection.makefile("rb") as lines:
            for line in lines:
                told = json.loads(line)
                with self._lock:
                    self.seen[told["point"]] += 1
                    held = next((held for held in self._held if held.take(told["pid"], told["point"])), None)
                if held is not None:
                    held.hold()
                connection.sendall(b"+")
        with self._lock:
            self._connections.discard(connection)
