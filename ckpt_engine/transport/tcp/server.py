"""The owner's side: a socket, and a thread for each connection, which answers what its asker asks for.

It decides nothing about chunks (`lending.py`). An asker that is slow or stopped holds up only its own thread. Nothing
here writes to the arena.

An asker whose chunk is missing is told so every second, with a number that shows whether the owner receives anything at
all. That is how an asker tells an owner that waits from one that is stopped.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Iterator

from ckpt_engine.addresses import bound_socket, join_address, split_address
from ckpt_engine.core.loopback import is_loopback
from ckpt_engine.core.problems import CkptEngineError, invalid, unavailable
from ckpt_engine.core.rates import Flow
from ckpt_engine.host.forks import forget_in_children
from ckpt_engine.transport.base import ArenaMemory, ChunkRuns, DeltaAnswer, LentChunks, Network
from ckpt_engine.transport.tcp import tls, wire
from ckpt_engine.transport.tcp.kind import NAME
from ckpt_engine.transport.tcp.lending import REPLACED, Asker, ChunkSend, Lendings, Not, Pulse, TcpLending, To
from ckpt_engine.transport.tcp.sockets import (
    HungUp,
    Silence,
    has_hung_up,
    receive,
    send,
    shut,
    tells_the_rate,
    tune,
    unsent,
)
from ckpt_engine.v1.relay_pb2 import TcpLocator
from ckpt_engine.v1.weights_pb2 import Region

log = logging.getLogger("ckpt_engine.relay")


MOST_CONNECTIONS = 512
"""Most connections at a time; further ones are closed at once."""

MOST_STRANGERS = 64
"""How many of those connections may have shown no token yet."""

FIRST_SECONDS = 10.0
"""Seconds from a connection to the end of its greeting, certificates included."""

SEND_SECONDS = 60.0
"""How long an asker may take nothing of what it asked for."""

IDLE_TURNS = 10
"""Times SEND_SECONDS without a question until a connection is closed."""

PULSE_SECONDS = 1.0
"""Seconds between two messages to an asker that waits for a chunk."""

MOST_PLACES = 64
"""Chunks that one asker may read in this relay's memory at a time."""

LONG_RUN = 256 << 10
"""Bytes from which on a run is sent from where it lies; shorter ones are joined first."""


class TcpChunkLender:
    """Lends the chunks in one arena to other relays. See ChunkLender. It has a thread of its own and one a connection.

    Raises INVALID_ARGUMENT for an invalid address, one that other hosts reach without certificates or --insecure, or
    certificates that do not work; UNAVAILABLE if it cannot listen there.
    """

    def __init__(self, memory: ArenaMemory, network: Network) -> None:
        self._memory = memory
        self._bytes = memory.bytes.numpy().data
        self._lendings = Lendings(memory.id, network.slot_grace)
        self._context, self._certificate = tls.owners_context()
        host, port = split_address(network.listen, "--listen")
        if not is_loopback(host) and self._context is None and not network.insecure:
            raise invalid(
                f"--listen {network.listen}: other machines reach that, and what they are sent is not encrypted: set "
                "CKPT_ENGINE_AUTHORITY, CKPT_ENGINE_CERTIFICATE and CKPT_ENGINE_KEY (docs/security.md), or give "
                "--insecure where no other machine is on the network"
            )
        self._listener = _listening(host, port)
        self.address = join_address(network.address, self._listener.getsockname()[1])
        self._lock = threading.Lock()
        self._connections: dict[socket.socket, threading.Thread] = {}
        self._admitted: set[socket.socket] = set()
        self._open = True
        self._accepting = threading.Thread(target=self._accept, name="ckpt-engine tcp", daemon=True)
        forget_in_children(self)
        if is_loopback(host):
            log.info("relays of other hosts do not reach it: it listens on %s only (--listen)", host)
        elif self._context is not None:
            log.info("relays of other hosts ask it over TCP at %s, encrypted", self.address)
        else:
            log.warning(
                "listening on %s: relays of other hosts get weights at %s, not encrypted: anyone who sees the network "
                "sees them, and can ask as they do",
                host,
                self.address,
            )
        self._accepting.start()

    @property
    def chunks(self) -> Region:
        """Where other relays ask for chunks."""
        locator = TcpLocator(
            addresses=[self.address],
            arena=self._memory.id,
            token=self._lendings.token,
            certificate=self._certificate,
        )
        size = len(self._bytes)
        return Region(transport=NAME, size=size, locator=locator.SerializeToString(deterministic=True))

    @property
    def readers(self) -> int:
        """Connections that showed the token."""
        with self._lock:
            return len(self._admitted)

    def lend(self, lent: LentChunks) -> TcpLending:
        """Begins the filling of a slot."""
        return self._lendings.lend(lent)

    def refuse(self, slot: int) -> None:
        """Refuses further questions about the slot."""
        self._lendings.refuse(slot)

    def retire(self, slot: int) -> int:
        """Waits for the askers that are being sent some of the slot. Returns how many were overruled."""
        return self._lendings.retire(slot)

    def close(self) -> None:
        """Ends every connection, and waits for its thread. May be repeated."""
        with self._lock:
            if not self._open:
                return
            self._open = False
            connections = dict(self._connections)
        self._lendings.close()
        shut(self._listener)
        for connection in connections:
            shut(connection)
        for thread in (self._accepting, *connections.values()):
            thread.join(FIRST_SECONDS)
        self._listener.close()

    def forget(self) -> None:
        """Closes this process's copies of the sockets without telling their peers: for a forked child."""
        for each in (self._listener, *self._connections):
            with contextlib.suppress(OSError):
                os.close(each.detach())

    # -- threads

    def _accept(self) -> None:
        for number in itertools.count(1):
            try:
                connection, peer = self._listener.accept()
            except OSError as error:
                with self._lock:
                    if not self._open:
                        return
                log.warning("a relay's connection could not be taken: %s", error)
                threading.Event().wait(0.1)  # no descriptors are left, mostly
                continue
            if self._context is not None:  # certificates are shown in the connection's own thread
                connection = self._context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
            where = join_address(str(peer[0]), int(peer[1]))
            thread = threading.Thread(
                target=self._serve, args=(connection, where), name=f"ckpt-engine tcp {number}", daemon=True
            )
            if self._take(connection, thread):
                thread.start()
            else:
                connection.close()

    def _take(self, connection: socket.socket, thread: threading.Thread) -> bool:
        """Takes a connection in; False: there is no room. The oldest of those without a token makes room."""
        with self._lock:
            if not self._open or len(self._admitted) >= MOST_CONNECTIONS:
                return False
            strangers = [each for each in self._connections if each not in self._admitted]
            if len(strangers) >= 2 * MOST_STRANGERS:
                return False
            for each in strangers[: max(0, len(strangers) - MOST_STRANGERS + 1)]:
                shut(each)
            self._connections[connection] = thread
            return True

    def _serve(self, connection: socket.socket, where: str) -> None:
        try:
            tune(connection, FIRST_SECONDS)
            if isinstance(connection, ssl.SSLSocket):
                connection.do_handshake()
            hello = wire.read_hello(receive(connection, wire.HELLO.size))
            self._lendings.admit(hello)
            asker = Asker(wire.read_name(receive(connection, hello.name)))
            with self._lock:
                self._admitted.add(connection)
            send(connection, wire.frame(wire.YES))
            tune(connection, SEND_SECONDS)
            _AskerConnection(connection, asker, self._lendings, self._memory, self._bytes).serve()
        except CkptEngineError as error:
            log.info("the relay at %s is not served: %s", where, error.problem.message)
            with contextlib.suppress(HungUp, Silence):
                send(connection, wire.refusal(wire.NO, error.problem.message))
        except (HungUp, Silence, OSError) as error:
            log.debug("the relay at %s is not served any more: %s", where, error or "it says nothing")
        except Exception:  # of one asker; the others are served
            log.exception("ckpt-engine: the relay at %s could not be served", where)
        finally:
            with self._lock:
                self._connections.pop(connection, None)
                self._admitted.discard(connection)
            connection.close()


class _AskerConnection:
    """One connection that showed the token. arena: the bytes of its memory."""

    def __init__(
        self, connection: socket.socket, asker: Asker, lendings: Lendings, memory: ArenaMemory, arena: memoryview
    ) -> None:
        self._connection = connection
        self._asker = asker
        self._lendings = lendings
        self._memory = memory
        self._bytes = arena
        self._plain = not isinstance(connection, ssl.SSLSocket)
        self._places: deque[tuple[TcpLending, int]] = deque()  # what the asker reads itself, with the chunk's number
        self._base = b"", b""  # the key of a version, and the root against which the asker takes deltas of it

    def serve(self) -> None:
        """Answers until the asker hangs up. Raises INVALID_ARGUMENT for an invalid question, HungUp, Silence."""
        turns = 0
        try:
            while turns < IDLE_TURNS:
                try:
                    data = receive(self._connection, wire.QUESTION.size)
                except Silence:  # the asker has no question now
                    turns += 1
                    continue
                turns = 0
                self._carry_out(wire.read_question(data))
        finally:
            self._lendings.leave(self._asker)

    def _carry_out(self, question: wire.Question) -> None:
        if question.kind == wire.LEAVE:
            self._places.clear()
            self._lendings.leave(self._asker, question.key)
        elif question.kind == wire.BASE:
            try:
                self._base = question.key, receive(self._connection, wire.ROOT_BYTES)
            except Silence as error:
                raise HungUp("it stopped in the middle of a message") from error
        elif question.kind == wire.RELEASE:
            if not self._places:
                raise invalid("it gives back a chunk that it was not lent")
            lending, chunk = self._places.popleft()
            self._lendings.release(lending, self._asker, chunk, served=True)
        else:
            try:
                self._answer(question)
            except Silence as error:
                raise HungUp("it takes nothing of what it asked for") from error

    def _answer(self, question: wire.Question) -> None:
        while True:
            try:
                found = self._lendings.answer(question.key, question.chunk, question.how, self._asker, PULSE_SECONDS)
            except CkptEngineError as error:
                send(self._connection, wire.refusal(wire.GONE, error.problem.message))
                return  # the asker hangs up; if we did, it might be told nothing but that
            if not isinstance(found, Pulse):
                break
            if has_hung_up(self._connection):
                raise HungUp("it has hung up")
            send(self._connection, wire.frame(wire.WAIT, wire.PULSE.pack(found.number)))
        if isinstance(found, To):
            send(self._connection, wire.frame(wire.TO, found.relay.encode()))
        elif isinstance(found, Not):
            send(self._connection, wire.refusal(wire.LATER if found.may_come else wire.NOT, found.why))
        elif question.placed and len(found.runs) <= wire.MOST_RUNS and len(self._places) < MOST_PLACES:
            self._places.append((found.lending, question.chunk))
            send(self._connection, wire.place(found.lending.lent.slot, found.runs))
        else:
            self._send_chunk(found, question)

    # -- a chunk

    def _send_chunk(self, found: ChunkSend, question: wire.Question) -> None:
        body: bytes | None = None
        began, waiting, sent, is_whole = time.monotonic(), unsent(self._connection), 0, False
        try:
            delta = self._delta(found, question)
            began, waiting = time.monotonic(), unsent(self._connection)  # making a delta is no part of the rate
            if delta is not None and (body := delta.body) is not None:
                is_whole = self._send_delta(found, body)
                sent = len(body)
                return
            if delta is not None:
                send(self._connection, wire.refusal(wire.WHOLE, delta.why))
            for part in _frames(found.runs):
                if not found.lending.is_lent:
                    send(self._connection, wire.refusal(wire.GONE, REPLACED))
                    return
                self._send_frame(found.lending.lent.slot, part)
                sent += sum(length for _, length in part)
            is_whole = True
        finally:
            # What lies in the kernel's memory has not been sent; it leaves later, when nothing may measure it. A short
            # delta may lie there as a whole.
            transmitted = sent + waiting - unsent(self._connection)
            flow = Flow(began, time.monotonic(), max(0, transmitted))
            size = sum(length for _, length in found.runs)
            measured = body is None or (is_whole and tells_the_rate(len(body), size))
            self._lendings.release(found.lending, self._asker, question.chunk, is_whole, flow if measured else None)

    def _send_delta(self, found: ChunkSend, body: bytes) -> bool:
        """Sends a chunk as a delta; False if it is not lent any more: what the delta was made of may have been
        overwritten before it was ready."""
        if not found.lending.is_lent:
            send(self._connection, wire.refusal(wire.GONE, REPLACED))
            return False
        send(self._connection, wire.frame(wire.DELTA, wire.LENGTH.pack(len(body))))
        for first in range(0, len(body), wire.FRAME_BYTES):
            part = memoryview(body)[first : first + wire.FRAME_BYTES]
            send(self._connection, wire.FRAME.pack(wire.DATA, len(part)))
            send(self._connection, part)
        return True

    def _delta(self, found: ChunkSend, question: wire.Question) -> DeltaAnswer | None:
        """A chunk's delta, or why there is none; None: none was asked for."""
        key, root = self._base
        if not question.based or key != question.key:
            return None
        if found.lending.lent.deltas is None:
            return DeltaAnswer(why="it sends no deltas")
        return found.lending.lent.deltas(question.chunk, root, self._lendings.rate(self._asker))

    def _send_frame(self, slot: int, runs: ChunkRuns) -> None:
        """Sends one frame with these runs, as `_frames` has them. Raises Silence, HungUp."""
        head = wire.FRAME.pack(wire.DATA, sum(length for _, length in runs))
        first = slot * self._memory.slot_bytes
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
                sent = os.sendfile(self._connection.fileno(), self._memory.descriptor, at, end - at)
            except BlockingIOError as error:
                raise Silence from error
            except OSError as error:
                raise HungUp(str(error)) from error
            if not sent:
                raise HungUp("the arena ends before the run")
            at += sent


def _frames(runs: ChunkRuns) -> Iterator[list[tuple[int, int]]]:
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


def _listening(host: str, port: int) -> socket.socket:
    try:
        listener = bound_socket(host, port)
    except OSError as error:
        raise unavailable(f"--listen {join_address(host, port)}: cannot listen there: {error}") from error
    listener.listen(128)
    return listener
