"""The owner's side: a socket, and a thread for each connection, which sends runs of the arena to admitted readers.

A reader that is slow or stopped holds up only its own thread. Nothing here writes to the arena.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import socket
import ssl
import threading
from collections.abc import Callable, Sequence

from ckpt_engine.addresses import bound_socket, join_address, split_address
from ckpt_engine.core.loopback import is_loopback
from ckpt_engine.core.problems import CkptEngineError, invalid, unavailable
from ckpt_engine.core.rates import Rate
from ckpt_engine.host.forks import forget_in_children
from ckpt_engine.transport.base import ArenaMemory, Network
from ckpt_engine.transport.tcp import tls, wire
from ckpt_engine.transport.tcp.kind import NAME
from ckpt_engine.transport.tcp.lendings import Lendings
from ckpt_engine.transport.tcp.passer import Passer
from ckpt_engine.transport.tcp.passing import Runs, TcpPassing
from ckpt_engine.transport.tcp.sending import Sender, frames
from ckpt_engine.transport.tcp.sockets import HungUp, Silence, receive, send, shut, tune
from ckpt_engine.v1.relay_pb2 import TcpLocator
from ckpt_engine.v1.weights_pb2 import Region

log = logging.getLogger("ckpt_engine.relay")


MOST_CONNECTIONS = 512
"""At a time; further ones are closed at once."""

MOST_STRANGERS = 64
"""How many of those connections may have shown no token yet."""

FIRST_SECONDS = 10.0
"""From a connection to the end of its greeting, certificates included."""

SEND_SECONDS = 60.0
"""How long a reader may take nothing of what it asked for."""


class TcpArenaLender:
    """Lends one arena to other relays. Any thread; it has a thread of its own and one a connection.

    Raises INVALID_ARGUMENT for an invalid address, one that other hosts reach without certificates or --insecure, or
    certificates that do not work; UNAVAILABLE if it cannot listen there.
    """

    def __init__(self, memory: ArenaMemory, network: Network) -> None:
        self._memory = memory
        self._bytes = memory.bytes.numpy().data
        self._lendings = Lendings(memory.id, len(self._bytes) // memory.slot_bytes, network.slot_grace)
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
            log.info("relays of other hosts read it over TCP at %s, encrypted", self.address)
        else:
            log.warning(
                "listening on %s: relays of other hosts read weights at %s, not encrypted: anyone who sees the network "
                "sees them, and can read as they do",
                host,
                self.address,
            )
        self._accepting.start()

    @property
    def readers(self) -> int:
        """Connections that showed a token."""
        with self._lock:
            return len(self._admitted)

    @property
    def passes_on(self) -> Region:
        """Where other relays ask for what is being filled."""
        locator = TcpLocator(
            addresses=[self.address],
            arena=self._memory.id,
            slot=wire.NO_SLOT,
            token=self._lendings.token,
            certificate=self._certificate,
        )
        size = len(self._bytes)
        return Region(transport=NAME, size=size, locator=locator.SerializeToString(deterministic=True))

    def pass_on(self, slot: int, key: bytes, chunks: Sequence[Runs], passed: Callable[[Rate], None]) -> TcpPassing:
        """Lends a slot while it is being filled, chunk by chunk as each is verified. See PassesOn."""
        return self._lendings.pass_on(slot, key, chunks, passed)

    def offer(self, id: int, slot: int, offset: int, size: int) -> Region:
        """The region as other relays open it; the same for the same arguments."""
        locator = TcpLocator(
            addresses=[self.address],
            arena=self._memory.id,
            slot=slot,
            offset=offset,
            token=self._lendings.offer(slot, offset + size),
            certificate=self._certificate,
        )
        return Region(id=id, transport=NAME, size=size, locator=locator.SerializeToString(deterministic=True))

    def lend(self, slot: int) -> None:
        """Lets readers hold the slot from now on."""
        self._lendings.lend(slot)

    def refuse(self, slot: int) -> None:
        """Refuses further readers of the slot."""
        self._lendings.refuse(slot)

    def retire(self, slot: int) -> int:
        """Waits for the readers that hold the slot. Returns how many were overruled."""
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
            with self._lock:
                self._admitted.add(connection)
            send(connection, wire.frame(wire.YES, 0))
            tune(connection, SEND_SECONDS)
            sender = Sender(connection, self._memory, self._bytes)
            if hello.slot == wire.NO_SLOT:
                Passer(connection, self._lendings, sender).serve()
            else:
                _ServedReader(connection, hello.slot, self._lendings, sender).serve()
        except CkptEngineError as error:
            log.info("the relay at %s is not served: %s", where, error.problem.message)
            with contextlib.suppress(HungUp, Silence):
                send(connection, wire.refusal(wire.NO, error.problem.message))
        except (HungUp, Silence, OSError) as error:
            log.debug("the relay at %s is not served any more: %s", where, error or "it says nothing")
        except Exception:  # of one reader; the others are served
            log.exception("ckpt-engine: the relay at %s could not be served", where)
        finally:
            with self._lock:
                self._connections.pop(connection, None)
                self._admitted.discard(connection)
            connection.close()


class _ServedReader:
    """One connection that showed its token."""

    def __init__(self, connection: socket.socket, slot: int, lendings: Lendings, sender: Sender) -> None:
        self._connection = connection
        self._slot = slot
        self._lendings = lendings
        self._sender = sender

    def serve(self) -> None:
        """Answers until the reader hangs up. Raises INVALID_ARGUMENT for an invalid question, HungUp."""
        try:
            while True:
                with contextlib.suppress(Silence):  # the reader has no question now
                    self._answer(wire.read_question(receive(self._connection, wire.QUESTION.size)))
        finally:
            self._lendings.release(self._slot, self)

    def _answer(self, message: wire.ReaderMessage) -> None:
        try:
            self._carry_out(message)
        except Silence as error:
            raise HungUp(f"it takes nothing for {SEND_SECONDS:g} s") from error

    def _carry_out(self, message: wire.ReaderMessage) -> None:
        if message.kind == wire.RELEASE:
            self._lendings.release(self._slot, self)
        elif message.kind == wire.HOLD:
            try:
                lending = self._lendings.hold(self._slot, self)
            except CkptEngineError as error:
                send(self._connection, wire.refusal(wire.GONE, error.problem.message))
            else:
                send(self._connection, wire.frame(wire.YES, len(lending)) + lending)
        elif message.kind == wire.READ:
            data = receive(self._connection, message.runs * wire.RUN.size)
            runs = wire.read_runs(data, self._lendings.size(self._slot))
            for part in frames(runs):
                why = next(
                    (no for run in part if (no := self._lendings.why_not(self._slot, message.lending, *run))), ""
                )
                if why:
                    send(self._connection, wire.refusal(wire.GONE, why))
                    return
                self._sender.send(self._slot, part)
        else:
            raise invalid("this connection reads a slot, and cannot ask for a chunk of what is being filled")


def _listening(host: str, port: int) -> socket.socket:
    try:
        listener = bound_socket(host, port)
    except OSError as error:
        raise unavailable(f"--listen {join_address(host, port)}: cannot listen there: {error}") from error
    listener.listen(128)
    return listener
