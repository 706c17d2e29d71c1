"""From which relays a relay asks for a chunk, and in which order. Pure; equal arguments give equal orders everywhere.

No relay is planned for: the order follows from one table, the relays of a version and the chunks that each wants. For a
chunk, the relays that want it and pass things on are a grid. One column of it is dealt the chunk, and one relay of that
column is the first: it asks the origin. The rest of the column asks the first, and every other relay one member of the
column: the one in its own row, or another one where rates differ or a row ends before. So a relay asks only relays
before it, no circle can form, and each sends about as much as it receives. The order does not depend on which relays
are alive, or on which of them have what.

Up to eight relays are one column. More are a grid of about as many columns as rows: 1,024 relays have 62 peers each.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import fsum, isfinite, isqrt

import numpy as np
import numpy.typing as npt

from ckpt_engine.core.problems import internal, invalid

ONE_COLUMN = 8
"""Relays up to which each may ask each."""

_Places = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ChunkRelay:
    """A relay in the table of a version."""

    name: str
    wants: int  # number of its set of chunks
    rate: float = 1.0  # relative to others; 0: it is a leaf, which passes nothing on


class ChunkOrder:
    """The order of one table, which does not depend on the order of `relays` and `sets`.

    sizes: bytes of each chunk. sets: distinct sets of chunks that relays want. relays: without origins, which ask no
    relay. Raises INVALID_ARGUMENT, naming the relay or the chunk, for a table that contradicts itself.
    """

    def __init__(self, sizes: Sequence[int], sets: Sequence[Collection[int]], relays: Sequence[ChunkRelay]) -> None:
        ordered = sorted(relays, key=lambda relay: relay.name)
        self._names = tuple(relay.name for relay in ordered)
        self._places = {name: place for place, name in enumerate(self._names)}
        want_matrix = _want_matrix(len(sizes), sets)
        _check(ordered, len(sets))
        wants = np.array([relay.wants for relay in ordered], dtype=np.int64)
        rates = np.array([relay.rate for relay in ordered], dtype=np.float64)
        # Every relay must compute the same: bytes are summed as integers, and rates only divide them.
        sent = np.zeros(len(ordered) + 1, dtype=np.int64)  # by relay, and one that stands where a row has no relay
        grids: dict[bytes, _Grid] = {}
        self._grid_of: list[_Grid] = []
        self._column: list[int] = []
        self._first: list[int] = []
        for number, (key, size) in enumerate(zip(np.packbits(want_matrix, axis=1), sizes, strict=True)):
            grid = grids.get(key.tobytes())
            if grid is None:
                grid = grids[key.tobytes()] = _Grid(np.flatnonzero(want_matrix[number][wants]), rates)
            if not self._grid_of or self._grid_of[-1] is not grid:
                grid.begin(sent)
            column, first = grid.deal(size, sent)
            self._grid_of.append(grid)
            self._column.append(column)
            self._first.append(first)

    def before(self, name: str, chunk: int) -> tuple[str, ...]:
        """The relays that a relay asks for a chunk that it wants, one after the other: each comes before it. After the
        last one it asks the origin; empty: it asks that at once."""
        place, first = self._places[name], self._first[chunk]
        places = self._grid_of[chunk].asked_by(place, self._column[chunk], first)
        return tuple(self._names[each] for each in places)

    def first(self, chunk: int) -> str:
        """The relay that asks the origin for a chunk, to pass it on; empty: none passes it on."""
        return self._names[self._first[chunk]] if self._first[chunk] >= 0 else ""


class _Grid:
    """Relays that want the same chunks. Those that pass on are dealt the chunks, in their order.

    wanting: places of the relays in the table, rising. rates: by place.
    """

    def __init__(self, wanting: _Places, rates: npt.NDArray[np.float64]) -> None:
        passing = wanting[rates[wanting] > 0]
        count = 1 if len(passing) <= ONE_COLUMN else isqrt(len(passing) - 1) + 1
        rows = -(-len(passing) // count)
        nowhere = len(rates)
        self._others = len(wanting) - 1
        padding = np.full(rows * count - len(passing), nowhere, dtype=np.int64)
        self._table = np.concatenate([passing, padding]).reshape(rows, count)
        turn = np.full(len(rates), -1, dtype=np.int64)  # leaves stand behind the others
        turn[passing] = np.arange(len(passing))
        turn[wanting[rates[wanting] <= 0]] = np.arange(len(passing), len(wanting))
        column_of = np.where((turn >= 0) & (turn < len(passing)), turn % count, -1)
        self._turn: list[int] = turn.tolist()
        self._count = count
        self._members = [self._table[: len(passing[column::count]), column] for column in range(count if rows else 0)]
        self._rates = [rates[members] for members in self._members]
        self._column_rate = np.array([fsum(each) for each in self._rates])
        self._askers: list[_Places] = []  # by column: how many of other columns ask each member
        self._mates: list[list[int]] = []  # by column and asker: the row of the member that it asks; -1: its own column
        askers = wanting[np.argsort(turn[wanting], kind="stable")]
        for column, members in enumerate(self._members):
            outside = askers[column_of[askers] != column]
            rows_asked = _apportion(turn[outside] // count, self._rates[column])
            mates = np.full(len(rates), -1, dtype=np.int64)
            mates[outside] = rows_asked
            self._mates.append(mates.tolist())
            self._askers.append(np.bincount(rows_asked, minlength=len(members)))

    def begin(self, sent: _Places) -> None:
        """Begins dealing chunks after another grid was dealt some. sent: bytes that each relay sends, of all grids."""
        self._column_sent = sent[self._table].sum(axis=0)

    def deal(self, size: int, sent: _Places) -> tuple[int, int]:
        """Deals the next chunk: its column, and the place of its first; -1 for both if no relay passes on. Adds what
        relays send of it to `sent`. size: of the chunk, bytes."""
        if not self._members:
            return -1, -1
        each = size * self._others
        column = int(((self._column_sent + each) / self._column_rate).argmin())
        self._column_sent[column] += each
        members = self._members[column]
        mine = sent[members] + size * self._askers[column]
        more = size * (len(members) - 1)
        row = int(((mine + more) / self._rates[column]).argmin())
        mine[row] += more
        sent[members] = mine
        return column, int(members[row])

    def asked_by(self, place: int, column: int, first: int) -> tuple[int, ...]:
        """The relays that one asks for a chunk that was dealt to this column and first. Those that ask the same member
        of a column go on to different ones, if that is lost."""
        if self._turn[place] < 0:
            raise internal("a relay asks for a chunk that it does not want")
        if first < 0 or place == first:
            return ()
        row = self._mates[column][place]
        if row < 0:
            return (first,)
        members = self._members[column]
        if len(members) == 1:
            return (first,)
        following = row + 1 + self._turn[place] % self._count % (len(members) - 1)
        return int(members[row]), int(members[following % len(members)])


def _apportion(rows: _Places, rates: npt.NDArray[np.float64]) -> _Places:
    """The row of the member that each asker asks: its own if that is not asked by too many already, by its rate.

    rows: of askers, rising. rates: of the members, by row.
    """
    shares = np.rint(len(rows) * np.minimum(np.cumsum(rates) / fsum(rates), 1.0))
    shares[-1] = len(rows)
    free = np.diff(shares, prepend=0).astype(np.int64)
    found = np.full(len(rows), -1, dtype=np.int64)
    before = np.arange(len(rows)) - np.searchsorted(rows, rows)  # askers of the same row before this one
    own = rows < len(rates)
    own[own] = before[own] < free[rows[own]]
    found[own] = rows[own]
    free -= np.bincount(found[own], minlength=len(rates))
    rest = np.repeat(np.arange(len(rates)), free)
    found[~own] = rest
    return found


def _want_matrix(chunks: int, sets: Sequence[Collection[int]]) -> npt.NDArray[np.bool_]:
    """Whether each chunk is in each set."""
    found = np.zeros((chunks, len(sets)), dtype=np.bool_)
    for number, each in enumerate(sets):
        own = np.fromiter(each, dtype=np.int64, count=len(each))
        if len(own) and not 0 <= own.min() <= own.max() < chunks:
            raise invalid(f"set {number} of a table of relays names chunk {own.max()}, and there are {chunks}")
        found[own, number] = True
    return found


def _check(relays: Sequence[ChunkRelay], sets: int) -> None:
    for relay, following in pairwise(relays):
        if relay.name == following.name:
            raise invalid(f"a table of relays has {relay.name} twice")
    for relay in relays:
        if not 0 <= relay.wants < sets:
            raise invalid(f"a table of relays has {sets} sets of chunks, and {relay.name} wants set {relay.wants}")
        if not (isfinite(relay.rate) and relay.rate >= 0):
            raise invalid(f"a table of relays gives {relay.name} a rate of {relay.rate}; it must be 0 or more")
