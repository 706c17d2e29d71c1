"""Tables of what differs between two slots: what was compared comes back, and what cannot be a table is refused."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from ckpt_engine.core.problems import CkptEngineError, aborted
from ckpt_engine.delta import coding
from ckpt_engine.delta import table as tables
from ckpt_engine.delta.coding import BLOCK
from ckpt_engine.delta.table import AtomPair, ChangeTable, bytes_of, compare
from ckpt_engine.digest import placed

ROOM = 1 << 30
ROOTS = b"1" * 32, b"2" * 32
Pairs = list[AtomPair]


def pairs(share: float) -> Pairs:
    """Atoms of all widths, one of more than a block, one in which nothing changes."""
    generator = np.random.default_rng(7)
    found, offset = [], 0
    for count, width in ((100, 2), (BLOCK + 999, 2), (3, 1), (777, 4), (50, 8), (40, 2)):
        one: npt.NDArray[Any] = generator.integers(0, 256, count * width, dtype=np.uint8).view(f"u{width}")
        other = one.copy()
        if count != 40:
            other[generator.random(count) < share] ^= 5
            other[-1] ^= 1
        found.append(AtomPair(offset, one, other))
        offset += -(-one.nbytes // 64) * 64
    return found


def table(found: Pairs) -> bytearray:
    parts = compare(ROOTS, 1 << 30, found, 2, ROOM)
    assert not isinstance(parts, str), parts
    return bytearray(b"".join(map(bytes_of, parts)))


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("share", [0.0, 0.001, 0.01])
def test_what_differs_comes_back(share: float, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not compiled:
        monkeypatch.setattr(placed, "_find", lambda width: None)
    found = pairs(share)
    read = ChangeTable(memoryview(table(found)))
    assert (read.roots, read.slot_bytes) == (ROOTS, 1 << 30)
    changes = 0
    for pair in found:
        atom = read.of_atom(pair.offset, len(pair.one), pair.one.itemsize)
        assert atom is not None
        places = np.flatnonzero(pair.one != pair.other)
        assert (atom.places == places).all()
        for words, whole in zip(atom.words, (pair.one, pair.other), strict=True):
            assert (words.view(whole.dtype) == whole[places]).all()
        assert read.of_atom(pair.offset, len(pair.one) + 1, pair.one.itemsize) is None
        assert read.of_atom(pair.offset + 1, len(pair.one), pair.one.itemsize) is None
        changes += len(places)
    assert read.changes == changes


def test_too_many_changes_are_no_table() -> None:
    assert compare(ROOTS, 1 << 30, pairs(0.5), 2, ROOM) == "too much differs between the two versions that it holds"


def test_changes_without_room_are_no_table() -> None:
    found = pairs(0.001)
    size = 2 * ChangeTable(memoryview(table(found))).changes * (4 + 2 * 8)  # as if all of them had eight bytes
    assert isinstance(compare(ROOTS, 1 << 30, found, 2, size), list)
    assert "has no room for more than" in compare(ROOTS, 1 << 30, found, 2, size - 1)


@pytest.mark.parametrize("ends", ["too much differs", "enough"])
def test_what_is_given_up_is_not_compared_to_its_end(ends: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within an atom, too."""
    compared: list[int] = []

    def differing(one: npt.NDArray[Any], other: npt.NDArray[Any]) -> npt.NDArray[Any]:
        compared.append(len(one))
        return placed.differing(one, other)

    def stop() -> None:
        if ends == "enough" and compared:
            raise aborted("enough")

    monkeypatch.setattr(coding, "BLOCK", 1000)
    monkeypatch.setattr(tables, "differing", differing)
    one = np.arange(1_000_000, dtype=np.uint32)
    other = one.copy() if ends == "enough" else one + 1
    with contextlib.nullcontext() if ends != "enough" else pytest.raises(CkptEngineError, match=ends):
        assert ends in compare(ROOTS, 1 << 30, [AtomPair(0, one, other)], 2, ROOM, stop)
    assert len(compared) < 100


def test_a_comparison_can_be_ended() -> None:
    def stop() -> None:
        raise aborted("enough")

    with pytest.raises(CkptEngineError, match="enough"):
        compare(ROOTS, 1 << 30, pairs(0.01), 2, ROOM, stop)


def test_bytes_that_are_no_table_are_refused_or_say_nothing_wrong() -> None:
    """Whichever byte of its head and its list of atoms is another one."""
    found = pairs(0.001)
    right = table(found)
    for size in (0, 50, 103, len(right) - 1):
        with pytest.raises(CkptEngineError, match="DATA_LOSS"):
            ChangeTable(memoryview(right[:size]))
    for at in range(8 + 64, 104 + 32 * 7):
        wrong = bytearray(right)
        wrong[at] ^= 0x41
        with contextlib.suppress(CkptEngineError):
            read = ChangeTable(memoryview(wrong))
            for pair in found:
                atom = read.of_atom(pair.offset, len(pair.one), pair.one.itemsize)
                assert atom is None or len(atom.places) * pair.one.itemsize == atom.words[0].nbytes


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("share", [0.0, 0.02, 1.0])
def test_elements_that_differ_are_found(width: int, share: float) -> None:
    generator = np.random.default_rng(width)
    for count in (0, 1, 7, 8, 9, 1000):
        one: npt.NDArray[Any] = generator.integers(0, 256, count * width, dtype=np.uint8).view(f"u{width}")
        other = np.where(generator.random(count) < share, one ^ 1, one).astype(one.dtype)
        assert (placed.differing(one, other) == np.flatnonzero(one != other)).all()
