"""A relay's memory that lends chunks over TCP, and askers of it, in one process."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from types import TracebackType
from typing import Self

import numpy as np
import torch

from ckpt_engine.core.offers import region_offered
from ckpt_engine.core.rates import Rate
from ckpt_engine.relay.arena import Arena
from ckpt_engine.transport.base import ChunkAsk, ChunkRuns, DeltaSource, LentChunks, Network
from ckpt_engine.transport.tcp.asker import TcpAsker
from ckpt_engine.transport.tcp.lending import TcpLending
from ckpt_engine.transport.tcp.server import TcpChunkLender
from ckpt_engine.transport.ucx.lanes import lanes_on
from ckpt_engine.v1.relay_pb2 import TcpLocator
from ckpt_engine.v1.weights_pb2 import OfferedRegion

KEY = b"k" * 16

LOOPBACK = Network("127.0.0.1:0", "127.0.0.1", 5.0)

CHUNKS: Sequence[ChunkRuns] = (
    [(0, 1 << 20)],
    [(1 << 20, 1), ((1 << 20) + 7, 300), ((1 << 20) + 4096, 70_000), ((1 << 20) + 80_000, 3)],
    [((2 << 20) + 100 * number, 64) for number in range(3000)],
    [(3 << 20, 9 << 20), (12 << 20, 5)],
)
"""Long runs, short ones, many, and some of both."""

SLOT_BYTES = 16 << 20

RANDOM = torch.frombuffer(bytearray(random.Random(5).randbytes(SLOT_BYTES)), dtype=torch.uint8)


class Owner:
    """Memory of two slots, full of random bytes, and its lender. devices: UCX's; none: without UCX."""

    def __init__(self, network: Network = LOOPBACK, devices: tuple[str, ...] = ()) -> None:
        carriers = [partial(lanes_on, devices=devices)] if devices else []
        self.arena = Arena(2 * SLOT_BYTES, carriers=carriers)
        for slot in range(2):
            self.arena.reserve(slot, SLOT_BYTES, "a test")
            self.slot(slot).copy_(RANDOM.roll(slot))
        self.lender = TcpChunkLender(self.arena.lendable(), network)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.lender.close()
        self.arena.close()

    def slot(self, number: int) -> torch.Tensor:
        return self.arena.tensor(number, 0, (SLOT_BYTES,), torch.uint8)

    def lend(
        self,
        slot: int = 0,
        key: bytes = KEY,
        verified: Collection[int] = range(len(CHUNKS)),
        chunks: Sequence[ChunkRuns] = CHUNKS,
        passed: Callable[[Rate], None] = lambda rate: None,
        deltas: DeltaSource | None = None,
    ) -> TcpLending:
        lending = self.lender.lend(LentChunks(slot, key, chunks.__getitem__, range(len(chunks)), passed, deltas))
        for chunk in verified:
            lending.verified(chunk)
        return lending

    @property
    def offered(self) -> OfferedRegion:
        return region_offered([self.lender.chunks, *(each.region for each in self.arena.carriers)])

    @property
    def locator(self) -> TcpLocator:
        return TcpLocator.FromString(self.lender.chunks.locator)

    @property
    def held(self) -> int:
        """Askers that hold slot 0."""
        lending = self.lender._lendings._slots.get(0)
        return len(lending.held) if lending is not None else 0


class Asking:
    """An asker, and a slot in which chunks land. landing: None: memory of its own."""

    def __init__(
        self,
        offered: OfferedRegion,
        name: str = "relay far",
        key: bytes = KEY,
        landing: torch.Tensor | None = None,
    ) -> None:
        own = torch.from_numpy(np.zeros(SLOT_BYTES, np.uint8))  # taken as it is written
        self.landing = own if landing is None else landing
        self.asker = TcpAsker(offered, "relay near", name, time.monotonic() + 10)
        self.asker.begin(key, 0, self.landing.numpy().data)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.asker.close()

    def get(self, chunk: int, how: ChunkAsk = ChunkAsk.WAIT, runs: ChunkRuns | None = None) -> str:
        """Asks for a chunk, and receives the answer."""
        self.asker.ask(chunk, how)
        return self.receive(chunk, runs)

    def receive(self, chunk: int, runs: ChunkRuns | None = None) -> str:
        return self.asker.receive(chunk, CHUNKS[chunk] if runs is None else runs, lambda: None).relay

    def has(self, chunk: int, slot: torch.Tensor, chunks: Sequence[ChunkRuns] = CHUNKS) -> bool:
        """Whether a chunk lies here as it lies in a slot of the owner."""
        return all(torch.equal(self.landing[at : at + size], slot[at : at + size]) for at, size in chunks[chunk])


def changed(offered: OfferedRegion, addresses: Sequence[str] | None = None, **fields: bytes) -> OfferedRegion:
    """The same region with other fields in its locator."""
    found = OfferedRegion.FromString(offered.SerializeToString())
    locator = TcpLocator.FromString(found.offers[0].locator)
    if addresses is not None:
        locator.addresses[:] = addresses
    for name, value in fields.items():
        setattr(locator, name, value)
    found.offers[0].locator = locator.SerializeToString(deterministic=True)
    return found
