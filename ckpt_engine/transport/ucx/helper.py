"""A helper process: carries out its relay's requests with NIXL, and can be killed at any time.

It registers parts of the arena for peers to read, or reads from peers into the arena. It touches no other memory of the
relay and knows nothing of weights. One thread of its own; a lender's NIXL has one more, which answers peers.
"""

from __future__ import annotations

import os
import select
import socket
from collections import OrderedDict, deque
from typing import Any

from ckpt_engine.transport.ucx import channel as c
from ckpt_engine.transport.ucx.memory import populate
from ckpt_engine.transport.ucx.nixl import Agent

IN_FLIGHT = 6
"""Reads that are begun at a time; a request has at most some MiB."""

NAP_SECONDS = 50e-6
"""Seconds between two polls of reads none of which has ended."""

PREPARED = 4096
"""Reads that stay prepared for repetition."""


def help_relay(channel: socket.socket, name: str, base: int, size: int, reads: bool) -> None:
    """Serves one relay until it hangs up, then ends this process.

    base: address of the arena of `size` bytes. reads: it reads; else it lends.
    """
    channel.recv(1)  # until the relay knows this process
    os.dup2(2, 1)  # what libraries print must not go where people read answers
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    try:
        agent = Agent(name, progress=not reads)
        helper = _HelperReader(channel, agent, base, size) if reads else _HelperLender(channel, agent, base, size)
    except Exception as error:
        channel.send(c.message(c.READY, 0, 0, f"{type(error).__name__}: {error}".encode()[: c.MOST_BYTES // 2]))
        raise
    channel.send(c.message(c.READY, 0))
    helper.serve()
    os._exit(0)  # no destructor of NIXL or UCX runs: they would wait for reads that are no longer of use


class _Service:
    """Answers one relay."""

    def __init__(self, channel: socket.socket, agent: Agent, base: int, size: int) -> None:
        self._channel = channel
        self._agent = agent
        self._base = base
        self._size = size

    def serve(self) -> None:
        """Answers until the relay hangs up."""
        while data := self._channel.recv(c.MOST_BYTES):
            self._handle(data)

    def _handle(self, data: bytes) -> None:
        kind, number, value, body = c.parts(data)
        try:
            answer = self._perform(kind, number, value, body)
        except Exception as error:
            self._report_failure(number, error)
        else:
            if answer is not None:
                self._channel.send(c.message(c.DONE, number, value, answer))

    def _perform(self, kind: int, number: int, value: int, body: bytes) -> bytes | None:
        """Carries out a request; returns the answer, or None if it comes later."""
        raise NotImplementedError

    def _report_failure(self, number: int, error: Exception) -> None:
        text = f"{type(error).__name__}: {error}"
        self._channel.send(c.message(c.FAILED, number, 0, text.encode()[: c.MOST_BYTES // 2]))

    def _inside(self, offset: int, length: int) -> int:
        if offset < 0 or length <= 0 or offset + length > self._size:
            raise ValueError(f"{length} bytes at {offset} are not in an arena of {self._size}")
        return self._base + offset


class _HelperLender(_Service):
    """Lets peers read the arena. It is NIXL's thread that answers them."""

    def _perform(self, kind: int, number: int, value: int, body: bytes) -> bytes | None:
        if kind != c.LEND:
            raise ValueError(f"a lender does not understand message {kind}")
        (start,) = c.OFFSET.unpack(body)
        self._agent.register([(self._inside(start, value), value)])
        return self._agent.metadata()


class _HelperReader(_Service):
    """Reads from one peer at a time into the arena."""

    def __init__(self, channel: socket.socket, agent: Agent, base: int, size: int) -> None:
        super().__init__(channel, agent, base, size)
        self._registered: dict[int, tuple[int, Any]] = {}
        self._peer = ""
        self._waiting: deque[tuple[int, bytes]] = deque()  # number and body of requests
        self._flying: dict[int, tuple[bytes, Any]] = {}
        self._prepared: OrderedDict[bytes, Any] = OrderedDict()

    def serve(self) -> None:
        while True:
            if self._flying:
                nap = 0.0 if self._poll_reads() else NAP_SECONDS
                if self._flying and not select.select([self._channel], [], [], nap)[0]:
                    continue
            data = self._channel.recv(c.MOST_BYTES)
            if not data:
                return
            self._handle(data)

    def _perform(self, kind: int, number: int, value: int, body: bytes) -> bytes | None:
        if kind == c.CONNECT:
            self._peer = self._agent.connect(body)
            return b""
        if kind == c.LEND:
            (start,) = c.OFFSET.unpack(body)
            self._register(start, value)
            return b""
        if kind != c.READ:
            raise ValueError(f"a reader does not understand message {kind}")
        if not self._peer:
            raise ValueError("it is not connected to an owner")
        self._waiting.append((number, body))
        self._begin()
        return None

    def _register(self, start: int, size: int) -> None:
        known, registered = self._registered.get(start, (0, None))
        if size <= known:
            return
        if registered is not None:
            self._prepared.clear()
            self._agent.deregister(self._registered.pop(start)[1])
        address = self._inside(start, size)
        populate(address, size, writable=True)
        self._registered[start] = size, self._agent.register([(address, size)])

    def _begin(self) -> None:
        while self._waiting and len(self._flying) < IN_FLIGHT:
            number, body = self._waiting.popleft()
            try:
                read = self._take_prepared(body)
                finished = self._agent.begin(read)
            except Exception as error:
                self._report_failure(number, error)
                continue
            self._flying[number] = body, read
            if finished:
                self._finish(number)

    def _take_prepared(self, body: bytes) -> Any:
        """A prepared read, the last one of the same runs if that has ended."""
        if body in self._prepared:
            return self._prepared.pop(body)
        runs = c.unpack_runs(body)
        local = [(self._inside(offset, length), length) for _, offset, length in runs]
        return self._agent.prepare(self._peer, local, [(remote, length) for remote, _, length in runs])

    def _poll_reads(self) -> bool:
        """Finishes reads that have ended, and begins others; returns whether any had."""
        moved = False
        for number, (_, read) in list(self._flying.items()):
            try:
                finished = self._agent.finished(read)
            except Exception as error:
                del self._flying[number]
                self._report_failure(number, error)
                moved = True
                continue
            if finished:
                self._finish(number)
                moved = True
        self._begin()
        return moved

    def _finish(self, number: int) -> None:
        body, read = self._flying.pop(number)
        self._prepared[body] = read
        while len(self._prepared) > PREPARED:
            self._prepared.popitem(last=False)
        self._channel.send(c.message(c.DONE, number))
