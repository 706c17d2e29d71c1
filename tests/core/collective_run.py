"""A schedule carried out on numbers instead of bytes, as members do it: each goes through its own steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ckpt_engine.core.boxes import Box
from ckpt_engine.core.collective import Exchange, ExchangeStep, Schedule
from ckpt_engine.core.collective_buckets import Bucket

Elements = np.ndarray[Any, np.dtype[np.int64]]


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(map(slice, box.start, box.stop))


class StuckError(AssertionError):
    """Members wait for each other in a circle, or for one who has ended."""


class Run:
    """Rendezvous: an exchange happens when both ends have come to it, and a member stays in a step until both its
    exchanges have happened. Slots hold what the last exchange put there; nobody may write to one that is still needed.

    arrived: how often each element came to each worker, by (worker, tensor).
    """

    def __init__(self, schedule: Schedule, shapes: Sequence[tuple[int, ...]]) -> None:
        self.schedule = schedule
        self.arrived: dict[tuple[int, int], Elements] = {
            (member, tensor): np.zeros(shape, np.int64)
            for member, each in enumerate(schedule.members)
            if not each.is_source
            for tensor, shape in enumerate(shapes)
        }
        self._at = [0] * len(schedule.members)
        self._done: set[tuple[int, int, str]] = set()
        self._slots: dict[tuple[int, int], int] = {}  # (member, slot): bucket
        self._passed: set[tuple[int, int]] = set()

    def run(self, order: Sequence[int]) -> None:
        """order: in which members are looked at again and again."""
        while any(self._step(member) is not None for member in order):
            moved = [self._advance(member) for member in order]
            if not any(moved):
                raise StuckError({member: self._step(member) for member in order})

    def _step(self, member: int) -> ExchangeStep | None:
        steps = self.schedule.steps[member]
        return steps[self._at[member]] if self._at[member] < len(steps) else None

    def _advance(self, member: int) -> bool:
        step = self._step(member)
        if step is None:
            return False
        before = len(self._done)
        if step.send is not None and (member, step.round, "send") not in self._done:
            self._meet(member, step, step.send)
        wanted = [name for name in ("send", "receive") if getattr(step, name) is not None]
        if all((member, step.round, name) in self._done for name in wanted):
            self._at[member] += 1
            return True
        return len(self._done) > before

    def _meet(self, member: int, step: ExchangeStep, send: Exchange) -> None:
        there = self._step(send.peer)
        if there is None or there.round != step.round:
            return  # the peer is not there yet, or does something else first
        receive = there.receive
        assert receive is not None, (member, send)
        assert (receive.peer, receive.bucket, receive.bytes) == (member, send.bucket, send.bytes)
        bucket = self.schedule.buckets[send.bucket]
        self._take(member, send, bucket)
        self._put(send.peer, receive, bucket)
        self._done |= {(member, step.round, "send"), (send.peer, step.round, "receive")}

    def _take(self, member: int, send: Exchange, bucket: Bucket) -> None:
        if member == bucket.chain[0]:
            self._slots[member, send.slot] = send.bucket
        assert self._slots[member, send.slot] == send.bucket, "it would send what is not there any more"
        self._passed.add((member, send.bucket))

    def _put(self, member: int, receive: Exchange, bucket: Bucket) -> None:
        before = self._slots.get((member, receive.slot))
        if before is not None and self.schedule.buckets[before].chain[-1] != member:
            assert (member, before) in self._passed, "it would write over what is still to be passed on"
        self._slots[member, receive.slot] = receive.bucket
        for piece in bucket.pieces:
            self.arrived[member, piece.tensor][slices(piece.box)] += 1
