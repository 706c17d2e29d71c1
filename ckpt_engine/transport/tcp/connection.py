"""The reader's side: a few connections to one slot of one owner, each with a thread that receives into landing memory.

Only those threads write to landing memory, each only what was asked for. They have ended when `SlotConnections.close`
returns. A thread first sends questions, as many as may be in flight, and then receives one answer, so that the owner
has the next question before it has answered the last one.
"""

from __future__ import annotations

import os
import queue
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Sequence

from ckpt_engine.addresses import split_address
from ckpt_engine.core.problems import CkptEngineError, data_loss, deadline, unavailable
from ckpt_engine.host.forks import forget_in_children
from ckpt_engine.transport.tcp import tls, wire
from ckpt_engine.transport.tcp.sockets import (
    HungUp,
    Silence,
    has_hung_up,
    receive,
    receive_some,
    resolve,
    send,
    shut,
    tune,
)
from ckpt_engine.v1.relay_pb2 import TcpLocator

LANES = 2
"""Connections to one slot of one owner."""

STALL_SECONDS = 15.0
"""How long an owner may send nothing of what it was asked for; a host that was stopped for a few seconds goes on."""

ASK_SECONDS = 10.0
"""How long an owner may take to greet, and to lend its slot."""

_WAITING = 2
"""Questions in flight on one connection: more would fill the buffers of an owner that is sending."""

_GATHERED = 256
"""Short runs that are received in one call."""

_SHORT = 64 << 10


class OwnerRequest:
    """A question to an owner, and what became of it. Only the lane's thread changes it."""

    def __init__(self, question: bytes, landing: Sequence[memoryview] = (), expects_answer: bool = True) -> None:
        self.question = question
        self.landing = deque(landing)
        self.expects_answer = expects_answer
        self.landed = 0  # bytes
        self.answer = b""
        self.problem: CkptEngineError | None = None
        self.finished = threading.Event()

    def fail(self, problem: CkptEngineError) -> None:
        self.problem = problem
        self.finished.set()


class Lane:
    """One connection. Raises UNAVAILABLE, DEADLINE_EXCEEDED, DATA_LOSS, each naming `owner`."""

    def __init__(self, locator: TcpLocator, owner: str, stop_at: float) -> None:
        self.owner = owner
        self._socket = connect(locator, owner, stop_at)
        self._queue: queue.SimpleQueue[OwnerRequest | None] = queue.SimpleQueue()
        self._problem: CkptEngineError | None = None
        self._lock = threading.Lock()
        self.waiting = 0  # bytes that were asked for, above those of the least busy lane
        forget_in_children(self)
        self._thread = threading.Thread(target=self._run, name="ckpt-engine tcp lane", daemon=True)
        self._thread.start()

    def ask(self, request: OwnerRequest) -> None:
        """Queues a request and does not wait. Once the lane has failed, so has the request."""
        with self._lock:
            if self._problem is None:
                self._queue.put(request)
                return
        request.fail(self._problem)

    def check(self) -> None:
        """Raises if the lane has failed, or the owner has hung up as far as is known without waiting."""
        if self._problem is not None:
            raise self._problem
        if has_hung_up(self._socket):
            self._fail(unavailable(f"{self.owner} has hung up"))
            raise unavailable(f"{self.owner} has hung up")

    def shut(self) -> None:
        """Shuts the connection; its thread ends soon."""
        self._fail(unavailable(f"the connection to {self.owner} was severed"))
        shut(self._socket)

    def join(self) -> None:
        """Returns once its thread has ended."""
        self._thread.join()

    def forget(self) -> None:
        """Closes this process's copy of the socket without telling the peer: for a forked child."""
        if self._socket.fileno() >= 0:
            os.close(self._socket.detach())

    # -- its thread

    def _run(self) -> None:
        sent: deque[OwnerRequest] = deque()
        problem = unavailable(f"the connection to {self.owner} was severed")
        try:
            while self._send_requests(sent):
                if sent:
                    self._receive(sent[0])
                    sent.popleft().finished.set()
        except Silence:
            problem = deadline(
                f"{self.owner} sent nothing of what it was asked for in {STALL_SECONDS:g} s: it is stopped, or the "
                "network is cut"
            )
        except HungUp as error:
            problem = unavailable(f"{self.owner} is gone: {error}")
        except CkptEngineError as error:
            problem = data_loss(f"{self.owner} does not speak as relays do: {error.problem.message}")
        except Exception as error:
            problem = unavailable(f"reading from {self.owner} failed: {type(error).__name__}: {error}")
        self._fail(problem)
        for each in sent:
            each.fail(self._problem or problem)
        self._socket.close()

    def _fail(self, problem: CkptEngineError) -> None:
        """Fails the lane: all requests that were not sent yet, and all later ones. The first reason stays."""
        with self._lock:
            if self._problem is None:
                self._problem = problem
            while True:
                try:
                    request = self._queue.get_nowait()
                except queue.Empty:
                    break
                if request is not None:
                    request.fail(self._problem)
            self._queue.put(None)

    def _send_requests(self, sent: deque[OwnerRequest]) -> bool:
        """Sends questions until enough are in flight; waits for the first if none is. False: the lane has ended."""
        while len(sent) < _WAITING:
            try:
                request = self._queue.get(block=not sent)
            except queue.Empty:
                return True
            if request is None:
                return False
            if request.expects_answer:
                sent.append(request)
            send(self._socket, request.question)
        return True

    def _receive(self, request: OwnerRequest) -> None:
        """Receives one answer. Raises Silence, HungUp, INVALID_ARGUMENT for a malformed one."""
        while True:
            kind, size = wire.read_frame(receive(self._socket, wire.FRAME.size))
            if kind == wire.DATA and request.landing:
                self._land(request, size)
                if request.landing:
                    continue
                return
            request.answer = receive(self._socket, size) if size else b""
            if kind == wire.GONE:
                request.problem = unavailable(f"{self.owner}: {_words(request.answer)}")
            elif kind == wire.NO:
                raise HungUp(_words(request.answer))
            elif kind != wire.YES or request.landing:
                raise HungUp("it sends what was not asked for")
            return

    def _land(self, request: OwnerRequest, size: int) -> None:
        while size:
            if not request.landing:
                raise HungUp("it sends more than it was asked for")
            if len(request.landing[0]) < _SHORT and isinstance(self._socket, ssl.SSLSocket) is False:
                got = self._gather(request, size)
            else:
                into = request.landing[0][:size]
                got = receive_some(self._socket, into)
                _advance(request.landing, got)
            request.landed += got
            size -= got

    def _gather(self, request: OwnerRequest, size: int) -> int:
        """Receives several short runs in one call."""
        parts: list[memoryview] = []
        for view in request.landing:
            parts.append(view[:size])
            size -= len(parts[-1])
            if not size or len(parts) == _GATHERED:
                break
        try:
            got = self._socket.recvmsg_into(parts, 0, socket.MSG_WAITALL)[0]
        except BlockingIOError as error:
            raise Silence from error
        except OSError as error:
            raise HungUp(str(error)) from error
        if not got:
            raise HungUp("it has hung up")
        _advance(request.landing, got)
        return got


def _advance(landing: deque[memoryview], got: int) -> None:
    while got:
        first = landing.popleft()
        if got < len(first):
            landing.appendleft(first[got:])
            return
        got -= len(first)


def _words(answer: bytes) -> str:
    return answer.decode("utf-8", "replace") or "it gave no reason"


def connect(locator: TcpLocator, owner: str, stop_at: float) -> socket.socket:
    """A connection to an owner that has admitted us. Tries its addresses in turn."""
    problem = unavailable(f"{owner} published no address")
    for address in locator.addresses:
        remaining = stop_at - time.monotonic()
        if remaining <= 0:
            raise deadline(f"{owner} could not be reached in time: {problem.problem.message}")
        try:
            return _connect_to(address, locator, owner, remaining)
        except TimeoutError:
            problem = deadline(f"{owner} did not answer within {remaining:.3g} s")
        except OSError as error:
            problem = unavailable(f"{owner} cannot be reached: {error}")
        except CkptEngineError as error:
            problem = error
    raise problem


def _connect_to(address: str, locator: TcpLocator, owner: str, seconds: float) -> socket.socket:
    connection = _dial(address, owner, seconds)
    try:
        connection.settimeout(seconds)
        if locator.certificate:
            encrypted = tls.readers_context().wrap_socket(connection)
            connection = encrypted
            tls.check_certificate(encrypted, locator.certificate)
        tune(connection, seconds)
        try:
            send(connection, wire.hello(locator.slot, locator.arena, locator.token))
            kind, size = wire.read_frame(receive(connection, wire.FRAME.size))
            words = receive(connection, size) if size else b""
        except Silence as error:
            raise deadline(f"{owner} did not answer within {seconds:.3g} s") from error
        except HungUp as error:
            raise unavailable(f"{owner} is gone: {error}") from error
        if kind != wire.YES:
            raise unavailable(f"{owner} does not let us read: {_words(words)}")
        tune(connection, STALL_SECONDS)
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
        raise deadline(f"{owner}: the resolver did not say within {seconds:.3g} s where {host} is") from error
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
