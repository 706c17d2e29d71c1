"""Silences false errors of event loops that use grpc.aio in one process.

All loops of a process share one queue of grpc.aio. An event wakes all of them, one takes it, and the others find
nothing. grpc reports that as an error of a callback: a traceback in the log of a program with two loops.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

_Tell = Callable[[asyncio.AbstractEventLoop, dict[str, Any]], object]


def quiet_loop() -> None:
    """Keeps the running loop from reporting wake-ups without an event; all else goes to the loop's own handler.

    Call it wherever a channel or a server is opened. May be repeated, on a loop of ours or of a user.
    """
    loop = asyncio.get_running_loop()
    tell = loop.get_exception_handler()
    if not isinstance(tell, _Quiet):
        loop.set_exception_handler(_Quiet(tell))


class _Quiet:
    def __init__(self, tell: _Tell | None) -> None:
        self._tell = tell

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        nothing_there = isinstance(context.get("exception"), BlockingIOError)
        if nothing_there and "PollerCompletionQueue" in repr(context.get("handle")):
            return
        if self._tell is None:
            loop.default_exception_handler(context)
        else:
            self._tell(loop, context)
