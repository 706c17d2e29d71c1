"""Holders that updates of several pools want at the same time: relays to fill, and those that a version is read from.

A relay has room for two versions and fills one at a time, and a holder obeys rising fill fences only. So each serves
one update at a time, from when that fills or reads it until that is over; once that one only has replicas read it,
others may begin to read it too. An update that wants one of them waits for
those that have it, and with nothing in its hands for those that asked before too; so none is passed for ever. Only
those can wait in a circle that read holders from their beginning and want relays later: one of them is ended. An update
and the one whose installs it goes on beside share holders: of a relay it leaves the slot
alone that the other one reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from itertools import takewhile


@dataclass
class Sharing:
    """Which update uses which holders, and which waits for them: by update, in the order in which they asked. uses:
    what it has. waits: what it has asked for; below 0 those that have not begun, since others use what they read.
    beside: the update whose installs it goes on beside. reading: those that tell holders nothing any more: others may
    begin to read these too. told: by holder, the highest fence that it was told."""

    uses: dict[int, Set[str]] = field(default_factory=dict)
    waits: dict[int, Set[str]] = field(default_factory=dict)
    beside: dict[int, int] = field(default_factory=dict)
    reading: set[int] = field(default_factory=set)
    told: dict[str, int] = field(default_factory=dict)

    def lets(self, names: Set[str], key: int | None = None) -> bool:
        """Whether an update may begin that reads these from its beginning. key: by which it waits for them, if so."""
        before = takewhile(lambda other: other != key, self.waits)
        used = (names for number, names in self.uses.items() if number not in self.reading)
        return all(map(names.isdisjoint, (*used, *(self.waits[other] for other in before))))

    def reserve(self, wanted: Mapping[int, Set[str]]) -> None:
        """Reserves what those wait for that have not begun and lack nothing else: none that asks later passes them."""
        for key in [key for key in self.waits if key < 0 and key not in wanted]:
            del self.waits[key]
        self.waits.update(wanted)

    def begin(self, number: int, names: Set[str], beside: int | None) -> None:
        """An update begins, and reads these under its own fill fence."""
        self.uses[number] = names
        self.told |= dict.fromkeys(names, number)
        if beside is not None:
            self.beside[number] = beside

    def ask(self, number: int, names: Set[str]) -> bool:
        """Whether an update has these from now on; else it waits, and asks again."""
        self.waits[number] = names
        if self.in_the_way(number):
            return False
        del self.waits[number]
        self.uses[number] |= names
        return True

    def in_the_way(self, number: int) -> list[int]:
        """Updates that have what this one waits for, or have asked for it before."""
        names = self.waits.get(number, frozenset())
        found = [other for other in self.uses if other in self._others(number) and names & self.uses[other]]
        if self.uses.get(number):
            return found  # those that asked before may wait for what it has
        for other, wanted in self.waits.items():
            if other == number:
                break
            if names & wanted and other not in found:
                found.append(other)
        return found

    def circle(self) -> set[int]:
        """Updates that wait for themselves by way of others."""
        return {number for number in self.waits if number in self._awaited(number)}

    def _awaited(self, number: int) -> set[int]:
        found: set[int] = set()
        ahead = self.in_the_way(number)
        while ahead:
            other = ahead.pop()
            if other not in found:
                found.add(other)
                ahead += self.in_the_way(other)
        return found

    def taken(self, number: int) -> set[str]:
        """What others have."""
        return {name for other in self._others(number) for name in self.uses[other]}

    def add(self, number: int, names: Set[str]) -> None:
        """Gives an update these too; no other has them."""
        self.uses[number] |= names

    def over(self, number: int) -> None:
        """An update has ended."""
        for known in (self.uses, self.waits, self.beside):
            known.pop(number, None)
        self.reading.discard(number)
        if not self.uses:
            self.told.clear()  # the fence of whatever begins now is above all of these

    def obeyed(self, names: Set[str]) -> int:
        """The highest fill fence that any of these was told; 0: none, by an update that goes on or beside one."""
        return max((self.told.get(name, 0) for name in names), default=0)

    def _others(self, number: int) -> set[int]:
        return self.uses.keys() - {number, self.beside.get(number, number)}
