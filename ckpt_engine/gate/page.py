"""The shared page of state words: what each worker of one engine holds.

This module decides how a state word is laid out, how it is written so that no reader takes a torn one for whole, and
what all words together mean (:func:`verdict`). It does not decide when a worker is dirty or clean; the installer does.

The page is a file that the workers, the gate in the API server and the agent map. Each place has one writer: slot
``rank`` the worker of that rank, the engine's mark, hold, lease and count of kept caches the agent. A word has a
checksum. A reader that meets a word in the middle of a write reads again; a word that a killed worker left half-written
reads as dirty.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ckpt_engine.core.names import LINEAGE_BYTES as LINEAGE_BYTES
from ckpt_engine.core.sleeping import AWAKE, KV_CACHE, WEIGHTS, Sleeping
from ckpt_engine.host.processes import process_start_time
from ckpt_engine.host.reserve import reserve
from ckpt_engine.v1 import manager_pb2, weights_pb2

NONE = manager_pb2.WORKER_STATE_NONE
DIRTY = manager_pb2.WORKER_STATE_DIRTY
CLEAN = manager_pb2.WORKER_STATE_CLEAN

MAX_WORKERS = 1024

_MAGIC = b"CKPTPAGE"
_HEADER = struct.Struct("<8sII")  # magic, layout version, workers
_LAYOUT = 2
_HEADER_BYTES = 256
_SLOT_BYTES = 256
_WORD = struct.Struct("<16sIQIQq32sH120s")  # boot id, pid, start time, state, epoch, version, root, lineage
_CHECK = struct.Struct("<I")
_MARK = struct.Struct("<BBBB")  # flags, sleep level, tags that are given up, zero
_MARK_OFFSET = 64
_HOLD = struct.Struct("<QdBdIQ")  # epoch, until, closed; seconds, requests, bytes
_HOLD_OFFSET = 128
_OWN_WEIGHTS, _ROUSING = 1, 2
_LEASE = struct.Struct("<d")  # until when the agent counts as there, on this host's monotonic clock; 0: for ever
_LEASE_OFFSET = 192
_KEPT = struct.Struct("<Q")  # how many updates were begun over caches that stay
_KEPT_OFFSET = 208
_TAG_BITS = {WEIGHTS: 1, KV_CACHE: 2}
_PAGE_BYTES = _HEADER_BYTES + MAX_WORKERS * _SLOT_BYTES
_READS_BEFORE_TORN = 100


@dataclass(frozen=True, slots=True)
class WorkerWord:
    """The content of one worker's slot. ``identity`` is set only when ``state`` is CLEAN."""

    rank: int
    boot_id: bytes
    pid: int
    alive: bool
    state: manager_pb2.WorkerState
    epoch: int
    identity: weights_pb2.Identity | None

    def status(self) -> manager_pb2.WorkerStatus:
        """The word as a message for the manager; a dead worker holds nothing."""
        state = self.state if self.alive else NONE
        identity = self.identity if self.alive else None
        return manager_pb2.WorkerStatus(
            rank=self.rank, boot_id=self.boot_id, pid=self.pid, state=state, epoch=self.epoch, identity=identity
        )


@dataclass(frozen=True, slots=True)
class EngineMark:
    """The agent's mark on the engine as a whole; it outlives the agent."""

    own_weights: bool = False  # it serves weights that it loaded itself and no update touches (mode colocated)
    sleeping: Sleeping = AWAKE


@dataclass(frozen=True, slots=True)
class RequestHold:
    """The agent's note of a running update; it outlives the agent."""

    epoch: int = 0  # of the update; 0: none runs
    until: float = 0.0  # the update's deadline, monotonic seconds of this host
    closed: bool = False  # the update has ended, and the engine does not compute although its weights are whole


@dataclass(frozen=True, slots=True)
class HoldLimits:
    """Limits of the requests that the gate holds during an update."""

    seconds: float = 30.0  # of one request; 0: none is held
    requests: int = 4096  # of all together
    bytes: int = 256 * 2**20  # of all bodies together


@dataclass(frozen=True, slots=True)
class Admission:
    """Whether an engine may answer requests."""

    open: bool
    reason: str  # why not; empty: it may
    identity: weights_pb2.Identity | None  # the version that it would answer with; None: its own weights


def admission(words: Sequence[WorkerWord], mark: EngineMark, alone: bool = False) -> Admission:
    """The gate's rule: like `verdict`, and closed while any of the engine's memory is given up. Pure.

    alone: the agent's lease has expired; see `EnginePage.alone`.
    """
    if alone:
        return Admission(False, "its agent's lease has expired (--close-when-alone): see whether the agent runs", None)
    if mark.sleeping:
        return Admission(False, f"it is {mark.sleeping.describe()}", None)
    return verdict(words, mark.own_weights)


def verdict(words: Sequence[WorkerWord], own_weights: bool = False) -> Admission:
    """Whether the weights are whole: there are workers, and all are alive and clean with one identity. Pure.

    own_weights: the engine has its own, which are whole as long as no worker is dead or half updated.
    """
    if own_weights:
        for word in words:
            if word.boot_id and not word.alive:
                return Admission(False, f"worker {word.rank} (pid {word.pid}) is dead", None)
            if word.state == DIRTY:
                return Admission(False, f"worker {word.rank} was updated, although its weights are its own", None)
        return Admission(True, "", None)
    if not words:
        return Admission(False, "no worker has started", None)
    for word in words:
        if not word.boot_id:
            return Admission(False, f"worker {word.rank} has not started", None)
        if not word.alive:
            return Admission(False, f"worker {word.rank} (pid {word.pid}) is dead", None)
        if word.state == NONE:
            return Admission(False, f"worker {word.rank} holds no weights yet", None)
        if word.state != CLEAN or word.identity is None:
            torn = (
                f"worker {word.rank} holds no whole version (epoch {word.epoch}: that update has not ended, or a scrub "
            )
            return Admission(False, torn + "found a difference since)", None)
    first = words[0].identity
    for word in words[1:]:
        if word.identity != first:
            return Admission(False, f"worker {word.rank} holds another version than worker {words[0].rank}", None)
    return Admission(True, "", first)


class WorkerSlot:
    """One worker's state word, for writing. Used by that worker's process only, from any one thread; for a worker on
    another host by the leading agent."""

    def __init__(self, page: EnginePage, rank: int, boot_id: bytes) -> None:
        self._page = page
        self.rank = rank
        self.boot_id = boot_id
        self._pid = os.getpid()
        self._start_time = process_start_time(self._pid)
        self.state: manager_pb2.WorkerState = NONE
        self.epoch = 0
        self.identity: weights_pb2.Identity | None = None
        self.none()

    def none(self) -> None:
        """Writes that the worker holds no version: it has just started, or its weights were discarded."""
        self._write(NONE, self.epoch, None)

    def dirty(self, epoch: int) -> None:
        """Writes that an install of ``epoch`` is about to write its first byte."""
        self._write(DIRTY, epoch, None)

    def clean(self, epoch: int, identity: weights_pb2.Identity) -> None:
        """Writes that every byte of ``identity`` was installed and verified by ``epoch``.

        Raises:
            ValueError: the lineage is too long or the root is not 32 bytes; the slot stays as it was.
        """
        self._write(CLEAN, epoch, identity)

    def dead(self) -> None:
        """Writes that the worker is dead and holds nothing: a worker on another host that is not heard any more. Called
        by the leading agent."""
        self._write(NONE, self.epoch, None, start_time=0)

    def _write(
        self,
        state: manager_pb2.WorkerState,
        epoch: int,
        identity: weights_pb2.Identity | None,
        start_time: int | None = None,
    ) -> None:
        start_time = self._start_time if start_time is None else start_time
        lineage, version, root = b"", 0, b""
        if identity is not None:
            lineage, version, root = identity.lineage.encode(), identity.version, identity.root
            if len(lineage) > LINEAGE_BYTES:
                raise ValueError(f"lineage {identity.lineage!r} is longer than {LINEAGE_BYTES} bytes")
            if len(root) != 32:
                raise ValueError(f"a root is 32 bytes, not {len(root)}")
        word = _WORD.pack(self.boot_id, self._pid, start_time, state, epoch, version, root, len(lineage), lineage)
        self._page.write_slot(self.rank, word)
        self.state, self.epoch, self.identity = state, epoch, identity


class EnginePage:
    """One engine's page, mapped. Any process of the host may read; workers write through :class:`WorkerSlot`."""

    def __init__(self, path: Path) -> None:
        """Opens the page at ``path``, and creates it if needed: a page of zeros means that no worker has started.

        Raises:
            CkptEngineError: there is no room for it.
        """
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            reserve(descriptor, path, _PAGE_BYTES)
            self._map = mmap.mmap(descriptor, _PAGE_BYTES)
        finally:
            os.close(descriptor)
        self.path = path

    def close(self) -> None:
        """Unmaps the page. The file stays."""
        self._map.close()

    def claim(self, rank: int, world_size: int) -> WorkerSlot:
        """Makes the calling process the worker of ``rank``, with a new boot id and holding nothing.

        Raises:
            ValueError: the rank is outside the world, or another worker claimed with another world size.
        """
        if not 0 <= rank < world_size <= MAX_WORKERS:
            raise ValueError(f"rank {rank} of {world_size} workers does not fit a page of {MAX_WORKERS} slots")
        size = self.world_size()
        if size not in (0, world_size):
            raise ValueError(f"worker {rank} says there are {world_size} workers, others said {size}")
        slot = WorkerSlot(self, rank, os.urandom(16))
        self._map[: _HEADER.size] = _HEADER.pack(_MAGIC, _LAYOUT, world_size)
        return slot

    def world_size(self) -> int:
        """The number of the engine's workers; 0 until one has claimed its slot."""
        magic, layout, workers = _HEADER.unpack_from(self._map, 0)
        if magic == bytes(8):
            return 0
        if magic != _MAGIC or layout != _LAYOUT or workers > MAX_WORKERS:
            raise ValueError(f"{self.path} is not a page of state words of layout {_LAYOUT}")
        return int(workers)

    def mark(self, mark: EngineMark) -> None:
        """Writes the engine's mark, four bytes. Only the agent writes it; the gate reads it at its next request."""
        sleeping = mark.sleeping
        flags = _OWN_WEIGHTS * mark.own_weights | _ROUSING * sleeping.rousing
        tags = sum(_TAG_BITS[tag] for tag in sleeping.tags)
        self._map[_MARK_OFFSET : _MARK_OFFSET + _MARK.size] = _MARK.pack(flags, sleeping.level, tags, 0)

    def marked(self) -> EngineMark:
        """Reads the engine's mark; a page without one means awake, with weights from updates."""
        flags, level, bits, _ = _MARK.unpack_from(self._map, _MARK_OFFSET)
        tags = frozenset(tag for tag, bit in _TAG_BITS.items() if bits & bit)
        sleeping = Sleeping(level, tags, bool(flags & _ROUSING)) if tags else AWAKE
        return EngineMark(bool(flags & _OWN_WEIGHTS), sleeping)

    def lease(self, until: float) -> None:
        """Writes the agent's lease. Only the agent writes it.

        until: seconds of `time.monotonic`, which processes of one host share; 0: for ever, even when the agent is dead.
        """
        self._map[_LEASE_OFFSET : _LEASE_OFFSET + _LEASE.size] = _LEASE.pack(until)

    def alone(self, now: float) -> bool:
        """Whether the agent's lease has expired; false if it has none. now: seconds of `time.monotonic`."""
        (until,) = _LEASE.unpack_from(self._map, _LEASE_OFFSET)
        return bool(until) and now > until

    def hold(self, hold: RequestHold, limits: HoldLimits) -> None:
        """Writes how the gate is to treat requests during an update. Only the agent writes it, like the mark."""
        words = (hold.epoch, hold.until, hold.closed, limits.seconds, limits.requests, limits.bytes)
        record = _HOLD.pack(*words)
        record += _CHECK.pack(zlib.crc32(record))
        self._map[_HOLD_OFFSET : _HOLD_OFFSET + len(record)] = record

    def held(self) -> tuple[RequestHold, HoldLimits]:
        """Reads the last hold; no update and the default limits if there is none, or a half-written one."""
        for _ in range(_READS_BEFORE_TORN):
            record = self._map[_HOLD_OFFSET : _HOLD_OFFSET + _HOLD.size + _CHECK.size]
            if zlib.crc32(record[: _HOLD.size]) == _CHECK.unpack(record[_HOLD.size :])[0]:
                epoch, until, closed, *limits = _HOLD.unpack(record[: _HOLD.size])
                return RequestHold(epoch, until, bool(closed)), HoldLimits(*limits)
            if not any(record):
                break
        return RequestHold(), HoldLimits()

    def keep_caches(self) -> None:
        """Counts an update over caches that stay. Only the agent calls it, when the engine has stopped computing and
        before any weight changes: so what is cached under one count was asked for before the next update."""
        self._map[_KEPT_OFFSET : _KEPT_OFFSET + _KEPT.size] = _KEPT.pack(self.caches_kept() + 1)

    def caches_kept(self) -> int:
        """How many updates were begun over caches that stay. It never falls; 0: none was."""
        (count,) = _KEPT.unpack_from(self._map, _KEPT_OFFSET)
        return int(count)

    def raw(self) -> bytes:
        """The used part of the page, possibly torn: equal bytes mean that nothing changed."""
        return self._map[: _HEADER_BYTES + self.world_size() * _SLOT_BYTES]

    def write_slot(self, rank: int, word: bytes) -> None:
        """Stores a packed word and its checksum, for :class:`WorkerSlot`."""
        start = _HEADER_BYTES + rank * _SLOT_BYTES
        self._map[start : start + len(word) + _CHECK.size] = word + _CHECK.pack(zlib.crc32(word))

    def read(self) -> list[WorkerWord]:
        """Reads every worker's word, by rank. A slot that was never claimed has an empty boot id."""
        return [self._read_slot(rank) for rank in range(self.world_size())]

    def _read_slot(self, rank: int) -> WorkerWord:
        start = _HEADER_BYTES + rank * _SLOT_BYTES
        for attempt in range(_READS_BEFORE_TORN):
            slot = self._map[start : start + _WORD.size + _CHECK.size]
            word = slot[: _WORD.size]
            if zlib.crc32(word) == _CHECK.unpack(slot[_WORD.size :])[0]:
                return _unpack(rank, word)
            if not any(slot):
                return WorkerWord(rank, b"", 0, False, NONE, 0, None)
            if attempt > 10:
                time.sleep(0.0001)  # the writer was preempted in the middle of a copy of 200 bytes
        torn = _unpack(rank, word)
        return WorkerWord(rank, torn.boot_id, torn.pid, torn.alive, DIRTY, torn.epoch, None)


def _unpack(rank: int, word: bytes) -> WorkerWord:
    boot_id, pid, start_time, state, epoch, version, root, lineage_size, lineage = _WORD.unpack(word)
    identity = None
    if state == CLEAN:
        name = lineage[:lineage_size].decode(errors="replace")
        identity = weights_pb2.Identity(lineage=name, version=version, root=root)
    alive = process_start_time(pid) == start_time
    return WorkerWord(rank, boot_id, pid, alive, state, epoch, identity)
