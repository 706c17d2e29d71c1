"""The ways in which the slots of an arena are lent: to processes of the host, and to relays of other hosts. Any thread.

Decides nothing about when. A way that cannot be offered is left out; the others go on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Sequence

from ckpt_engine.core.offers import region_offered
from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.core.rates import Rate
from ckpt_engine.core.relay_layout import Group
from ckpt_engine.core.transports import arena_kinds, make, relay_transport
from ckpt_engine.relay.arena import Arena
from ckpt_engine.relay.door import ArenaDoor
from ckpt_engine.transport.base import ArenaLender, Network, PassesOn, Passing
from ckpt_engine.v1.weights_pb2 import OfferedRegion, Region

log = logging.getLogger("ckpt_engine.relay")


class Ways:
    """All ways in which one relay lends its slots.

    transports: that this relay uses. slot_grace, users: see Door. network: where relays of other hosts find it;
    None: they do not. names: of the transports over which it is read. Raises as Door and lenders between relays.
    """

    def __init__(
        self,
        arena: Arena,
        transports: Collection[str],
        slot_grace: float,
        users: Collection[int],
        network: Network | None,
    ) -> None:
        self._door = ArenaDoor(arena, slot_grace, users)
        self._lenders: list[ArenaLender] = []
        self.names: tuple[str, ...] = (relay_transport(),)
        try:
            for kind in arena_kinds() if network is not None else ():
                if kind.name in transports:
                    assert kind.arena is not None, kind.name
                    self._lenders.append(make(kind.arena, arena.lendable(), network))
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
        return self._door.readers + sum(lender.readers for lender in self._lenders)

    @property
    def passes_on(self) -> Region | None:
        """Where other relays ask for what is being filled; None: they cannot."""
        return next((each.passes_on for each in self._lenders if isinstance(each, PassesOn)), None)

    def pass_on(
        self,
        slot: int,
        key: bytes,
        chunks: Sequence[Sequence[tuple[int, int]]],
        passed: Callable[[Rate], None] = lambda rate: None,
    ) -> Passing | None:
        """Lends a slot while it is being filled; None if that is not possible. See PassesOn."""
        found = next((each for each in self._lenders if isinstance(each, PassesOn)), None)
        return None if found is None else found.pass_on(slot, key, chunks, passed)

    def regions(self, slot: int, groups: Sequence[Group]) -> list[OfferedRegion]:
        """A region for each group, with every way in which it can be lent now."""
        return [
            region_offered([near, *self._far(near.id, slot, group)])
            for near, group in zip(self._door.regions(slot, groups), groups, strict=True)
        ]

    def lend(self, slot: int) -> None:
        """Lets a slot be read from now on."""
        self._door.lend(slot)
        for lender in self._lenders:
            lender.lend(slot)

    def retire(self, slot: int) -> int:
        """Waits for readers of a slot, of this host and others. Returns how many were overruled."""
        for lender in self._lenders:
            lender.refuse(slot)
        return self._door.retire(slot) + sum(lender.retire(slot) for lender in self._lenders)

    def close(self) -> None:
        """Ends all leases. May be repeated."""
        self._door.close()
        for lender in self._lenders:
            lender.close()

    def _far(self, id: int, slot: int, group: Group) -> Iterator[Region]:
        for lender in self._lenders:
            try:
                yield lender.offer(id, slot, group.offset, group.size)
            except CkptEngineError as error:
                log.warning("a region of slot %d is not lent in every way: %s", slot, error.problem.message)
