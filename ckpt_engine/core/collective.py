"""The schedule of a collective: in which round each member sends and receives which bucket. Pure.

Every member computes, or is given, the same schedule: it is a function of the wants alone. In a round a member sends
at most one bucket and receives at most one, both at once (one group), so that links are used in both directions.
Members take their rounds in the same order and pair up in them, so they cannot deadlock. A bucket passes its chain hop
by hop, each in a later round than the one before, while the next buckets follow.

The schedule also decides where bytes rest meanwhile: each member has a few slots of one bucket each, and a bucket is
sent only to a member with a free slot. So a collective's memory is known before it begins.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ckpt_engine.core.collective_buckets import BUCKET_BYTES, BoxWant, Bucket, cut_buckets
from ckpt_engine.core.problems import internal, invalid

SLOTS = 2
"""Buffers of a member: one that the network works on, one that is packed or unpacked meanwhile."""


@dataclass(frozen=True, slots=True)
class CollectiveMember:
    """One process of a collective."""

    name: str  # as messages name it: "rank 0", "worker 1 of replica a"
    host: str  # members of one host are near each other
    is_source: bool
    gpu: bytes = b""  # the UUID of the GPU that its buffers are on; empty: a CPU


class Exchange(NamedTuple):
    """One bucket, sent to or received from one peer."""

    peer: int  # a member, by number
    bucket: int  # its number
    slot: int  # of this member, where the bucket lies
    bytes: int


class ExchangeStep(NamedTuple):
    """What a member does in one round: it sends and receives at once."""

    round: int
    send: Exchange | None
    receive: Exchange | None


@dataclass(frozen=True)
class Schedule:
    """Which member sends which bucket to which other in which round, and the memory that this takes."""

    members: tuple[CollectiveMember, ...]  # of the communicator, in the order of their ranks in it
    buckets: tuple[Bucket, ...]
    steps: tuple[tuple[ExchangeStep, ...], ...]  # of each member, by round
    slots: tuple[int, ...]  # how many each member uses
    slot_bytes: int  # of one slot

    def memory(self, member: int) -> int:
        """Bytes of buffers that a member holds for as long as it is ready."""
        return self.slots[member] * self.slot_bytes

    def sent(self, member: int) -> int:
        """Bytes that a member sends in all."""
        return sum(step.send.bytes for step in self.steps[member] if step.send is not None)

    def received(self, member: int) -> int:
        """Bytes that a member receives in all."""
        return sum(step.receive.bytes for step in self.steps[member] if step.receive is not None)


def arrange(members: Iterable[CollectiveMember]) -> tuple[CollectiveMember, ...]:
    """Sorts members by their ranks: sources first, then workers. Workers of one host are next to each other, and those
    on sources' hosts come first. Chains follow this order, so a bucket enters each host once.

    Raises INVALID_ARGUMENT if two have one name or one GPU: a communicator takes each GPU once.
    """
    found = list(members)
    near = {member.host for member in found if member.is_source}
    found.sort(key=lambda each: (not each.is_source, each.host not in near, each.host, each.name))
    names: set[str] = set()
    gpus: dict[bytes, str] = {}
    for member in found:
        if member.name in names:
            raise invalid(f"{member.name} is in the collective twice")
        names.add(member.name)
        if member.gpu and member.gpu in gpus:
            raise invalid(
                f"{gpus[member.gpu]} and {member.name} are on one GPU, and a communicator takes each GPU once; "
                "let them share its memory (CUDA IPC)"
            )
        gpus[member.gpu] = member.name
    return tuple(found)


def make_schedule(
    members: Sequence[CollectiveMember],
    wants: Iterable[BoxWant],
    widths: Sequence[int],
    bucket_bytes: int = BUCKET_BYTES,
    slots: int = SLOTS,
) -> Schedule:
    """Makes the schedule that brings every want to its worker. members: as `arrange` returns them.

    widths: bytes of an element of each tensor, in the served dtype. slots: of each member, at most; at least 2.
    Raises INVALID_ARGUMENT for a want of a member that does not exist, whose worker is a source or whose source is not
    one.
    """
    if slots < 2:
        raise invalid(f"{slots} slots are too few: one is packed while another one is sent, so give at least 2")
    all_wants = list(wants)
    for want in all_wants:
        if not (0 <= want.source < len(members) and 0 <= want.worker < len(members)):
            raise invalid(f"member {want.worker} wants something of member {want.source}, but there are {len(members)}")
        if not members[want.source].is_source or members[want.worker].is_source:
            raise invalid(
                f"{members[want.worker].name} wants something of {members[want.source].name}: workers want, and "
                "sources send"
            )
    streams = cut_buckets(all_wants, widths, bucket_bytes)
    rounds = _Rounds(len(members), streams, slots)
    rounds.run()
    return Schedule(
        members=tuple(members),
        buckets=tuple(rounds.buckets),
        steps=tuple(tuple(steps) for steps in rounds.steps),
        slots=tuple(len(slots) for slots in rounds.used),
        slot_bytes=max((bucket.bytes for bucket in rounds.buckets), default=0),
    )


class _ChainBuckets:
    """The buckets of one chain that its source has not sent yet, by number."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self.waiting = deque(numbers)
        self._all = len(numbers)

    @property
    def done(self) -> float:
        """The share that was sent; streams of one source advance alike."""
        return 1 - len(self.waiting) / self._all


class _Rounds:
    """Fills rounds one by one. Members that pass a bucket on go first, so that slots become free."""

    def __init__(self, members: int, streams: Sequence[Sequence[Bucket]], slots: int) -> None:
        self.buckets = [bucket for stream in streams for bucket in stream]
        self.steps: list[list[ExchangeStep]] = [[] for _ in range(members)]
        self.used: list[set[int]] = [set() for _ in range(members)]
        self._members = members
        self._streams: list[list[_ChainBuckets]] = [[] for _ in range(members)]
        first = 0
        for stream in streams:
            self._streams[stream[0].chain[0]].append(_ChainBuckets(range(first, first + len(stream))))
            first += len(stream)
        self._held: list[deque[int]] = [deque() for _ in range(members)]  # buckets that wait to be passed on
        self._place: dict[tuple[int, int], tuple[int, int]] = {}  # (member, bucket): slot, round it came in
        self._free: list[list[int]] = [[0] * slots for _ in range(members)]  # first round in which a slot may be used
        self._remaining = sum(len(bucket.chain) - 1 for bucket in self.buckets)

    def run(self) -> None:
        """Makes rounds until every bucket is at the end of its chain."""
        number = idle = 0
        while self._remaining:
            before = self._remaining
            self._round(number)
            idle = idle + 1 if self._remaining == before else 0
            if idle > 2:
                raise internal(f"a schedule stalled in round {number} with {self._remaining} exchanges left")
            number += 1

    def _round(self, number: int) -> None:
        sends: dict[int, Exchange] = {}
        receives: dict[int, Exchange] = {}
        for sender in reversed(range(self._members)):
            for queue in self._queues(sender):
                bucket = next(
                    (each for each in self._heads(sender, queue, number) if self._can(each, sender, number, receives)),
                    None,
                )
                if bucket is not None:
                    queue.remove(bucket)
                    self._move(bucket, sender, number, sends, receives)
                    break
        for member in sorted({*sends, *receives}):
            self.steps[member].append(ExchangeStep(number, sends.get(member), receives.get(member)))

    def _queues(self, sender: int) -> list[deque[int]]:
        streams = sorted((stream for stream in self._streams[sender] if stream.waiting), key=lambda each: each.done)
        return [self._held[sender], *(stream.waiting for stream in streams)]

    def _heads(self, sender: int, queue: deque[int], number: int) -> list[int]:
        """The entries of a queue that may go now: the first one of a stream; of the held ones, any that came before
        this round."""
        if queue is not self._held[sender]:
            return [queue[0]]
        return [bucket for bucket in queue if self._place[sender, bucket][1] < number]

    def _next(self, bucket: int, sender: int) -> int:
        chain = self.buckets[bucket].chain
        return chain[chain.index(sender) + 1]

    def _can(self, bucket: int, sender: int, number: int, receives: dict[int, Exchange]) -> bool:
        receiver = self._next(bucket, sender)
        return receiver not in receives and min(self._free[receiver]) <= number

    def _move(
        self, bucket: int, sender: int, number: int, sends: dict[int, Exchange], receives: dict[int, Exchange]
    ) -> None:
        receiver, size = self._next(bucket, sender), self.buckets[bucket].bytes
        if (sender, bucket) in self._place:
            sender_slot, arrival = self._place.pop((sender, bucket))
            # Unpacked in the round after it came, at the earliest.
            self._free[sender][sender_slot] = max(number, arrival + 1) + 1
        else:
            sender_slot = self._oldest(sender)  # free: packed in the round before, while the other slot is sent
            self._free[sender][sender_slot] = number + 1
        receiver_slot = self._oldest(receiver)
        is_last = self.buckets[bucket].chain[-1] == receiver
        self._free[receiver][receiver_slot] = number + 2 if is_last else _NEVER
        if not is_last:
            self._place[receiver, bucket] = receiver_slot, number
            self._held[receiver].append(bucket)
        self.used[sender].add(sender_slot)
        self.used[receiver].add(receiver_slot)
        sends[sender] = Exchange(receiver, bucket, sender_slot, size)
        receives[receiver] = Exchange(sender, bucket, receiver_slot, size)
        self._remaining -= 1

    def _oldest(self, member: int) -> int:
        """The slot that has been free longest."""
        free = self._free[member]
        return free.index(min(free))


_NEVER = 1 << 62
