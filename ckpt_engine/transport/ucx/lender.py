"""The owner's side of UCX: one arena, lent to relays of other hosts. See base.ArenaLender."""

from __future__ import annotations

from ckpt_engine.core.problems import unavailable
from ckpt_engine.transport.base import ArenaMemory, Network
from ckpt_engine.transport.ucx.lanes import lanes_of
from ckpt_engine.transport.ucx.settings import UCX
from ckpt_engine.v1.ucx_pb2 import UcxLocator
from ckpt_engine.v1.weights_pb2 import Region


class UcxLender:
    """Lends an arena over UCX. Any thread.

    Readers read without telling this process. So `retire` does not wait: bytes that were still being read do not hash,
    and are read from another holder.

    Raises UNAVAILABLE if the arena was made without UCX, or with NIXL's message: helpers are started at once, so that
    an invalid device is found here and not in the first update.
    """

    def __init__(self, arena: ArenaMemory, network: Network) -> None:
        lanes = lanes_of(arena.bytes.data_ptr(), arena.bytes.nbytes)
        if lanes is None:
            raise unavailable("this relay's memory was not made for UCX: start it with --ucx-devices")
        self._lanes = lanes
        self._arena = arena
        lanes.metadata(0)

    def offer(self, id: int, slot: int, offset: int, size: int) -> Region:
        """The region that lets other relays read it. Registers all memory that the slot has taken.

        Raises UNAVAILABLE with NIXL's message, DEADLINE_EXCEEDED.
        """
        found = self._lanes.metadata(slot)
        locator = UcxLocator(
            arena=self._arena.id,
            slot=slot,
            offset=slot * self._arena.slot_bytes + offset,
            token=self._lanes.tokens[slot],
            lanes=[UcxLocator.Lane(metadata=data, memory=memory, board=board) for data, memory, board in found],
        )
        return Region(id=id, transport=UCX, size=size, locator=locator.SerializeToString(deterministic=True))

    @property
    def readers(self) -> int:
        """0: the owner's side does not know its readers."""
        return 0

    def lend(self, slot: int) -> None:
        """Lets readers begin to read the slot."""
        self._lanes.lend(slot)

    def refuse(self, slot: int) -> None:
        """Refuses readers that begin to read from now on."""
        self._lanes.refuse(slot)

    def retire(self, slot: int) -> int:
        """Refuses as `refuse` does. Returns 0."""
        self._lanes.refuse(slot)
        return 0

    def close(self) -> None:
        """Ends the helpers, and with them every key to this memory. May be repeated. Never raises."""
        self._lanes.close()
