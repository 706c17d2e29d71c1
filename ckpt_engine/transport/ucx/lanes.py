"""What a relay has for UCX: the process that makes helpers, the helpers of each lane, and the board of lent slots.

A lane is a network device. The owner's side has one helper a lane, for all readers. The reader's side has one a lane
and owner, so that an owner that hangs costs the reads from that owner only.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import secrets
import threading
import weakref
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

from ckpt_engine.core.relay_layout import SLOTS
from ckpt_engine.transport.base import ArenaMapping
from ckpt_engine.transport.ucx import channel as c
from ckpt_engine.transport.ucx.helpers import ForkServer, Helper
from ckpt_engine.transport.ucx.settings import ucx_devices

RDMA_DEVICES = Path("/sys/class/infiniband")

IDLE = 4
"""Helpers that stay connected to owners while no link reads from them."""

_TOKEN_BYTES = 16


@dataclass(eq=False)
class Peer:
    """A helper that is connected to one of an owner's."""

    helper: Helper
    key: tuple[int, bytes]  # lane, and the owner's metadata
    links: int = 0
    failed: bool = False  # a read has failed, so the helper is not used again


@dataclass(eq=False)
class _LaneLender:
    helper: Helper
    metadata: bytes = b""


class UcxLanes:
    """UCX of one arena. Any thread. devices: one entry a lane, as UCX_NET_DEVICES has it.

    Made between the arena's mapping and its sealing. descriptor, size: of the arena; address: where this process maps
    it. reserved: bytes that each slot has taken, which is how much of it is registered; the arena sets them.

    Raises UNAVAILABLE, DEADLINE_EXCEEDED.
    """

    def __init__(self, descriptor: int, size: int, address: int, slot_bytes: int, devices: tuple[str, ...]) -> None:
        self.devices = devices
        self.address = address
        self.size = size
        self.slot_bytes = slot_bytes
        self.reserved = [0] * SLOTS
        self.tokens = [secrets.token_bytes(_TOKEN_BYTES) for _ in range(SLOTS)]
        self._lock = threading.RLock()
        self._lenders: dict[int, _LaneLender] = {}
        self._peers: OrderedDict[tuple[int, bytes], Peer] = OrderedDict()
        board = os.memfd_create("ckpt-engine ucx board", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(board, mmap.PAGESIZE)
            self._board = mmap.mmap(board, mmap.PAGESIZE, flags=mmap.MAP_SHARED)
            self._board.madvise(mmap.MADV_DONTFORK)
            fcntl.fcntl(board, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            self._server = ForkServer(descriptor, size, board)
        finally:
            os.close(board)
        _all.add(self)

    @property
    def fork_server(self) -> int:
        """The pid of the process that makes helpers."""
        return self._server.pid

    @property
    def helpers(self) -> list[int]:
        """The pids of helpers that were not killed."""
        with self._lock:
            found = [each.helper for each in self._lenders.values()]
            found += [each.helper for each in self._peers.values()]
            return [helper.pid for helper in found if not helper.killed]

    # -- the owner's side

    def lend(self, slot: int) -> None:
        """Puts the slot's token on the board, where readers find it."""
        self._board[slot * _TOKEN_BYTES : (slot + 1) * _TOKEN_BYTES] = self.tokens[slot]

    def refuse(self, slot: int) -> None:
        """Takes the slot's token off the board."""
        self._board[slot * _TOKEN_BYTES : (slot + 1) * _TOKEN_BYTES] = bytes(_TOKEN_BYTES)

    def metadata(self, slot: int) -> list[tuple[bytes, int, int]]:
        """For each lane, what readers of a slot need: the metadata of its helper's agent, and where the arena and the
        slot's token lie in that helper. Equal from call to call while no slot takes more memory and no helper ends.

        Raises UNAVAILABLE, DEADLINE_EXCEEDED.
        """
        role = c.LENDER_WRITABLE if has_rdma() else c.LENDER
        memory = self._server.writable if role == c.LENDER_WRITABLE else self._server.readable
        found = []
        with self._lock:
            for lane, devices in enumerate(self.devices):
                lender = self._lenders.get(lane)
                if lender is None or lender.helper.ended:
                    if lender is not None:
                        lender.helper.kill()
                    lender = self._lenders[lane] = _LaneLender(self._server.start(role, devices))
                start = slot * self.slot_bytes
                size = self.reserved[slot]
                if lender.helper.registered.get(start, 0) < size:
                    lender.metadata = lender.helper.register(start, size)
                found.append((lender.metadata, memory, self._server.board + slot * _TOKEN_BYTES))
        return found

    # -- the reader's side

    def peer(self, lane: int, metadata: bytes, seconds: float, answer: float) -> Peer:
        """A helper of a lane that is connected to an owner's; end its use with `release`. seconds: in all. answer:
        seconds that the owner may take.

        Raises UNAVAILABLE (the owner is gone, or its metadata is invalid), DEADLINE_EXCEEDED.
        """
        with self._lock:
            key = lane, metadata
            peer = self._peers.get(key)
            if peer is not None and (peer.failed or peer.helper.ended):
                self._end(peer)
                peer = None
            if peer is None:
                helper = self._server.start(c.READER, self.devices[lane], seconds)
                try:
                    helper.wait(helper.ask(c.CONNECT, 0, metadata), min(seconds, answer))
                except BaseException:
                    helper.kill()
                    raise
                peer = self._peers[key] = Peer(helper, key)
            self._peers.move_to_end(key)
            peer.links += 1
            return peer

    def release(self, peer: Peer, kill: bool) -> None:
        """Ends one link's use of a peer. kill: a read of it may still write; when this returns, none can."""
        with self._lock:
            peer.links -= 1
            if kill or peer.failed:
                self._end(peer)
            idle = [each for each in self._peers.values() if not each.links]
            for each in idle[: max(0, len(idle) - IDLE)]:
                self._end(each)

    def _end(self, peer: Peer) -> None:
        peer.failed = True
        peer.helper.kill()
        if self._peers.get(peer.key) is peer:
            del self._peers[peer.key]

    def close(self) -> None:
        """Ends every helper. May be repeated. Never raises."""
        _all.discard(self)
        self._server.close()  # before taking the lock, which a thread that waits for a helper may have
        with self._lock:
            self._peers.clear()
            self._lenders.clear()
            with contextlib.suppress(ValueError, BufferError):
                self._board.close()


def has_rdma() -> bool:
    """Whether this host has InfiniBand or RoCE devices, which register only writable memory."""
    try:
        return any(RDMA_DEVICES.iterdir())
    except OSError:
        return False


def lanes_on(arena: ArenaMapping, devices: tuple[str, ...] | None = None) -> UcxLanes | None:
    """UCX of an arena that is not sealed yet; None: the settings do not ask for it. devices: None: those of the
    settings. Raises as UcxLanes."""
    found = ucx_devices() if devices is None else devices
    return UcxLanes(arena.descriptor, arena.size, arena.address, arena.slot_bytes, found) if found else None


def lanes_of(address: int, length: int) -> UcxLanes | None:
    """The lanes of the arena in which memory of this process lies."""
    for each in list(_all):
        if each.address <= address and address + length <= each.address + each.size:
            return each
    return None


_all: weakref.WeakSet[UcxLanes] = weakref.WeakSet()
