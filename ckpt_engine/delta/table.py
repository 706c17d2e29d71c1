"""The table of the elements in which the versions in a relay's two slots differ: where, and what each of them has.

It decides its own form, and when a comparison is given up. It decides neither which versions are compared (the relay
does) nor whether a table may be believed: a worker that writes by it proves what comes of it by sealed digests.

Both slots are laid out alike. An atom is a contiguous piece of a slot; places count its elements. A table leads both
ways, since it has the elements of either version. It lies in one string of bytes:

    head     mark, root of the version in slot 0, root of that in slot 1, bytes of a slot, atoms, changes, bytes of the
             changed elements of one version
    atoms    int64 [atoms + 1, 4]: offset in the slot, bytes, number of its first change, offset of its first element
             among the changed ones; the last row has the ends. By offset, with those in which nothing changed
    places   uint32 [changes], rising within an atom
    words    the changed elements of the version in slot 0, then of that in slot 1
"""

from __future__ import annotations

import struct
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ckpt_engine.core.problems import data_loss
from ckpt_engine.delta.coding import Bits, blocks
from ckpt_engine.digest.placed import differing

ROOT_BYTES = 32

MOST_SHARE = 64
"""A comparison is given up where more than one of so many elements has changed: a full install is as fast then."""

_MARK = b"ckptchg1"
_HEAD = struct.Struct(f"<8s{ROOT_BYTES}s{ROOT_BYTES}sQQQQ")
_OFFSET, _BYTES, _FIRST, _WORD, _FIELDS = range(5)
_PLACE_BYTES = 4
_WORD_ALIGNMENT = 8  # of an atom's first changed element, so that elements of any width can be read where they lie


class AtomPair(NamedTuple):
    """An atom in both slots."""

    offset: int  # bytes, from the start of the slot
    one: Bits  # of the version in slot 0
    other: Bits  # of that in slot 1


class AtomChanges(NamedTuple):
    """What differs in one atom."""

    places: npt.NDArray[np.uint32]  # rising
    words: tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]  # the elements there, by slot


Part = bytes | npt.NDArray[Any]
"""A piece of a table's bytes."""


def compare(
    roots: tuple[bytes, bytes],
    slot_bytes: int,
    pairs: Sequence[AtomPair],
    threads: int,
    room: int,
    carry_on: Callable[[], None] = lambda: None,
) -> list[Part] | str:
    """Compares two slots. pairs: by offset, each of 1 to 2^32 - 1 elements. room: bytes that the table may take, and
    once more as much for a copy of it. carry_on: called from time to time; what it raises ends the comparison.

    Returns the table in pieces, or why there is none. Beside it some blocks a thread are in memory.
    """
    share = sum(len(pair.one) for pair in pairs) // MOST_SHARE + 1
    width = max((pair.one.itemsize for pair in pairs), default=1)
    most = min(share, room // (2 * (_PLACE_BYTES + 2 * width)))
    counter = _Counter(most)
    atoms = np.zeros((len(pairs) + 1, _FIELDS), dtype=np.int64)
    places: list[npt.NDArray[Any]] = []
    words: tuple[list[npt.NDArray[Any]], list[npt.NDArray[Any]]] = [], []
    changes = size = 0
    with ThreadPoolExecutor(threads, "ckpt-engine compare") as pool:
        compared = _compared(pairs, pool, counter, 4 * threads)
        try:
            for number, pair in enumerate(pairs):
                atoms[number] = pair.offset, pair.one.nbytes, changes, size
                for _ in blocks(len(pair.one)):
                    carry_on()
                    where, one, other = next(compared)
                    places.append(where)
                    changes += len(where)
                    words[0].append(one)
                    words[1].append(other)
                    size += one.nbytes
                if rest := -size % _WORD_ALIGNMENT:
                    size += rest
                    for side in words:
                        side.append(np.zeros(rest, dtype=np.uint8))
        except _TooManyError:
            if most < share:
                return f"this host has no room for more than {most} changes"
            return "too much differs between the two versions that it holds"
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
    atoms[-1] = slot_bytes, 0, changes, size
    head = _HEAD.pack(_MARK, *roots, slot_bytes, len(pairs), changes, size)
    gap = b"\0" * (-(len(head) + atoms.nbytes + _PLACE_BYTES * changes) % _WORD_ALIGNMENT)
    return [head, atoms, *places, gap, *words[0], *words[1]]


def bytes_of(part: Part) -> memoryview:
    """The bytes of a piece of a table."""
    return memoryview(part if isinstance(part, bytes) else part.reshape(-1).view(np.uint8).data)


_Found = tuple[npt.NDArray[np.uint32], Bits, Bits]


class _TooManyError(Exception):
    """There are more changes than a table may have."""


class _Counter:
    """Counts changes. Any thread."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._count = 0

    def add(self, changes: int) -> None:
        """Raises _TooManyError, and does so ever after, once there are more than `most`."""
        with self._lock:
            self._count += changes
            if self._count > self._most:
                raise _TooManyError


def _compared(pairs: Sequence[AtomPair], pool: ThreadPoolExecutor, counter: _Counter, ahead: int) -> Iterator[_Found]:
    """The changes of each block of each atom. ahead: the most blocks that wait, or are compared, at one time."""
    waiting: deque[Future[_Found]] = deque()
    for pair in pairs:
        for part in blocks(len(pair.one)):
            if len(waiting) == ahead:
                yield waiting.popleft().result()
            waiting.append(pool.submit(_differences, pair, part, counter))
    while waiting:
        yield waiting.popleft().result()


def _differences(pair: AtomPair, part: slice, counter: _Counter) -> _Found:
    one, other = pair.one[part], pair.other[part]
    places = differing(one, other)
    counter.add(len(places))
    return places + np.uint32(part.start), one[places], other[places]


class ChangeTable:
    """A table that was read. roots: of the versions in slots 0 and 1. size: bytes."""

    def __init__(self, memory: memoryview) -> None:
        """memory: of the table, writable, since kernels take no other; kept, and not written. Raises DATA_LOSS if it
        cannot be one."""
        self.size = len(memory)
        if self.size < _HEAD.size:
            raise data_loss(f"a table of changes has {self.size} bytes")
        mark, one, other, self.slot_bytes, count, self.changes, words = _HEAD.unpack_from(memory)
        at = _HEAD.size + 8 * _FIELDS * (count + 1)
        first_word = at + 4 * self.changes
        first_word += -first_word % _WORD_ALIGNMENT
        if mark != _MARK or first_word + 2 * words != self.size:
            raise data_loss(f"{self.size} bytes are not a table of {count} atoms and {self.changes} changes")
        self.roots = one, other
        self._atoms = np.frombuffer(memory, np.int64, _FIELDS * (count + 1), _HEAD.size).reshape(-1, _FIELDS)
        self._places = np.frombuffer(memory, np.uint32, self.changes, at)
        starts = first_word, first_word + words
        self._words = tuple(np.frombuffer(memory, np.uint8, words, start) for start in starts)
        limits = (_FIRST, self.changes), (_WORD, words)
        for field, end in limits:
            rising = self._atoms[:, field]
            if rising[0] != 0 or rising[-1] != end or (np.diff(rising) < 0).any():
                raise data_loss("a table of changes contradicts itself")
        self._numbers = {int(offset): number for number, offset in enumerate(self._atoms[:-1, _OFFSET])}

    def of_atom(self, offset: int, elements: int, width: int) -> AtomChanges | None:
        """What differs in the atom at an offset of the slot; None: there is no such atom of so many elements, `width`
        bytes each. Raises DATA_LOSS if the table contradicts itself."""
        number = self._numbers.get(offset)
        if number is None or self._atoms[number, _BYTES] != elements * width:
            return None
        first, stop = self._atoms[number : number + 2, _FIRST].tolist()
        at, end = self._atoms[number : number + 2, _WORD].tolist()
        size = (stop - first) * width
        if at % _WORD_ALIGNMENT or at + size > end:
            raise data_loss("a table of changes contradicts itself")
        places = self._places[first:stop]
        if len(places) and int(places[-1]) >= elements:
            raise data_loss(f"element {places[-1]} of {elements} is said to have changed")
        return AtomChanges(places, (self._words[0][at : at + size], self._words[1][at : at + size]))
