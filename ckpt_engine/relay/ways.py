"""The two ways in which the slots of an arena are lent: mapped by processes of the host, and by chunks to relays of
other hosts. Any thread.

Decides nothing about when.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ckpt_engine.core.offers import region_offered
from ckpt_engine.core.relay_layout import Group
from ckpt_engine.core.transports import chunk_kinds, make, relay_transport
from ckpt_engine.relay.arena import Arena
from ckpt_engine.relay.door import ArenaDoor
from ckpt_engine.transport.base import ChunkLender, ChunkLending, LentChunks, Network
from ckpt_engine.v1.weights_pb2 import OfferedRegion


class Ways:
    """Both ways of one relay. slot_grace, users: see ArenaDoor. network: where relays of other hosts find it; None:
    they do not. names: of the transports over which it is read. Raises as ArenaDoor and ChunkLender."""

    def __init__(self, arena: Arena, slot_grace: float, users: Collection[int], network: Network | None) -> None:
        self._door = ArenaDoor(arena, slot_grace, users)
        self._lender: ChunkLender | None = None
        self.chunks: OfferedRegion | None = None
        """Where relays of other hosts ask for chunks; None: they do not reach it."""
        self.names: tuple[str, ...] = (relay_transport(),)
        try:
            kind = next(iter(chunk_kinds()), None)
            if network is not None and kind is not None and kind.chunks is not None:
                lender: ChunkLender = make(kind.chunks, arena.lendable(), network)
                self._lender = lender
                carried = [carrier.region for carrier in arena.carriers]
                self.chunks = region_offered([lender.chunks, *carried])
                self.names = (*self.names, kind.name)
        except BaseException:
            self.close()
            raise

    @property
    def directory(self) -> str:
        """The identity of the relays' directory, as in Host.relay_directory."""
        return self._door.directory

    @property
    def readers(self) -> int:
        """Processes that map it now, and connections of other relays."""
        return self._door.readers + (self._lender.readers if self._lender is not None else 0)

    def lend_chunks(self, lent: LentChunks) -> ChunkLending | None:
        """Lends a slot to other relays from the begin of its filling; None: none reaches it."""
        return None if self._lender is None else self._lender.lend(lent)

    def regions(self, slot: int, groups: Sequence[Group]) -> list[OfferedRegion]:
        """A region for each group, as processes of this host map it."""
        return [region_offered([near]) for near in self._door.regions(slot, groups)]

    @property
    def uses_changes(self) -> bool:
        """Whether a process of this host can install by what differs between the slots."""
        return self._door.uses_changes

    def lend_changes(self, changes: int | str) -> None:
        """Lets processes of this host have what differs between the slots; see `ArenaDoor.lend_changes`."""
        self._door.lend_changes(changes)

    def lend(self, slot: int) -> None:
        """Lets processes of this host read a slot from now on."""
        self._door.lend(slot)

    def retire(self, slot: int) -> int:
        """Waits for readers of a slot, of this host and others. Returns how many were overruled."""
        if self._lender is None:
            return self._door.retire(slot)
        self._lender.refuse(slot)
        return self._door.retire(slot) + self._lender.retire(slot)

    def close(self) -> None:
        """Ends all leases. May be repeated."""
        self._door.close()
        if self._lender is not None:
            self._lender.close()
