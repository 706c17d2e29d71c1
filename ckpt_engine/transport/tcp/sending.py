"""Puts runs of a slot into frames and sends them over one connection. Nothing here writes to the arena."""

from __future__ import annotations

import os
import socket
import ssl
from collections.abc import Iterator, Sequence

from ckpt_engine.transport.base import ArenaMemory
from ckpt_engine.transport.tcp import wire
from ckpt_engine.transport.tcp.sockets import HungUp, Silence, send

LONG_RUN = 256 << 10
"""Bytes from which on a run is sent from where it lies; shorter ones are joined first."""


class Sender:
    """One connection. lent: the arena's bytes."""

    def __init__(self, connection: socket.socket, memory: ArenaMemory, lent: memoryview) -> None:
        self._connection = connection
        self._descriptor = memory.descriptor
        self._slot_bytes = memory.slot_bytes
        self._bytes = lent
        self._plain = not isinstance(connection, ssl.SSLSocket)

    def send(self, slot: int, runs: Sequence[tuple[int, int]]) -> None:
        """Sends one frame with these runs, as `frames` has them. Raises Silence, HungUp."""
        head = wire.frame(wire.DATA, sum(length for _, length in runs))
        first = slot * self._slot_bytes
        if len(runs) > 1 or runs[0][1] < LONG_RUN:
            parts = [self._bytes[first + offset : first + offset + length] for offset, length in runs]
            send(self._connection, b"".join((head, *parts)))
            return
        ((offset, length),) = runs
        send(self._connection, head)
        if self._plain:
            self._send_file(first + offset, length)
        else:
            send(self._connection, self._bytes[first + offset : first + offset + length])

    def _send_file(self, at: int, length: int) -> None:
        end = at + length
        while at < end:
            try:
                sent = os.sendfile(self._connection.fileno(), self._descriptor, at, end - at)
            except BlockingIOError as error:
                raise Silence from error
            except OSError as error:
                raise HungUp(str(error)) from error
            if not sent:
                raise HungUp("the arena ends before the run")
            at += sent


def frames(runs: Sequence[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    """The runs of each frame: a part of one long run, or several short ones."""
    short: list[tuple[int, int]] = []
    size = 0
    for offset, length in runs:
        if short and (length >= LONG_RUN or size + length > wire.FRAME_BYTES):
            yield short
            short, size = [], 0
        if length < LONG_RUN:
            short.append((offset, length))
            size += length
            continue
        for first in range(offset, offset + length, wire.FRAME_BYTES):
            yield [(first, min(wire.FRAME_BYTES, offset + length - first))]
    if short:
        yield short
