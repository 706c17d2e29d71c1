"""Decides which relay a filling asks for which chunk next, by what others have answered. Pure: it asks nothing, waits
for nothing, and knows no clock; the same code decides in production (asking.py) and simulated (benchmarks/fan_out).

- A chunk is asked of the relays before this one in the order of the version's table (core/chunk_order.py), then of an
  origin, which sends it or names the relay that brings it. Each relay is asked for its chunks in rising order, a few
  at a time, and answers in the order of the questions.
- A relay that has failed is not asked again in this filling; its chunks are asked of others.
- A relay that is so far behind that a quarter of all chunks of relays have come since the oldest one that it owes is
  left, if it is the one that brings that chunk from the origin. With little else to ask, chunks that wait for the relay
  that owes most are asked of the next in their order. So a slow relay that is not known as one does not set the pace.
- A chunk that no relay in the order brings is *stranded*. It is asked of every relay from time to time, for those that
  have it by then: none of these questions waits.

A question that waits goes to a relay before this one, to an origin, or to a relay that an origin has named, which
itself asks only the origin. So relays never wait for each other in a circle.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from ckpt_engine.core.chunk_order import ChunkOrder, ChunkRelay
from ckpt_engine.transport.base import ChunkAsk
from ckpt_engine.v1.manager_pb2 import WantTable

AHEAD = 2
"""Chunks that are asked of one relay at a time: one comes while the next one is asked for."""

ENOUGH = 4
"""Questions. While fewer are open, chunks that wait for the relay that owes most are asked of others."""

BEHIND = 0.25
"""Of the chunks that relays are asked for: a relay that is further behind than this is left."""

SURE_SECONDS = 0.5
"""From the first chunk until a relay counts as slow: before that it may just have begun, and delays others little."""

Question = tuple[int, ChunkAsk]
"""A chunk, and how it is asked for."""


@dataclass(slots=True)
class Trail:
    """The relays that are left to ask for one chunk that has not come."""

    order: tuple[str, ...]  # to ask before an origin
    origins: tuple[str, ...]
    first: str = ""  # the relay that brings the chunk from the origin, if this one begins by asking that
    rank: int = -1  # of the chunk among those that relays before this one are asked for; -1: it is none of these
    named: str = ""  # the relay to which an origin has sent us
    tried: frozenset[str] = frozenset()  # relays that have said no, or failed


def trails_of(
    order: ChunkOrder, own: Collection[int], origins: Sequence[tuple[str, Collection[int]]], name: str
) -> Callable[[Iterable[int]], dict[int, Trail]]:
    """From chunks to their trails: relays before this one for those that are its `own` in the order, then origins, each
    chunk beginning with another origin. origins: with the chunks that each has, without this relay."""

    def trails(numbers: Iterable[int]) -> dict[int, Trail]:
        found: dict[int, Trail] = {}
        ranked = 0
        for number in sorted(numbers):
            before = order.before(name, number) if number in own else ()
            holders = tuple(each for each, chunks in origins if number in chunks)
            turn = number % len(holders) if holders else 0
            found[number] = trail = Trail(before, holders[turn:] + holders[:turn])
            if before:
                trail.rank, ranked = ranked, ranked + 1
                trail.first = before[0] if before[0] == order.first(number) else ""
        return found

    return trails


@dataclass(frozen=True)
class ChunkTable:
    """The relays of a version, as one of them sees it."""

    name: str  # of this relay
    sizes: Sequence[int]  # bytes of each chunk
    sets: Sequence[Collection[int]]  # the chunks of each of the table's `wants`
    table: WantTable

    @cached_property
    def _order(self) -> ChunkOrder:
        relays = [
            ChunkRelay(each.relay, each.wants, 0.0 if each.leaf else 1.0)
            for each in self.table.relays
            if not each.origin
        ]
        return ChunkOrder(self.sizes, self.sets, relays)

    @property
    def is_leaf(self) -> bool:
        """Whether this relay passes nothing on."""
        return any(each.leaf for each in self.table.relays if each.relay == self.name)

    def trails(self, numbers: Iterable[int]) -> dict[int, Trail]:
        """For each of these chunks the relays to ask. Raises INVALID_ARGUMENT for a table that contradicts itself."""
        others = sorted((each.relay, each.wants) for each in self.table.relays if each.origin)
        origins = [(name, self.sets[wants]) for name, wants in others if name != self.name]
        mine = [each.wants for each in self.table.relays if each.relay == self.name and not each.origin]
        own = frozenset(self.sets[mine[0]]) if mine else frozenset[int]()
        return trails_of(self._order, own, origins, self.name)(numbers)


class ChunkSearch:
    """The search for the chunks of one filling. One thread at a time.

    name: of this relay. trails: by chunk. relays: those that can be asked. is_leaf: nothing is passed on from here, so
    an origin must not send others here. wake: called with the name of a relay for which a question was queued.
    strand: called with a chunk that no relay in its order brings.
    """

    def __init__(
        self,
        name: str,
        trails: dict[int, Trail],
        relays: Collection[str],
        is_leaf: bool,
        wake: Callable[[str], None],
        strand: Callable[[int], None],
    ) -> None:
        self._name, self._relays, self._is_leaf = name, relays, is_leaf
        self._wake, self._strand = wake, strand
        self.remaining = trails  # chunks that have not come
        self.failed: dict[str, str] = {}  # relays that are not asked again, and why
        self.answers: dict[int, str] = {}  # by chunk, the last reason why it did not come
        self._queues: dict[str, list[Question]] = {}  # by relay, a heap
        self._open: dict[str, deque[Question]] = {}  # by relay, the questions that it was asked, the oldest first
        self._open_count = 0
        self._ranked = sum(each.rank >= 0 for each in trails.values())
        self._come = 0  # of the chunks with a rank
        self._stranded: dict[int, deque[str]] = {}  # with the relays to ask now
        self._asked_now: set[int] = set()  # those of them that a relay is asked for
        self._refusals: dict[int, set[str]] = {}  # by chunk, relays that will not have it, as far as they know

    @property
    def is_stranded(self) -> bool:
        """Whether no relay in the order brings any of the chunks that are left."""
        return len(self._stranded) == len(self.remaining)

    @property
    def is_hopeless(self) -> bool:
        """Whether no relay that can be asked will have any of the chunks that are stranded."""
        living = frozenset(self._living())
        return all(living <= self._refusals.get(number, set()) for number in self._stranded)

    def owes(self, name: str) -> list[int]:
        """The chunks that a relay is asked for, or is to be."""
        return [number for number, _ in (*self._open.get(name, ()), *self._queues.get(name, ()))]

    def open(self, name: str) -> Sequence[Question]:
        """The questions that a relay was asked and has not answered, the oldest first."""
        return self._open.get(name, ())

    # -- what comes of it

    def start(self) -> None:
        """Queues the first question of each chunk."""
        for number in self.remaining:
            self._place(number)

    def also(self, numbers: Iterable[int]) -> None:
        """Searches for more chunks: sources were to bring them, and could not. Only for what relays have by now: they
        may be waiting for this one, which is an origin of these chunks, and would wait in a circle."""
        for number in sorted(numbers):
            self.remaining[number] = Trail((), ())
            self._place(number)

    def ask(self, name: str) -> Question | None:
        """The next question to a relay, which is open from now on; None: none waits, or enough are open."""
        queue, open_questions = self._queues.get(name, []), self._open.setdefault(name, deque())
        while queue and len(open_questions) < AHEAD:
            question = heapq.heappop(queue)
            if question[0] in self.remaining:
                open_questions.append(question)
                self._open_count += 1
                return question
        return None

    def came(self, name: str, number: int, seconds: float) -> None:
        """Takes that a relay has sent the chunk of its oldest question, as it was sealed. seconds: since the first
        chunk came."""
        self._answered(name, number)
        if (trail := self.remaining.pop(number, None)) is not None and trail.rank >= 0:
            self._come += 1
        self._stranded.pop(number, None)
        self.answers.pop(number, None)
        if not self._queues.get(name):
            self.take_over(seconds)

    def refused(self, name: str, number: int, why: str, may_come: bool) -> None:
        """Takes that a relay does not bring the chunk of its oldest question. may_come: not now."""
        how = self._answered(name, number)
        if number not in self.remaining:
            return
        self.answers[number] = why
        if how == ChunkAsk.NOW:
            self._asked_now.discard(number)
            refusals = self._refusals.setdefault(number, set())
            (refusals.discard if may_come else refusals.add)(name)
            return
        trail = self.remaining[number]
        if name != trail.named:
            trail.tried |= {name}
        self._place(number)

    def repeat(self, name: str, number: int) -> None:
        """Asks a relay once more for the chunk of its oldest question, in the same way: what it sent is of no use, and
        it can send it otherwise."""
        how = self._answered(name, number)
        if number in self.remaining:
            self._queue(name, number, how)

    def sent_to(self, origin: str, number: int, name: str) -> None:
        """Takes that an origin names the relay that brings the chunk of its oldest question."""
        self._answered(origin, number)
        if (trail := self.remaining.get(number)) is None:
            return
        trail.named = name
        if self._may_ask(name, trail) and name != self._name:
            self._queue(name, number, ChunkAsk.WAIT)
        else:
            self._queue(origin, number, ChunkAsk.GRANT_ANOTHER)

    def lose(self, name: str, why: str) -> None:
        """Asks a relay no more; its chunks are asked of others."""
        self.failed.setdefault(name, why)
        open_questions = self._open.pop(name, ())
        self._open_count -= len(open_questions)
        for number, how in (*open_questions, *self._queues.pop(name, [])):
            if how == ChunkAsk.NOW:
                self._asked_now.discard(number)
            elif number in self.remaining:
                self.answers[number] = why
                self._place(number)

    def ask_all_now(self) -> None:
        """Queues for each stranded chunk a question to the next relay, whether that has it by now."""
        living = self._living()
        for number, names in self._stranded.items():
            if number in self._asked_now:
                continue
            if not names and living:
                names.extend(living[number % len(living) :] + living[: number % len(living)])
            while names:
                if (name := names.popleft()) not in self.failed:
                    self._asked_now.add(number)
                    self._queue(name, number, ChunkAsk.NOW)
                    break

    # -- slow relays

    def behind(self, seconds: float) -> list[str]:
        """The relays to leave, since they are far behind. seconds: since the first chunk came."""
        if seconds < SURE_SECONDS:
            return []
        return [name for name, questions in self._open.items() if questions and self._is_behind(name, *questions[0])]

    def _is_behind(self, name: str, number: int, how: ChunkAsk) -> bool:
        trail = self.remaining.get(number)
        if trail is None or how != ChunkAsk.WAIT or trail.named or trail.first != name:
            return False
        at_once = AHEAD * len(self._open)  # so many may come before it by chance
        return self._come - trail.rank > max(BEHIND * self._ranked, at_once)

    def take_over(self, seconds: float) -> None:
        """With too few questions open, asks others for chunks that wait for the relay that owes most. seconds: since
        the first chunk came."""
        while self._open_count < ENOUGH and seconds >= SURE_SECONDS and not self._is_leaf:
            slowest, most = "", 0
            for name, queue in self._queues.items():
                while queue and queue[0][0] not in self.remaining:
                    heapq.heappop(queue)
                if len(queue) > most and self._has_another(name, *queue[0]):
                    slowest, most = name, len(queue)
            if not slowest:
                return
            number, _ = heapq.heappop(self._queues[slowest])
            self._place(number)

    def _has_another(self, name: str, number: int, how: ChunkAsk) -> bool:
        """Whether what is to be asked of this relay can be asked of another."""
        trail = self.remaining[number]
        if how != ChunkAsk.WAIT or trail.named:
            return False
        return any(self._may_ask(each, trail) for each in (*trail.order, *trail.origins) if each != name)

    # -- which relay is next

    def _place(self, number: int) -> None:
        """Queues the next question for a chunk."""
        trail = self.remaining[number]
        while trail.order:
            name, trail.order = trail.order[0], trail.order[1:]
            if self._may_ask(name, trail):
                self._queue(name, number, ChunkAsk.WAIT)
                return
        while trail.origins:
            name = trail.origins[0]
            if self._may_ask(name, trail):
                how = ChunkAsk.GRANT_ANOTHER if trail.named else ChunkAsk.GRANT
                self._queue(name, number, ChunkAsk.WAIT if self._is_leaf else how)
                return
            trail.origins = trail.origins[1:]
        self._stranded.setdefault(number, deque())
        self._strand(number)

    def _may_ask(self, name: str, trail: Trail) -> bool:
        return name in self._relays and name not in self.failed and name not in trail.tried

    def _queue(self, name: str, number: int, how: ChunkAsk) -> None:
        heapq.heappush(self._queues.setdefault(name, []), (number, how))
        self._wake(name)

    def _answered(self, name: str, number: int) -> ChunkAsk:
        """Ends the oldest question of a relay. Returns how it was asked."""
        (oldest, how) = self._open[name].popleft()
        assert oldest == number, f"{name} answers for chunk {number}, and was asked for {oldest} before"
        self._open_count -= 1
        return how

    def _living(self) -> list[str]:
        return [name for name in sorted(self._relays) if name not in self.failed]
