"""Where a relay lends its arena: a Unix socket in a shared directory, and a thread that never blocks on a reader.

The other side is `transport/relay_memory/reader.py`. A reader's connection is its lease. It gets the arena's
descriptor, and reports which slot it is about to read and when it has read it. A reader that is silent, does not
listen, or is stopped delays neither other readers nor, for long, the relay: it waits for a slot until its readers are
done or have had it for `slot_grace`. It then overwrites the slot, and what such a reader has copied fails its
digest."""

from __future__ import annotations

import array
import contextlib
import logging
import os
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from ckpt_engine.core.problems import unavailable
from ckpt_engine.core.relay_layout import SLOTS, Group
from ckpt_engine.host.forks import forget_in_children
from ckpt_engine.host.owned import unwritable
from ckpt_engine.host.processes import peer_user
from ckpt_engine.host.relay_directory import directory_identity, made_directory, socket_address
from ckpt_engine.relay.arena import Arena
from ckpt_engine.transport.relay_memory.kind import NAME
from ckpt_engine.transport.relay_memory.reader import ANSWER_BYTES, CHANGES, HOLD, OPEN, QUESTION, RELEASE
from ckpt_engine.v1.relay_pb2 import RelayMemoryLocator
from ckpt_engine.v1.weights_pb2 import Region

log = logging.getLogger(__name__)

MOST_READERS = 1024
"""The most connections at a time; further ones are closed at once."""

_FIRST_SECONDS = 10.0
"""Seconds from a connection to its first question; a silent peer is then disconnected."""


@dataclass(eq=False)
class _DoorReader:
    connection: socket.socket
    since: float
    opened: bool = False  # it has the arena's descriptor
    uses_changes: bool = False
    held: dict[int, float] = field(default_factory=dict)  # by slot: since when


class ArenaDoor:
    """Lends one arena. Callable from any thread; it has a thread of its own.

    slot_grace: seconds that a reader may keep a slot which the relay wants to fill. users: that may read, besides this
    process's own and root.

    Raises UNAVAILABLE if there can be no socket, FAILED_PRECONDITION if others could put theirs in its place.
    """

    def __init__(self, arena: Arena, slot_grace: float, users: Collection[int] = ()) -> None:
        self._arena = arena
        self._grace = slot_grace
        self._users = frozenset({os.geteuid(), 0, *users})
        self._changed = threading.Condition()
        self._readers: dict[socket.socket, _DoorReader] = {}
        self._lent = [False] * SLOTS
        self._changes: int | str = "it has compared no versions yet"
        self._open = True
        self.socket = f"relay-{secrets.token_hex(8)}.sock"
        folder = _directory(bool(users))
        self.directory = directory_identity()
        self._path = folder / self.socket
        try:
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
            # Under its name only once it listens: a relay that starts beside takes a deaf socket for a dead one.
            with socket_address(f"starting-{self.socket}") as address:
                self._listener.bind(address)
            starting = folder / f"starting-{self.socket}"
            os.chmod(starting, 0o666 if users else 0o600)
            self._listener.listen(128)
            os.rename(starting, self._path)
            self._waker, self._woken = socket.socketpair()
        except OSError as error:
            advice = unwritable(folder, error)
            raise unavailable(
                f"cannot open the relay's socket {self._path}: {error}{'. ' if advice else ''}{advice}"
            ) from error
        self._listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="ckpt-engine relay door", daemon=True)
        forget_in_children(self)
        self._thread.start()

    @property
    def readers(self) -> int:
        """Connections that have the arena now."""
        with self._changed:
            return sum(reader.opened for reader in self._readers.values())

    @property
    def uses_changes(self) -> bool:
        """Whether a reader can install by what differs between the slots."""
        with self._changed:
            return any(reader.uses_changes for reader in self._readers.values())

    def regions(self, slot: int, groups: Collection[Group]) -> list[Region]:
        """A region for each group of a slot, with the group's number as id. Bytes are the same from version to
        version."""
        found = []
        for number, group in enumerate(groups):
            locator = RelayMemoryLocator(
                directory=self.directory,
                socket=self.socket,
                arena=self._arena.id,
                slot=slot,
                offset=slot * self._arena.slot_bytes + group.offset,
            )
            data = locator.SerializeToString(deterministic=True)
            found.append(Region(id=number, transport=NAME, size=group.size, locator=data))
        return found

    def lend_changes(self, changes: int | str) -> None:
        """Lets readers have a table of what differs between the slots from now on, in place of the last one. changes:
        the descriptor of a sealed memory file, which is closed here when it is replaced; or why there is none."""
        with self._changed:
            changes, self._changes = self._changes, changes
            if isinstance(changes, int):
                os.close(changes)

    def lend(self, slot: int) -> None:
        """Lets readers hold the slot from now on."""
        with self._changed:
            self._lent[slot] = True

    def retire(self, slot: int) -> int:
        """Refuses further readers of the slot and waits for those that hold it, for at most `slot_grace` each. Returns
        how many were overruled; the slot may be written then."""
        with self._changed:
            self._lent[slot] = False
            while True:
                now = time.monotonic()
                holding = [reader for reader in self._readers.values() if slot in reader.held]
                ends = [reader.held[slot] + self._grace for reader in holding]
                if not ends or max(ends) <= now or not self._open:
                    break
                self._changed.wait(max(ends) - now)
            for reader in holding:
                del reader.held[slot]
            return len(holding)

    def close(self) -> None:
        """Ends all leases: readers unmap what they do not use. May be repeated."""
        with self._changed:
            if not self._open:
                return
            self._open = False
            self._changed.notify_all()
        with contextlib.suppress(OSError):
            self._waker.send(b"\1")
        self._thread.join(_FIRST_SECONDS)
        self.lend_changes("the relay is being stopped")
        with contextlib.suppress(OSError):
            self._path.unlink()

    def forget(self) -> None:
        """Closes this process's copies of the sockets without telling their peers: for a forked child."""
        for each in (self._listener, self._waker, self._woken, *self._readers):
            with contextlib.suppress(OSError):
                each.close()

    def _serve(self) -> None:
        while True:
            for key, _ in self._selector.select(_FIRST_SECONDS):
                try:
                    self._handle(key.fileobj)
                except Exception:  # of one reader; the others are served
                    log.exception("ckpt-engine: a reader of the relay could not be answered")
            with self._changed:
                if not self._open:
                    break
                cutoff = time.monotonic() - _FIRST_SECONDS
                silent = [each for each in self._readers.values() if not each.opened and each.since < cutoff]
            for reader in silent:
                self._drop(reader)
        for reader in list(self._readers.values()):
            self._drop(reader)
        self._selector.close()
        for each in (self._listener, self._waker, self._woken):
            each.close()

    def _handle(self, found: object) -> None:
        if found is self._listener:
            self._accept()
        elif found is not self._woken and isinstance(found, socket.socket):
            self._hear(found)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError:  # no descriptor is left: the peer is served when one is, and this thread must not spin
            time.sleep(0.05)
            return
        connection.setblocking(False)
        why = self._why_not(connection)
        if why:
            with contextlib.suppress(OSError):
                connection.send(b"\0" + why.encode())
            connection.close()
            return
        with self._changed:
            self._readers[connection] = _DoorReader(connection, time.monotonic())
        self._selector.register(connection, selectors.EVENT_READ)

    def _why_not(self, connection: socket.socket) -> str:
        """Why the process at the other end may not read; empty: it may."""
        if len(self._readers) >= MOST_READERS:
            return f"{MOST_READERS} readers have it already"
        try:
            user = peer_user(connection)
        except OSError as error:
            return f"the user of the process at the other end is unknown: {error}"
        return "" if user in self._users else f"it lends to users {sorted(self._users)}, and this one is {user}"

    def _hear(self, connection: socket.socket) -> None:
        reader = self._readers[connection]
        try:
            question = connection.recv(QUESTION.size + 1)
        except BlockingIOError:
            return
        except OSError:
            question = b""
        try:
            if len(question) == QUESTION.size:
                self._answer(reader, *QUESTION.unpack(question))
                return
        except OSError:  # it listens so little that not even an answer fits into its socket
            pass
        self._drop(reader)

    def _answer(self, reader: _DoorReader, kind: int, uses_changes: bool, slot: int, arena: bytes) -> None:
        reader.uses_changes |= uses_changes
        why = "this relay has another arena by now" if arena != self._arena.id else ""
        if kind == OPEN and not why:
            reader.opened = True
            _send_descriptor(reader.connection, self._arena.descriptor)
            return
        with self._changed:
            if kind == RELEASE:
                reader.held.pop(slot, None)
                self._changed.notify_all()
                return
            if kind == CHANGES and reader.opened and not why:
                if isinstance(self._changes, int):
                    _send_descriptor(reader.connection, self._changes)
                    return
                why = self._changes
            elif not why and (kind != HOLD or slot >= SLOTS or not reader.opened):
                why = f"there is no question {kind} about slot {slot}"
            elif not why and not self._lent[slot]:
                why = "another version is brought into it, or none is in it yet; the next plan has another slot"
            if not why:
                reader.held[slot] = time.monotonic()
        reader.connection.send(b"\0" + why.encode()[: ANSWER_BYTES - 1] if why else b"\1")

    def _drop(self, reader: _DoorReader) -> None:
        self._selector.unregister(reader.connection)
        with self._changed:
            del self._readers[reader.connection]
            self._changed.notify_all()
        reader.connection.close()


def _send_descriptor(connection: socket.socket, descriptor: int) -> None:
    connection.sendmsg([b"\1"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))])


def _directory(shared: bool) -> Path:
    """Makes the relays' directory, and removes sockets of relays that died. Raises as `made_directory`."""
    folder = made_directory(shared)
    for path in folder.glob("*relay-*.sock"):
        with contextlib.suppress(OSError):
            if not _answers(path.name):
                path.unlink()
    return folder


def _answers(name: str) -> bool:
    """Whether a process listens at a socket; one that is stopped counts."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC) as probe:
        probe.setblocking(False)
        try:
            with socket_address(name) as address:
                probe.connect(address)
        except ConnectionRefusedError:
            return False
        except OSError:
            return True
    return True
