"""Claims of jobs on holders: relays to fill, and those that a version is read from.

Decides which job may go on and which waits; a job is an update, or an attempt for one replica. A job claims all that it
needs of holders at once, and holds nothing while it waits, so jobs never wait for each other in a circle. It keeps the
ticket of its first claim, overtakes only jobs with which it shares nothing, and is not overtaken by others.

Two claims conflict in these ways only:
- A holder obeys rising fill fences, and a relay fills one slot at a time, so one job at a time gives orders to it.
- A relay has room for two versions. Filling it overwrites the one that it is not told to keep, which must not be read.

Does not decide what a job needs, or what it does if it waits too long.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import count

from ckpt_engine.core.version import Version

NEVER = 1 << 62
"""The ticket of a job that has not asked for anything yet: all that wait go before it."""


@dataclass(frozen=True)
class Claim:
    """What one job needs of holders. A holder is named by the id of what it offers."""

    orders: frozenset[str] = frozenset()  # holders that the job commands to fill a slot, or to digest what they hold
    fills: frozenset[str] = frozenset()  # the relays among `orders` in which the job overwrites a slot
    keeps: Version | None = None  # the version that relays in `fills` must keep in their other slot; None: none
    reads: Version | None = None  # the version that the job reads
    sources: frozenset[str] = frozenset()  # the holders from which the job reads that version
    doubles: frozenset[str] = frozenset()  # relays among `sources` with it in both slots: a fill overwrites one of them

    def meets(self, other: Claim) -> bool:
        """Whether the two claims conflict, so that one of them has to wait."""
        return bool(self.orders & other.orders) or self._overwrites(other) or other._overwrites(self)

    def reading(self) -> Claim:
        """The claim of the same job once it gives no more orders to holders."""
        return replace(self, orders=frozenset(), fills=frozenset())

    def extended(self, names: frozenset[str]) -> Claim:
        """The claim with more relays to fill and to read."""
        orders, fills, sources = self.orders | names, self.fills | names, self.sources | names
        return replace(self, orders=orders, fills=fills, sources=sources)

    def _overwrites(self, other: Claim) -> bool:
        common = self.fills & other.sources
        return bool(common) and (other.reads != self.keeps or bool(common & other.doubles))


@dataclass
class Claims:
    """The claims of all jobs, by number; calls that have not begun have numbers below 0."""

    granted: dict[int, Claim] = field(default_factory=dict)
    waiting: dict[int, Claim] = field(default_factory=dict)
    fences: dict[str, int] = field(default_factory=dict)  # by holder, the highest fill fence that a job told it
    _tickets: dict[int, int] = field(default_factory=dict)
    _counter: Iterable[int] = field(default_factory=count)

    def lets(self, claim: Claim, call: int | None = None) -> bool:
        """Whether a job that needs this claim may begin now. call: the number of the waiting call, if it waits."""
        ticket = NEVER if call is None else self._tickets.get(call, NEVER)
        return not self._ahead(claim, ticket)

    def reserve(self, calls: Mapping[int, Claim]) -> None:
        """Takes tickets for calls that have not begun and lack nothing else, and drops those of all other calls that
        have not begun."""
        for number in [number for number in self.waiting if number < 0 and number not in calls]:
            self.end(number)
        for number, claim in calls.items():
            self._ticket(number)
            self.waiting[number] = claim

    def begin(self, number: int, claim: Claim, call: int | None = None) -> None:
        """Begins a job that `lets` allowed. Its orders carry its number as their fence. call: see `lets`."""
        if call is not None and call in self._tickets:
            self._tickets[number] = self._tickets.pop(call)
            self.waiting.pop(call, None)
        if claim != Claim():
            self._ticket(number)
        self.granted[number] = claim
        self.fences |= dict.fromkeys(claim.orders, number)

    def ask(self, number: int, claim: Claim) -> bool:
        """Replaces the claim of a job. False: other jobs are in the way; the job then holds nothing, and has to ask
        again."""
        self.granted[number], self.waiting[number] = Claim(), claim
        if self._ahead(claim, self._ticket(number), number):
            return False
        self.granted[number] = self.waiting.pop(number)
        return True

    def in_the_way(self, number: int) -> list[int]:
        """The jobs that a job waits for: they hold what it needs, or asked for it earlier."""
        claim = self.waiting.get(number)
        return [] if claim is None else self._ahead(claim, self._tickets[number], number)

    def blocked(self, number: int, keeps: Version | None) -> set[str]:
        """Holders that a job cannot fill and read in addition, while it keeps this version there."""
        holders: set[str] = set()
        for other, claim in self.granted.items():
            if other != number:
                holders |= claim.orders | (claim.doubles if claim.reads == keeps else claim.sources)
        return holders

    def extend(self, number: int, names: frozenset[str], fence: int) -> None:
        """Lets a job fill and read these holders too, of which none is `blocked`. fence: that of its orders."""
        self.granted[number] = self.granted[number].extended(names)
        self.fences |= dict.fromkeys(names, fence)

    def only_reads(self, number: int) -> None:
        """Notes that a job gives no more orders to holders."""
        self.granted[number] = self.granted[number].reading()

    def withdraw(self, number: int) -> None:
        """Notes that a job goes on without what it waits for."""
        self.waiting.pop(number, None)

    def end(self, number: int) -> None:
        """Ends a job, or a call that has not begun."""
        for by_number in (self.granted, self.waiting, self._tickets):
            by_number.pop(number, None)
        if not self.granted:
            self.fences.clear()  # the fence of the next job is above all of these

    def obeyed(self, names: Iterable[str]) -> int:
        """The highest fill fence that one of these holders was given; 0: none."""
        return max((self.fences.get(name, 0) for name in names), default=0)

    def _ticket(self, number: int) -> int:
        if number not in self._tickets:
            self._tickets[number] = next(iter(self._counter))
        return self._tickets[number]

    def _ahead(self, claim: Claim, ticket: int, number: int | None = None) -> list[int]:
        """The jobs whose granted claim conflicts with this one, then waiting ones that conflict and have an earlier
        ticket."""
        jobs = [other for other, held in self.granted.items() if other != number and claim.meets(held)]
        earlier = (other for other in self.waiting if other != number and self._tickets[other] < ticket)
        return jobs + [other for other in earlier if claim.meets(self.waiting[other])]
