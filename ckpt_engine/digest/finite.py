"""How NaN and infinity are found while bits are digested, for each dtype. Pure.

In each lane (digest/factors.py) some bits are inverted, then some are kept. An element is NaN or infinite if a lane of
it becomes at least `least`, so the greatest lane decides for a whole box. It is computed only where a bit of `guard` is
set in memory, as in every NaN and infinity, and in few other weights: floats of 2 and more.
"""

from __future__ import annotations

from typing import NamedTuple

from ckpt_engine.core.dtypes import ITEMSIZES


class FiniteRule(NamedTuple):
    """The rule of one dtype. The first three are for eight bytes of memory, as a little-endian number."""

    flip: int  # bits to invert
    mask: int  # bits to keep after that
    guard: int  # bits in memory of which every NaN and infinity has one
    least: int  # a lane that becomes this or more is NaN or infinite

    def of_lane(self, lane: int, bits: int) -> tuple[int, int]:
        """The bits to invert and the bits to keep in this lane of each element; bits: of a lane."""
        return self.flip >> lane * bits & (1 << bits) - 1, self.mask >> lane * bits & (1 << bits) - 1


def _rule(dtype: str, mask: int, guard: int, least: int, flip: int = 0) -> FiniteRule:
    """The rule of a dtype, from the values for one lane: the last lane of an element (of each half of a complex
    number), which has the sign and the exponent."""
    size = 4 if dtype == "complex64" else ITEMSIZES[dtype]
    shift = 8 * (size - min(size, 2))
    places = range(0, 64, 8 * size)
    flips, masks, guards = (sum(each << shift + place for place in places) for each in (flip, mask, guard))
    return FiniteRule(flips, masks, guards, least)


RULES = {
    "float16": _rule("float16", 0x7FFF, 0x4000, 0x7C00),
    "bfloat16": _rule("bfloat16", 0x7FFF, 0x4000, 0x7F80),
    "float32": _rule("float32", 0x7FFF, 0x4000, 0x7F80),
    "complex64": _rule("complex64", 0x7FFF, 0x4000, 0x7F80),
    "float64": _rule("float64", 0x7FFF, 0x4000, 0x7FF0),
    "float8_e4m3fn": _rule("float8_e4m3fn", 0x7F, 0x40, 0x7F),  # has no infinity
    "float8_e5m2": _rule("float8_e5m2", 0x7F, 0x40, 0x7C),
    "float8_e4m3fnuz": _rule("float8_e4m3fnuz", 0xFF, 0x80, 0xFF, flip=0x7F),  # -0 is its only NaN
    "float8_e5m2fnuz": _rule("float8_e5m2fnuz", 0xFF, 0x80, 0xFF, flip=0x7F),
    "float8_e8m0fnu": _rule("float8_e8m0fnu", 0xFF, 0x80, 0xFF),
}
"""The rule of each dtype that can be NaN or infinite; integers cannot."""
