"""From which relays a relay asks for a chunk, and in which order. Pure; equal arguments give equal orders everywhere.

Nobody plans who brings what: the order follows from one table, the relays of a version and the chunks that each wants.
For a chunk, the relays that want it and pass things on are a grid. One column of it is dealt the chunk, and one relay of
that column is the first: it asks the origin. The rest of the column asks the first, and every other relay the member of
the column in its own row. So a relay asks only relays before it, no circle can form, and each sends about as much as it
receives. The order does not depend on which relays are alive, or on which of them have what.

Up to eight relays are one column. More are a grid of about as many columns as rows: 1,024 relays have 62 peers each.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import isqrt

from ckpt_engine.core.problems import invalid

ONE_COLUMN = 8
"""Relays up to which each may ask each."""


@dataclass(frozen=True, slots=True)
class ChunkRelay:
    """A relay in the table of a version."""

    name: str
    wants: int  # number of its set of chunks
    rate: float = 1.0  # relative to others; 0: it passes nothing on


class ChunkOrder:
    """The order of one table. sizes: bytes of each chunk. sets: distinct sets of chunks that relays want."""

    def __init__(self, sizes: Sequence[int], sets: Sequence[Collection[int]], relays: Sequence[ChunkRelay]) -> None:
        if any(not 0 <= relay.wants < len(sets) for relay in relays):
            raise invalid(f"a table of relays has {len(sets)} sets of chunks, and a relay that wants another one")
        self._relays = {relay.name: relay for relay in relays}
        self._grids: dict[tuple[int, ...], _Grid] = {}
        self._grid_of: list[_Grid] = []
        self._first: list[str] = []
        self._column: list[int] = []
        wanted = [frozenset(each) for each in sets]
        for number, size in enumerate(sizes):
            key = tuple(each for each, chunks in enumerate(wanted) if number in chunks)
            if key not in self._grids:
                self._grids[key] = _Grid([relay for relay in relays if relay.wants in key and relay.rate > 0])
            grid = self._grids[key]
            column, first = grid.deal(size)
            self._grid_of.append(grid)
            self._column.append(column)
            self._first.append(first)

    def before(self, name: str, chunk: int) -> tuple[str, ...]:
        """The relays that a relay asks for a chunk, one after the other; empty: it asks the origin at once. After the
        last one it asks the origin, too."""
        first = self._first[chunk]
        if not first or name == first:
            return ()
        grid, column = self._grid_of[chunk], self._column[chunk]
        own = grid.column_of.get(name)
        if own == column:
            return (first,)
        members = grid.columns[column]
        row = grid.row_of[name] if own is not None else _spread(name)
        mate = members[row % len(members)]
        return (first,) if mate == first else (mate, first)

    def peers(self, name: str, chunks: Collection[int]) -> frozenset[str]:
        """All relays that a relay may ask for some of these chunks."""
        return frozenset(other for chunk in chunks for other in self.before(name, chunk))


class _Grid:
    """Relays that want the same chunks and pass them on. Chunks are dealt in their order."""

    def __init__(self, relays: Sequence[ChunkRelay]) -> None:
        ordered = sorted(relays, key=lambda relay: relay.name)
        count = 1 if len(ordered) <= ONE_COLUMN else isqrt(len(ordered) - 1) + 1
        self.columns: list[list[str]] = [[] for _ in range(count if ordered else 0)]
        self.column_of: dict[str, int] = {}
        self.row_of: dict[str, int] = {}
        for place, relay in enumerate(ordered):
            self.column_of[relay.name], self.row_of[relay.name] = place % count, place // count
            self.columns[place % count].append(relay.name)
        self._rate = {relay.name: relay.rate for relay in ordered}
        self._column_rate = [sum(self._rate[name] for name in column) for column in self.columns]
        self._column_bytes = [0.0] * len(self.columns)
        self._bytes = dict.fromkeys(self._rate, 0.0)

    def deal(self, size: int) -> tuple[int, str]:
        """Deals the next chunk: its column, and its first; -1 and "" if no relay passes on."""
        if not self.columns:
            return -1, ""
        column = min(
            range(len(self.columns)),
            key=lambda each: ((self._column_bytes[each] + size) / self._column_rate[each], each),
        )
        first = min(self.columns[column], key=lambda name: ((self._bytes[name] + size) / self._rate[name], name))
        self._column_bytes[column] += size
        self._bytes[first] += size
        return column, first


def _spread(name: str) -> int:
    """A number that spreads leaves over the members of a column."""
    return sum(name.encode()) * 2654435761 % 2**32
