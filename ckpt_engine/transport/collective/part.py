"""One member's part of a schedule: which copies fill a bucket, and where in its memory the parts of a bucket belong.

It decides nothing and moves nothing: `on_host.py` and `on_gpu.py` do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Protocol, TypeVar

import torch

from ckpt_engine.copy.host_copy import Pair
from ckpt_engine.core.boxes import Box
from ckpt_engine.core.collective import Exchange, Schedule
from ckpt_engine.core.problems import invalid

Places = Callable[[int, Box], Sequence[torch.Tensor]]
"""Finds memory: a tensor's index in the manifest and a box to the memory of this member that holds it, each of the
box's shape: of a source one, in any dtype that casts to the served one; of a worker all places where it belongs."""


class Copies(Protocol):
    """Prepared copies of some pairs."""

    @property
    def bytes(self) -> int:
        """Bytes of all of them."""
        ...


Work = TypeVar("Work", bound=Copies)


class MemberPart:
    """What one member sends, receives, packs and unpacks. slots: uint8[slot_bytes] each."""

    def __init__(
        self,
        schedule: Schedule,
        member: int,
        slots: Sequence[torch.Tensor],
        dtypes: Sequence[torch.dtype],
    ) -> None:
        """dtypes: of each tensor, as it is served."""
        self.schedule = schedule
        self.member = member
        self.steps = schedule.steps[member]
        self.slots = slots
        self._dtypes = dtypes

    def name(self, member: int) -> str:
        """A member as messages name it."""
        return self.schedule.members[member].name

    def view(self, exchange: Exchange) -> torch.Tensor:
        """The bytes of a slot that an exchange sends or fills."""
        return self.slots[exchange.slot][: exchange.bytes]

    def copies(
        self, prepare: Callable[[list[Pair]], Work], places: Places
    ) -> tuple[dict[int, Work], dict[int, Work], int]:
        """Prepares packing and unpacking, by round; also the bytes that one run unpacks, or packs.

        prepare: makes copies of pairs.

        Raises INVALID_ARGUMENT if the memory that `places` names has another shape than its box."""
        packs = {
            step.round: prepare(pairs)
            for step in self.steps
            if step.send is not None and (pairs := self._packing(step.send, places))
        }
        unpacks = {
            step.round: prepare(self._unpacking(step.receive, places))
            for step in self.steps
            if step.receive is not None
        }
        return packs, unpacks, sum(work.bytes for work in (unpacks or packs).values())

    def _packing(self, exchange: Exchange, places: Places) -> list[Pair]:
        """The copies that fill the slot before it is sent; none if its bytes were received."""
        if self.schedule.buckets[exchange.bucket].chain[0] != self.member:
            return []
        found = []
        for slot, memory in self._both(exchange, places):
            if len(memory) != 1:
                raise invalid(f"{self.name(self.member)} names {len(memory)} places for what it sends, and not one")
            found.append((slot, memory[0]))
        return found

    def _unpacking(self, exchange: Exchange, places: Places) -> list[Pair]:
        """The copies from the slot to where received bytes belong."""
        return [(place, slot) for slot, memory in self._both(exchange, places) for place in memory]

    def _both(self, exchange: Exchange, places: Places) -> list[tuple[torch.Tensor, Sequence[torch.Tensor]]]:
        found = []
        for tensor, box, offset in self.schedule.buckets[exchange.bucket].pieces:
            dtype = self._dtypes[tensor]
            size = prod(box.shape) * dtype.itemsize
            slot = self.slots[exchange.slot][offset : offset + size].view(dtype).view(box.shape)
            memory = places(tensor, box)
            for each in memory:
                if tuple(each.shape) != box.shape:
                    raise invalid(f"{box} of tensor {tensor} lies in memory of shape {list(each.shape)}")
            found.append((slot, memory))
        return found


def held_boxes(held: Sequence[tuple[int, Box, torch.Tensor]]) -> Places:
    """`Places` of a member that holds these boxes: (tensor, box, memory of the box's shape).

    What it returns raises INVALID_ARGUMENT for a box that none of them contains.
    """
    of_tensor: dict[int, list[tuple[Box, torch.Tensor]]] = {}
    for tensor, box, memory in held:
        of_tensor.setdefault(tensor, []).append((box, memory))

    def places(tensor: int, box: Box) -> list[torch.Tensor]:
        found = []
        for whole, memory in of_tensor.get(tensor, ()):
            if all(a <= b for a, b in zip(whole.start, box.start, strict=True)) and all(
                b <= a for a, b in zip(whole.stop, box.stop, strict=True)
            ):
                inside = tuple(
                    slice(first - base, last - base)
                    for first, last, base in zip(box.start, box.stop, whole.start, strict=True)
                )
                found.append(memory[inside])
        if not found:
            raise invalid(f"nothing holds {box} of tensor {tensor} here")
        return found

    return places
