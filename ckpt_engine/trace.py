"""Named points in the work of every process: a log for people, and places where a test can inject faults.

    trace("worker.install", "transfer")     the point "worker.install.transfer" has been reached
    with span("agent.does", "PauseEngine")  two points: "agent.does.PauseEngine.begin" and "... .end"

Each point is a line of the logger ``ckpt_engine.trace`` at level DEBUG. If the environment names a Unix socket
(CKPT_ENGINE_TRACE) when the process starts, each point is sent there as well. The thread then goes on when the listener
answers, after ``WAIT_SECONDS``, or when the listener has ended. So a test can hold a process at an exact point, kill or
stop it there or cut its connections, without sleeping. It is a debugging aid: off unless that variable is set. A
listener can only delay the process.

Any layer may call this, also inside engines: standard library only, never raises, costs two comparisons when off.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager

ENVIRONMENT = "CKPT_ENGINE_TRACE"
"""Path of the listener's Unix socket. Set by fault-injection harnesses only."""

WAIT_SECONDS = 60.0
"""The longest that a point waits for its listener; a thread that waited so long sends it no further points."""

log = logging.getLogger("ckpt_engine.trace")

_path = os.environ.get(ENVIRONMENT, "")
_connections = threading.local()
_nothing: AbstractContextManager[None] = contextlib.nullcontext()


def trace(place: str, what: str = "") -> None:
    """Reports that the point `place.what` is reached. Any thread may call it; a listener may hold the thread."""
    if _path or log.isEnabledFor(logging.DEBUG):
        _reach(f"{place}.{what}" if what else place)


def span(place: str, what: str) -> AbstractContextManager[None]:
    """Reports the points `place.what.begin` and `place.what.end` around a block, also if that raises."""
    return _span(f"{place}.{what}") if _path or log.isEnabledFor(logging.DEBUG) else _nothing


@contextlib.contextmanager
def _span(name: str) -> Iterator[None]:
    _reach(f"{name}.begin")
    try:
        yield
    finally:
        _reach(f"{name}.end")


def _reach(point: str) -> None:
    log.debug("%s", point)
    if not _path:
        return
    # A connection for each thread, so that one that is held holds no other; and none is shared with a forked child.
    if getattr(_connections, "process", None) != os.getpid():
        _connections.process, _connections.socket = os.getpid(), None
        with contextlib.suppress(OSError):
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            connection.settimeout(WAIT_SECONDS)
            connection.connect(_path)
            _connections.socket = connection
    connection = _connections.socket
    if connection is None:
        return
    try:
        connection.sendall(json.dumps({"pid": os.getpid(), "point": point}).encode() + b"\n")
        if connection.recv(1):
            return
    except OSError:
        pass
    connection.close()
    _connections.socket = None
