"""Memory of a relay of this host: mapped read-only, from a descriptor that the relay hands out over its socket.

The socket is a file in a directory that relay and reader both see, maybe under two names, so they need neither a common
pid namespace nor a common network. The connection is the lease: while it lasts the relay knows its reader, and when
either process dies the kernel ends it. A reader asks for a slot before each install and reports its end. A relay fills
no slot that is held, but it waits no longer than its `slot_grace`. After a relay's death mapped memory stays readable
and unchanged.

This is the reader's side; the relay's is `relay/door.py`. One arena is mapped once, and only as far as it is read.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import mmap
import os
import queue
import socket
import struct
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import torch

from ckpt_engine.copy.copying import TensorCopy
from ckpt_engine.core.problems import data_loss, invalid, unavailable
from ckpt_engine.delta.table import ChangeTable
from ckpt_engine.host.forks import forget_in_children
from ckpt_engine.host.processes import is_ours, peer_user
from ckpt_engine.host.relay_directory import (
    DIRECTORY,
    directory_identity,
    relay_directory,
    socket_address,
)
from ckpt_engine.transport.base import Availability, CannotOpenError, Move
from ckpt_engine.transport.locator import locator_of
from ckpt_engine.transport.mapped import MappedRegions, Mapping
from ckpt_engine.transport.relay_memory.kind import NAME, on_host
from ckpt_engine.v1.relay_pb2 import RelayMemoryLocator
from ckpt_engine.v1.weights_pb2 import Region

log = logging.getLogger(__name__)


QUESTION = struct.Struct("<B?2xI16s")
"""Kind, whether the reader can install by changes (in each question after it has found that), slot, arena. A message of
a reader."""

OPEN, HOLD, RELEASE, CHANGES = range(1, 5)
"""Kinds. OPEN: asks for the arena's descriptor. HOLD: asks to read the slot; answered with yes or no. RELEASE: ends the
hold; not answered. CHANGES: asks for the descriptor of a table of what differs between the slots (`delta/table.py`)."""

ANSWER_BYTES = 1024
"""The most of an answer: 1, or 0 and the reason in words."""

ASK_SECONDS = 10.0
"""How long a relay may take to answer."""

_TABLE_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK

_KEPT = 64
"""Regions of an arena that stay mapped without a plan that uses them: those of both slots, for later plans."""


class _LeasedArena:
    """A lease on one arena of one relay, and the arena's regions that are mapped. Any thread."""

    def __init__(self, region: Region, locator: RelayMemoryLocator, seconds: float) -> None:
        self._seconds = seconds  # for each answer
        self._arena = locator.arena
        self._lock = threading.Lock()
        self._answers: queue.SimpleQueue[tuple[bytes, list[int]] | None] = queue.SimpleQueue()
        self._skips = 0  # answers that are still to come to questions that were given up
        self._held: dict[int, int] = {}  # by slot: how many RelayRegions hold it
        self.ended = False
        self.uses_changes = False  # written without a lock
        self.mappings: OrderedDict[tuple[int, int], Mapping] = OrderedDict()
        self._connection = _connect(region, locator, seconds)
        forget_in_children(self)
        threading.Thread(target=self._listen, name="ckpt-engine relay lease", daemon=True).start()
        try:
            answer, descriptors = self._ask(OPEN, 0)
            if answer[:1] != b"\1" or len(descriptors) != 1:
                _close(descriptors)
                raise unavailable(f"the relay does not lend its memory: {_words(answer)}")
            self._descriptor = descriptors[0]
        except BaseException:
            self.close()
            raise
        weakref.finalize(self, os.close, self._descriptor)
        self._size = os.fstat(self._descriptor).st_size
        if not fcntl.fcntl(self._descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            self.close()
            raise data_loss("the relay's memory could be cut off while it is read: it is not sealed")

    def mapping(self, offset: int, size: int) -> Mapping:
        """Maps a region of the arena, once. Raises DATA_LOSS if the arena is too small, UNAVAILABLE."""
        if offset + size > self._size:
            raise data_loss(
                f"the relay's memory has {self._size} bytes, and a region of it was to end at {offset + size}"
            )
        with self._lock:
            if (offset, size) not in self.mappings:
                try:
                    self.mappings[offset, size] = Mapping(self._descriptor, size, offset)
                except (OSError, ValueError) as error:
                    raise unavailable(f"the relay's memory cannot be mapped: {error}") from error
            self.mappings.move_to_end((offset, size))
            while len(self.mappings) > _KEPT:
                self.mappings.popitem(last=False)
            return self.mappings[offset, size]

    def hold(self, slot: int, again: bool) -> None:
        """Asks to read a slot. again: the caller held it already, and may have lost it since.

        Raises UNAVAILABLE if the relay is gone or the slot is being filled with something else.
        """
        answer, descriptors = self._ask(HOLD, slot)
        _close(descriptors)
        if answer[:1] != b"\1":
            raise unavailable(f"the relay does not lend slot {slot}: {_words(answer)}")
        with self._lock:
            self._held[slot] = self._held.get(slot, 0) + (not again)

    def changes(self, seconds: float) -> ChangeTable:
        """Asks for what differs between the slots now. seconds: for the answer; the lease goes on without it. Raises
        UNAVAILABLE, saying why, if there is none; DATA_LOSS."""
        answer, descriptors = self._ask(CHANGES, 0, seconds)
        try:
            if answer[:1] != b"\1" or len(descriptors) != 1:
                raise unavailable(_words(answer))
            if fcntl.fcntl(descriptors[0], fcntl.F_GET_SEALS) & _TABLE_SEALS != _TABLE_SEALS:
                raise data_loss("the relay's table of changes could change while it is read: it is not sealed")
            size = os.fstat(descriptors[0]).st_size
            return ChangeTable(memoryview(mmap.mmap(descriptors[0], size, access=mmap.ACCESS_COPY)))
        except (OSError, ValueError) as error:
            raise unavailable(f"the relay's table of changes cannot be mapped: {error}") from error
        finally:
            _close(descriptors)

    def release(self, slot: int) -> None:
        """Ends one caller's hold of a slot. Never raises."""
        with self._lock:
            self._held[slot] -= 1
            if not self._held[slot]:
                with contextlib.suppress(OSError):
                    self._connection.send(QUESTION.pack(RELEASE, self.uses_changes, slot, self._arena))

    def close(self) -> None:
        """Ends the lease. Memory stays mapped as long as a tensor or a copy uses it."""
        self.ended = True
        self.mappings = OrderedDict()
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def forget(self) -> None:
        """Closes this process's copy of the socket without telling the peer: for a forked child."""
        self.ended = True
        with contextlib.suppress(OSError):
            self._connection.close()

    def _ask(self, kind: int, slot: int, seconds: float | None = None) -> tuple[bytes, list[int]]:
        """seconds: for an answer that the lease can do without; None: a relay that does not answer ends it."""
        with self._lock:
            if self.ended:
                raise unavailable("the relay has gone, or has taken its memory back")
            limit = self._seconds if seconds is None else max(0.0, seconds)
            stop_at = time.monotonic() + limit
            try:
                with contextlib.suppress(OSError):  # a relay that has hung up may have said why
                    self._connection.send(QUESTION.pack(kind, self.uses_changes, slot, self._arena))
                found = self._answers.get(timeout=limit)
                while found is not None and self._skips:
                    self._skips -= 1
                    _close(found[1])
                    found = self._answers.get(timeout=max(0.0, stop_at - time.monotonic()))
            except queue.Empty:
                if seconds is not None:
                    self._skips += 1
                    raise unavailable(f"the relay did not answer within {limit:g} s") from None
                found = None
            if found is None:
                self.close()
                raise unavailable(f"the relay has gone, or did not answer within {limit:g} s")
            return found

    def _listen(self) -> None:
        """Takes answers, and notices the relay's end: then nothing more is mapped, and unused mappings end."""
        with self._connection as connection:
            with contextlib.suppress(OSError):
                while True:
                    answer, descriptors, _, _ = socket.recv_fds(connection, ANSWER_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
                    if not answer:
                        break
                    self._answers.put((answer, descriptors))
        self.ended = True
        self.mappings = OrderedDict()
        self._answers.put(None)
        with self._lock, contextlib.suppress(queue.Empty):  # nothing is asked any more
            while True:
                _close((self._answers.get_nowait() or (b"", []))[1])


def _connect(region: Region, locator: RelayMemoryLocator, seconds: float) -> socket.socket:
    where = relay_directory() / locator.socket
    if not locator.socket or "/" in locator.socket or "\0" in locator.socket:
        raise invalid(f"the locator of a relay names no socket: {locator.socket!r}")
    if not locator.directory or locator.directory != directory_identity():
        raise CannotOpenError(
            f"{relay_directory()} is not the directory of that relay; give relay and worker the same one ({DIRECTORY})",
            region,
        )
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    connection.settimeout(seconds)
    try:
        with socket_address(locator.socket) as address:
            connection.connect(address)
        user = peer_user(connection)
        if not is_ours(user):
            message = f"{where} is served by user {user}, not by this user or root: it is not believed"
            raise CannotOpenError(message, region)
        connection.settimeout(None)
    except PermissionError as error:
        connection.close()
        raise CannotOpenError(f"the relay at {where} cannot be asked for its memory: {error}", region) from error
    except OSError as error:
        connection.close()
        raise unavailable(f"no relay lends its memory at {where}: {error}") from error
    except BaseException:
        connection.close()
        raise
    return connection


def _close(descriptors: Iterable[int]) -> None:
    for each in descriptors:
        os.close(each)


def _words(answer: bytes) -> str:
    return answer[1:].decode("utf-8", "replace") or "it gave no reason"


class RelayRegions:
    """OpenedRegions of relays. Holds their slots from `check` until `rest`."""

    def __init__(self, mapped: MappedRegions, slots: Sequence[tuple[_LeasedArena, int]]) -> None:
        self._mapped = mapped
        self._slots = tuple(slots)
        self._holding: set[int] = set()  # of `_slots`

    def prepare(self, moves: Sequence[Move]) -> TensorCopy:
        """Prepares copies as other mapped memory does."""
        return self._mapped.prepare(moves)

    def view(
        self, region: Region, offset: int, shape: Sequence[int], stride: Sequence[int], dtype: str
    ) -> torch.Tensor:
        """The relay's memory as a tensor; see OpenedRegions."""
        return self._mapped.view(region, offset, shape, stride, dtype)

    def check(self) -> None:
        """Holds the slots. Raises UNAVAILABLE if a relay is gone or fills one of them."""
        for index, (arena, slot) in enumerate(self._slots):
            arena.hold(slot, again=index in self._holding)
            self._holding.add(index)

    def use_changes(self) -> None:
        """Tells the relays with the next question that `changes` will be asked for; see Comparable."""
        for arena, _ in self._slots:
            arena.uses_changes = True

    def changes(self, seconds: float) -> ChangeTable:
        """What differs between the slots of the only relay; see Comparable."""
        arenas = {arena for arena, _ in self._slots}
        if len(arenas) != 1:
            raise unavailable(f"weights come from {len(arenas)} relays")
        return arenas.pop().changes(seconds)

    def slot_offset(self, region: Region, slot_bytes: int) -> int:
        """Where a region begins in its slot; see Comparable."""
        locator = locator_of(region, NAME, RelayMemoryLocator)
        return locator.offset - locator.slot * slot_bytes

    def offered(self) -> bool:
        """Whether the relays still lend their memory, as far as is known without asking them."""
        return all(not arena.ended for arena, _ in self._slots)

    def rest(self) -> None:
        """Ends the holds: relays may fill the slots again."""
        for index in self._holding:
            arena, slot = self._slots[index]
            arena.release(slot)
        self._holding.clear()

    def close(self) -> None:
        """Forgets the regions. The arena stays mapped, and pinned, for the next plan of its relay."""
        self.rest()
        self._mapped.close()
        self._slots = ()


class RelayMemoryTransport:
    """Reads relays of this host. One instance a worker; an arena stays mapped until its relay ends."""

    name = NAME

    def __init__(self) -> None:
        self._arenas: dict[bytes, _LeasedArena] = {}

    def availability(self) -> Availability:
        """Whether relays could be read; the same for every process of the host."""
        return on_host()

    def open(self, regions: Sequence[Region], seconds: float = ASK_SECONDS) -> RelayRegions:
        """Maps the regions, which costs nothing for those that are mapped already, and holds their slots. seconds: at
        most ASK_SECONDS for each relay.

        Raises UNAVAILABLE if a relay is gone or does not lend a slot now, CannotOpenError if it is another user's,
        DATA_LOSS if its memory is not what its regions say.
        """
        opened: dict[bytes, Mapping] = {}
        slots: dict[tuple[bytes, int], tuple[_LeasedArena, int]] = {}
        for region in regions:
            locator = locator_of(region, NAME, RelayMemoryLocator)
            arena = self._arena(region, locator, min(seconds, ASK_SECONDS))
            opened[region.locator] = arena.mapping(locator.offset, region.size)
            slots[locator.arena, locator.slot] = arena, locator.slot
        found = RelayRegions(MappedRegions(opened, lambda: None, lambda: True, pins=True), list(slots.values()))
        try:
            found.check()
        except BaseException:
            found.close()
            raise
        return found

    def _arena(self, region: Region, locator: RelayMemoryLocator, seconds: float) -> _LeasedArena:
        self._arenas = {name: arena for name, arena in self._arenas.items() if not arena.ended}
        if locator.arena not in self._arenas:
            self._arenas[locator.arena] = _LeasedArena(region, locator, seconds)
        return self._arenas[locator.arena]
