"""The asker's side: one connection to another relay, over which chunks come into memory of this one. See ChunkAsker.

It does not decide which relay is asked for what. Only the calling thread writes to the memory, and only what was asked
for. Any thread may shut the connection, which wakes that thread up.
"""

from __future__ import annotations

import logging
import os
import socket
import ssl
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from ckpt_engine.addresses import split_address
from ckpt_engine.core.offers import by_transport
from ckpt_engine.core.problems import CkptEngineError, data_loss, deadline, invalid, not_found, unavailable
from ckpt_engine.core.rates import Flow
from ckpt_engine.core.transports import carrier_kinds, make
from ckpt_engine.host.forks import forget_in_children
from ckpt_engine.transport.base import (
    CarriedChunk,
    CarrierLink,
    ChunkAnswer,
    ChunkAsk,
    ChunkDeltaError,
    ChunkDeltas,
    ChunkLaterError,
    ChunkRuns,
)
from ckpt_engine.transport.locator import locator_of
from ckpt_engine.transport.tcp import tls, wire
from ckpt_engine.transport.tcp.kind import NAME
from ckpt_engine.transport.tcp.sockets import (
    HungUp,
    Silence,
    has_hung_up,
    receive,
    receive_parts,
    receive_some,
    resolve,
    send,
    shut,
    tells_the_rate,
    tune,
    unread,
)
from ckpt_engine.v1.relay_pb2 import TcpLocator
from ckpt_engine.v1.weights_pb2 import OfferedRegion, Problem, Region

log = logging.getLogger("ckpt_engine.relay")

AnswerT = TypeVar("AnswerT")

SILENCE_SECONDS = 6.0
"""How long an owner may be silent. An owner that waits says so every second; a host that was stopped for a few seconds
goes on."""

STUCK_SECONDS = 15.0
"""How long an owner may receive nothing itself while we wait for it."""

ASK_SECONDS = 10.0
"""How long an owner may take to greet."""

UNREACHED_SECONDS = 300.0
"""How long an owner that could not be connected to in time is not dialled again: where hosts of replicas cannot dial
each other (a firewall that drops), each filling would wait for that."""

_SHORT = 64 << 10

_GATHERED = 256
"""Short runs that are received in one call."""

_POLL_SECONDS = 100e-6
"""Seconds between two looks at a chunk that a carrier reads."""

_unreached: dict[bytes, float] = {}
"""By locator, which a relay that starts again changes: until when (monotonic seconds)."""


class _OwnerAnswer(NamedTuple):
    """What an owner says to a question; neither `relay` nor `why`: the chunk is here."""

    relay: str = ""  # the one that has it granted
    why: str = ""  # it does not come from here
    may_come: bool = False  # it is not here now, and may come
    network_bytes: int = 0  # that came for it, heads included
    body: bytes | None = None  # its delta; None: it has landed in full
    why_whole: str = ""  # why it came in full, where a delta was asked for


@dataclass(eq=False)
class _ChunkQuestion:
    """A chunk that was asked for."""

    chunk: int
    how: ChunkAsk
    placed: bool  # whether its answer may be where it lies in the owner's memory
    based: bool  # whether its answer may be a delta
    answer: _OwnerAnswer | None = None  # if it came before its turn


class TcpAsker:
    """A connection to one relay. offered: with its `TcpChunkLender.chunks`. See ChunkAsker."""

    def __init__(self, offered: OfferedRegion, owner: str, name: str, stop_at: float) -> None:
        ways = by_transport(offered, owner)
        region = ways.get(NAME, Region())
        self.owner = owner
        self.waits = False  # the owner has said that it waits itself for the chunk of the oldest question
        self.flows: list[Flow] = []  # without what was in the kernel's memory already
        self._key = b""
        self._memory = memoryview(b"")
        self._deltas: ChunkDeltas | None = None
        self._is_base_named = False  # to the owner, in this filling
        self._questions: deque[_ChunkQuestion] = deque()  # those whose answers were not received
        self._ways = ways
        self._link: CarrierLink | None = None  # reads the owner's memory, where both sides have a carrier
        self._coming: Flow | None = None  # the current chunk, with all of the frame that has begun
        self._leave_reason = ""  # why this asker waits for no more; see `leave`
        self._broken = False
        now = time.monotonic()
        if now < _unreached.get(region.locator, now):
            raise unavailable(
                f"{owner} did not answer a while ago, and is not asked again before {UNREACHED_SECONDS:g} s are over: "
                "hosts that are filled together must reach each other"
            )
        until = min(stop_at, now + ASK_SECONDS)
        try:
            self._socket = _connect(read_locator(region), owner, name, until)
        except CkptEngineError as error:
            if error.problem.code == Problem.CODE_DEADLINE_EXCEEDED and until < stop_at:
                _unreached[region.locator] = time.monotonic() + UNREACHED_SECONDS
            raise
        tune(self._socket, SILENCE_SECONDS)
        forget_in_children(self)

    def begin(self, key: bytes, slot: int, memory: memoryview, deltas: ChunkDeltas | None = None) -> None:
        """Begins a filling of version `key` into `memory`."""
        assert not self._questions, "answers for the last filling are still to come"
        self._key, self._memory = key, memory
        self._deltas, self._is_base_named = deltas, False
        self.flows = []
        for kind in carrier_kinds() if self._link is None else ():
            if kind.name in self._ways and kind.link is not None and self._link is None:
                try:
                    self._link = make(kind.link, self._ways[kind.name], self.owner, memory)
                except CkptEngineError as error:
                    log.warning("%s is not read over %s: %s", self.owner, kind.name, error.problem.message)

    def ask(self, chunk: int, how: ChunkAsk = ChunkAsk.WAIT, based: bool = False) -> None:
        """Asks for a chunk; answers come in the order of the questions. based: a delta is welcome, unless a carrier
        reads the owner's memory."""
        if self._broken:
            raise unavailable(self._leave_reason or f"the connection to {self.owner} has ended")
        placed = self._link is not None
        question = _ChunkQuestion(chunk, how, placed, based and not placed and self._deltas is not None)
        self._naming_owner(lambda: self._send(question), chunk)
        self._questions.append(question)

    def receive(self, chunk: int, runs: ChunkRuns, moved: Callable[[], None]) -> ChunkAnswer:
        """Waits for the answer to the oldest question; see ChunkAsker."""
        assert [each.chunk for each in self._questions][:1] == [chunk], (
            f"chunk {chunk} is not the next that was asked for"
        )
        landing = [self._memory[offset : offset + length] for offset, length in runs]
        if not landing or not all(map(len, landing)) or sum(map(len, landing)) != sum(length for _, length in runs):
            raise invalid(f"chunk {chunk} is to land in runs that the slot of {len(self._memory)} bytes does not have")
        self.waits = False
        question = self._questions[0]
        answer = question.answer or self._naming_owner(lambda: self._receive(question, landing, runs, moved), chunk)
        self._questions.popleft()
        if answer.why:
            problem = not_found(f"{self.owner} does not have chunk {chunk}: {answer.why}")
            raise ChunkLaterError(problem.problem) if answer.may_come else problem
        if answer.body is not None and self._deltas is not None:
            if self._leave_reason:  # the chunk may have come from another relay, and be lent by now
                self._broken = True
                raise unavailable(self._leave_reason)
            try:
                self._deltas.apply(chunk, answer.body)
            except CkptEngineError as error:
                problem = data_loss(f"{self.owner} sent chunk {chunk} as a delta, and {error.problem.message}")
                raise ChunkDeltaError(problem.problem) from error
            moved()
        return ChunkAnswer(answer.relay, answer.network_bytes, answer.body is not None, answer.why_whole)

    def at_most(self) -> tuple[int, float] | None:
        """Upper bounds for the current chunk; see ChunkAsker."""
        coming = self._coming
        if coming is None:
            return None
        return coming.bytes, coming.bytes / max(time.monotonic() - coming.start, 1e-9)

    def end(self) -> bool:
        """Ends the filling; False: the connection cannot be used for another one."""
        if self._broken or self._questions or self._leave_reason or has_hung_up(self._socket):
            return False
        self._memory, self._deltas = memoryview(b""), None
        try:
            if self._key:
                send(self._socket, wire.question(wire.LEAVE, self._key))
        except (HungUp, Silence):
            return False
        self._key = b""
        return True

    def leave(self, why: str) -> None:
        """Shuts the connection; a waiting thread raises UNAVAILABLE with this reason. Any thread."""
        self._leave_reason = why
        self.shut()

    def shut(self) -> None:
        """Shuts the connection, which wakes up a waiting thread. Any thread."""
        shut(self._socket)

    def close(self) -> None:
        """Closes the connection, on the thread that uses it. May be repeated."""
        self._broken = True
        if self._link is not None:
            self._link.sever()
        self._memory = memoryview(b"")
        self._socket.close()

    def forget(self) -> None:
        """Closes this process's copy of the socket without telling the peer: for a forked child."""
        if self._socket.fileno() >= 0:
            os.close(self._socket.detach())

    def _naming_owner(self, what: Callable[[], AnswerT], chunk: int) -> AnswerT:
        try:
            return what()
        except BaseException as error:
            self._broken = True
            self._coming = None
            if isinstance(error, Silence):
                raise deadline(
                    f"{self.owner} said nothing for {SILENCE_SECONDS:g} s while chunk {chunk} was waited for: it is "
                    "stopped, or the network is cut"
                ) from error
            if isinstance(error, HungUp | OSError):
                raise unavailable(
                    self._leave_reason or f"{self.owner} is gone, while chunk {chunk} was waited for: {error}"
                ) from error
            raise

    # -- an answer

    def _send(self, question: _ChunkQuestion) -> None:
        message = wire.question(wire.CHUNK, self._key, question.chunk, question.how, question.placed, question.based)
        if question.based and self._deltas is not None and not self._is_base_named:
            message = wire.base(self._key, self._deltas.root) + message
            self._is_base_named = True
        send(self._socket, message)

    def _receive(
        self, question: _ChunkQuestion, landing: list[memoryview], runs: ChunkRuns, moved: Callable[[], None]
    ) -> _OwnerAnswer:
        """Lets a chunk land, or returns the relay that has it granted, or why it does not come."""
        chunk, earlier = question.chunk, deque[_ChunkQuestion]()  # questions of later chunks whose answers come before
        size = sum(map(len, landing))
        landing.reverse()
        pulse, since = -1, time.monotonic()
        began, buffered, came, why_whole = 0.0, 0, 0, ""
        body, measured = None, True
        while landing:
            kind, length = self._frame()
            self.waits = kind == wire.WAIT
            if kind == wire.DATA and not earlier:
                came += wire.FRAME.size + length
                if not began:
                    began, buffered = time.monotonic(), unread(self._socket)
                if measured:
                    before = self._coming.bytes if self._coming else 0
                    self._coming = Flow(began, began, before + length)
                self._land(landing, length, moved)
                continue
            content = receive(self._socket, length) if length else b""
            if kind == wire.GONE or began:
                raise unavailable(f"{self.owner} ends the connection: {_words(content)}")
            if kind in (wire.DELTA, wire.WHOLE) and question.based and not (earlier or came):
                came += wire.FRAME.size + length
                if kind == wire.WHOLE:
                    why_whole = _words(content)
                    continue
                (delta_size,) = wire.LENGTH.unpack(content)
                if not 0 < delta_size < size:
                    raise data_loss(
                        f"{self.owner} does not speak as relays do: a delta of chunk {chunk} has {delta_size} bytes, "
                        f"and all of it {size}"
                    )
                body, measured = bytearray(delta_size), tells_the_rate(delta_size, size)
                landing = [memoryview(body)]
                continue
            if kind == wire.WAIT:
                (now,) = wire.PULSE.unpack(content)
                if now != pulse:
                    pulse, since = now, time.monotonic()
                elif time.monotonic() - since > STUCK_SECONDS:
                    raise deadline(
                        f"{self.owner} has not got chunk {chunk}, nor anything else, for {STUCK_SECONDS:g} s: the "
                        "source that it waits for does not send"
                    )
            elif kind == wire.PLACE and (placed := earlier.popleft() if earlier else question).placed:
                place = self._understood(wire.read_place, content)
                if placed is question and self._carry(place, size, runs, moved):
                    send(self._socket, wire.question(wire.RELEASE, self._key, chunk))
                    return _OwnerAnswer(network_bytes=size)
                if placed is question:
                    earlier.extend(each for each in [*self._questions][1:] if each.placed)
                placed.placed = False
                send(self._socket, wire.question(wire.RELEASE, self._key, placed.chunk))
                self._send(placed)
            elif kind in (wire.TO, wire.NOT, wire.LATER):
                if kind == wire.TO:
                    answer = _OwnerAnswer(relay=self._understood(wire.read_name, content))
                else:
                    answer = _OwnerAnswer(why=_words(content), may_come=kind == wire.LATER)
                if not earlier:
                    return answer
                earlier.popleft().answer = answer
            else:
                raise data_loss(f"{self.owner} does not speak as relays do: it sent an answer of kind {kind}")
        self._coming = None
        if measured:
            length = size if body is None else len(body)
            self.flows.append(Flow(began, time.monotonic(), max(0, length - buffered)))
        return _OwnerAnswer(network_bytes=came, body=None if body is None else bytes(body), why_whole=why_whole)

    def _carry(self, place: wire.PlacedRuns, size: int, runs: ChunkRuns, moved: Callable[[], None]) -> bool:
        """Reads a chunk where it lies in the owner's memory; False: that failed, and nothing lands any more."""
        began, landed = time.monotonic(), 0
        reading: CarriedChunk | None = None
        while landed < size:
            before = landed
            try:
                if self._link is None:
                    return False
                reading = reading or self._link.read(place.slot, place.runs, self._memory, runs)
                landed = reading.poll()
            except CkptEngineError as error:
                log.warning("chunks of %s come over TCP from now on: %s", self.owner, error.problem.message)
                if self._link is not None:
                    self._link.sever()
                self._link = self._coming = None
                return False
            if landed > before:
                self._coming = Flow(began, began, size)
                moved()
            elif has_hung_up(self._socket):
                raise HungUp("it has hung up")
            else:
                time.sleep(_POLL_SECONDS)
        self._coming = None
        self.flows.append(Flow(began, time.monotonic(), size))
        return True

    def _frame(self) -> wire.Frame:
        return self._understood(wire.read_frame, receive(self._socket, wire.FRAME.size))

    def _understood(self, read: Callable[[bytes], AnswerT], data: bytes) -> AnswerT:
        try:
            return read(data)
        except CkptEngineError as error:
            raise data_loss(f"{self.owner} does not speak as relays do: {error.problem.message}") from error

    def _land(self, landing: list[memoryview], size: int, moved: Callable[[], None]) -> None:
        """Receives so many bytes into the last of these runs, and so on backwards."""
        while size:
            if not landing:
                raise HungUp("it sends more than it was asked for")
            if len(landing[-1]) < _SHORT and not isinstance(self._socket, ssl.SSLSocket):
                parts, room = [], size
                for view in landing[: -_GATHERED - 1 : -1]:
                    parts.append(view[:room])
                    room -= len(parts[-1])
                    if not room:
                        break
                got = receive_parts(self._socket, parts)
            else:
                got = receive_some(self._socket, landing[-1][:size])
            size -= got
            while got:
                into = landing.pop()
                if got < len(into):
                    landing.append(into[got:])
                got -= min(got, len(into))
            moved()


def read_locator(region: Region) -> TcpLocator:
    """The region's locator. Raises INVALID_ARGUMENT for an inconsistent one."""
    locator = locator_of(region, NAME, TcpLocator)
    if not 1 <= len(locator.addresses) <= 8:
        raise invalid(f"the locator of region {region.id} has {len(locator.addresses)} addresses, not 1 to 8")
    for address in locator.addresses:
        split_address(address)
    if len(locator.arena) != wire.ARENA_BYTES or len(locator.token) != wire.TOKEN_BYTES:
        raise invalid(f"the locator of region {region.id} names no memory of a relay, or has no token")
    if len(locator.certificate) not in (0, 32):
        raise invalid(
            f"the locator of region {region.id} has {len(locator.certificate)} bytes of certificate digest, not 32"
        )
    return locator


def _words(content: bytes) -> str:
    return content.decode("utf-8", "replace") or "it gave no reason"


# ------------------------------------------------------------------------------------------------------- connecting


def _connect(locator: TcpLocator, owner: str, name: str, stop_at: float) -> socket.socket:
    """A connection to an owner that has admitted us. Tries its addresses in turn."""
    problem = unavailable(f"{owner} published no address")
    for address in locator.addresses:
        remaining = stop_at - time.monotonic()
        if remaining <= 0:
            raise deadline(f"{owner} could not be reached in time: {problem.problem.message}")
        try:
            return _connect_to(address, locator, owner, name, remaining)
        except TimeoutError:
            problem = deadline(f"{owner} ({address}) did not answer within {remaining:.3g} s")
        except OSError as error:
            problem = unavailable(f"{owner} ({address}) cannot be reached: {error}")
        except CkptEngineError as error:
            problem = error
    raise problem


def _connect_to(address: str, locator: TcpLocator, owner: str, name: str, seconds: float) -> socket.socket:
    connection = _dial(address, owner, seconds)
    try:
        connection.settimeout(seconds)
        if locator.certificate:
            encrypted = tls.readers_context().wrap_socket(connection)
            connection = encrypted
            tls.check_certificate(encrypted, locator.certificate)
        tune(connection, seconds)
        try:
            send(connection, wire.hello(locator.arena, locator.token, name))
            kind, size = wire.read_frame(receive(connection, wire.FRAME.size))
            content = receive(connection, size) if size else b""
        except Silence as error:
            raise deadline(f"{owner} ({address}) did not answer within {seconds:.3g} s") from error
        except HungUp as error:
            raise unavailable(f"{owner} ({address}) is gone: {error}") from error
        if kind != wire.YES:
            raise unavailable(f"{owner} ({address}) does not let us ask: {_words(content)}")
    except BaseException:
        connection.close()
        raise
    return connection


def _dial(address: str, owner: str, seconds: float) -> socket.socket:
    """A connection to the first of the name's addresses that accepts one. Raises OSError, DEADLINE_EXCEEDED."""
    stop_at = time.monotonic() + seconds
    host, port = split_address(address)
    try:
        places = resolve(host, port, seconds)
    except Silence as error:
        raise deadline(f"{owner}: {host} was not resolved within {seconds:.3g} s") from error
    failed: OSError | None = None
    for family, kind, protocol, _, place in places:
        connection = socket.socket(family, kind, protocol)
        try:
            connection.settimeout(max(0.001, stop_at - time.monotonic()))
            connection.connect(place)
        except OSError as error:
            connection.close()
            failed = error
        else:
            return connection
    raise failed or OSError(f"{host} has no address")
