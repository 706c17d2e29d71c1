"""Blocks come back bit for bit whatever changed, take few bytes where little did, and nothing malformed is believed."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.delta import coding
from ckpt_engine.delta.choice import DeltaCosts
from ckpt_engine.delta.coding import blocks, changed_places, decode_block, encode_block, whole_block

SHARES = (0.0, 0.001, 0.01, 0.1, 0.45, 0.55, 1.0)

Elements = npt.NDArray[Any]


def changed(width: int, elements: int, share: float, seed: int, steps: int = 0) -> tuple[Elements, Elements]:
    """Random elements, and the same with a share of them replaced. steps: add up to so many instead."""
    random = np.random.default_rng(seed)
    dtype = np.dtype(f"<u{width}")
    old = random.integers(0, 256, elements * width, dtype=np.uint8).view(dtype)
    new, where = old.copy(), random.random(elements) < share
    other = random.integers(0, 256, elements * width, dtype=np.uint8).view(dtype)
    new[where] = old[where] + (other[where] % steps + 1).astype(dtype) if steps else other[where]
    return old, new


def encoded(old: Elements, new: Elements) -> bytes:
    return encode_block(old, new, changed_places(old, new))


@settings(deadline=None, max_examples=150)
@given(
    st.sampled_from([1, 2, 4, 8]),
    st.integers(1, 5000),
    st.sampled_from(SHARES),
    st.sampled_from([0, 3]),
    st.integers(0, 1 << 30),
)
def test_every_block_comes_back(width: int, elements: int, share: float, steps: int, seed: int) -> None:
    old, new = changed(width, elements, share, seed, steps)
    body = encoded(old, new)
    assert len(body) <= new.nbytes + 32
    rest, changes = decode_block(memoryview(body + b"next"), old_copy := old.copy())
    assert np.array_equal(old_copy, new)
    assert changes == np.count_nonzero(old != new)
    assert bytes(rest) == b"next"


def test_gaps_of_any_length_come_back() -> None:
    """Also those that end where a digit does."""
    for places in ([0], [254], [255], [256], [509, 510, 511], [65_534], [65_535, 65_536], [199_999]):
        old = np.zeros(200_000, np.uint16)
        new = old.copy()
        new[places] = 7
        for near in (1, 1 << 40):  # digits of two bytes, and of one
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(coding, "_NEAR", near)
                decode_block(memoryview(encoded(old, new)), found := old.copy())
            assert np.array_equal(found, new), places


@pytest.mark.parametrize(
    ("share", "most"), [(0.0, 0.0001), (0.001, 0.002), (0.01, 0.016), (0.03, 0.044), (0.1, 0.135), (0.4, 0.49)]
)
def test_random_bits_take_little_more_than_their_entropy(share: float, most: float) -> None:
    old, new = changed(2, coding.BLOCK, share, 1)
    assert len(encoded(old, new)) < most * new.nbytes


def test_small_steps_take_less_than_random_bits() -> None:
    sizes = [len(encoded(*changed(2, coding.BLOCK, 0.1, 1, steps))) for steps in (2, 0)]
    assert 2 * sizes[0] < sizes[1]
    old, new = changed(2, 100_000, 1.0, 1, 2)
    assert len(encoded(old, new)) < 0.3 * new.nbytes, "also where all have changed"


def test_constants_are_sent_as_they_are() -> None:
    old, _ = changed(2, 100_000, 0.0, 1)
    new = old.copy()
    new[::7] = 0
    body = encoded(old, new)
    assert body[0] == coding.Kind.VALUES
    decode_block(memoryview(body), old)
    assert np.array_equal(old, new)


def test_what_has_no_base_takes_its_own_bytes() -> None:
    _, new = changed(4, 1000, 1.0, 3)
    body = whole_block(new)
    assert len(body) <= new.nbytes + 32
    found = np.zeros_like(new)
    assert decode_block(memoryview(body), found)[1] == 1000
    assert np.array_equal(found, new)


def test_a_box_is_all_of_its_blocks() -> None:
    parts = list(blocks(2 * coding.BLOCK + 1))
    assert [(part.start, part.stop) for part in parts] == [
        (0, coding.BLOCK),
        (coding.BLOCK, 2 * coding.BLOCK),
        (2 * coding.BLOCK, 2 * coding.BLOCK + 1),
    ]


@settings(deadline=None, max_examples=300)
@given(st.sampled_from(SHARES), st.integers(0, 1 << 30), st.integers(0, 1 << 30), st.integers(1, 255), st.booleans())
def test_damage_is_refused_or_changes_elements_only(share: float, seed: int, at: int, flip: int, is_cut: bool) -> None:
    old, new = changed(2, 700, share, seed)
    body = bytearray(encoded(old, new))
    at = at % min(len(body), 40) if seed % 2 else at % len(body)
    body[at] ^= flip
    found = old.copy()
    with contextlib.suppress(CkptEngineError):
        rest, changes = decode_block(memoryview(body)[: at if is_cut else None], found)
        assert 0 <= changes <= 700
        assert len(rest) <= len(body)


def test_a_string_that_would_grow_beyond_its_block_is_refused_unread() -> None:
    """A compressed gigabyte of zeros, in the place of two words."""
    import zstandard

    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 26))
    head = coding._HEAD.pack(coding.Kind.DENSE, 0, 2, 0, 0, len(bomb))
    with pytest.raises(CkptEngineError, match="are not 4 bytes compressed"):
        decode_block(memoryview(head + bomb), np.zeros(2, np.uint16))


def test_a_delta_pays_where_coding_is_faster_than_the_network() -> None:
    costs = DeltaCosts()
    assert costs.pays(1e12), "unknown: it is tried"
    costs.add(100 << 20, 2 << 20, 0.1)  # a gigabyte a second
    assert costs.pays(None)
    assert costs.pays(12.5e6)
    assert not costs.pays(5e9)
    costs.add(100 << 20, 300 << 20, 0.1)
    assert costs.coded_bytes == 102 << 20, "what does not become shorter is sent as it is"
