"""How the digest of a box changes with some of its elements: the sum of (new - old) * factor over them.

It decides neither which elements have changed, nor what the sum must be: that is the difference of two sealed digests.
A digest is a sum over elements (digest/factors.py), and that of zeros does not depend on them, so modulo 2^64

    digest(box, new) - digest(box, old) = sum over changed elements e, lanes l: (new(e, l) - old(e, l)) * factor(e, l)

Lanes are numbers of 16 bits, whatever the dtype makes of them: -0 and 0 differ, and a NaN equals itself if its bits do.
Elements on a GPU are summed there. Those of the host are summed by a kernel that Numba compiles, and without Numba as
on a GPU, by torch.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import torch

from ckpt_engine.core.problems import invalid
from ckpt_engine.digest.factors import INDEX_STEP, LANE_AXIS, MASK, MIX_1, MIX_2, SEED, hashed, words

if TYPE_CHECKING:
    from ckpt_engine.digest.host_kernel import ChangesKernel

log = logging.getLogger(__name__)

_AT_ONCE = 1 << 22
"""Elements whose factors exist at one time where torch sums."""


def changed_digest(
    start: Sequence[int],
    shape: Sequence[int],
    places: torch.Tensor,
    old: torch.Tensor,
    new: torch.Tensor,
    seed: int = SEED,
) -> int:
    """What is added to the digest of a box, modulo 2^64, when some of its elements change.

    start, shape: of the box, as for `digest_box`. places: of the changed elements in the box, row-major, int64, each
    once, in any order. old, new: the same elements before and after, of one dtype; one axis, contiguous. All three are
    on one device. Raises INVALID_ARGUMENT if they do not fit each other.
    """
    if len(start) != len(shape) or places.dtype != torch.int64 or old.dtype != new.dtype:
        raise invalid(
            f"changes of a box of shape {list(shape)} at {list(start)} are places of int64 and elements of one dtype, "
            f"not {places.dtype}, {old.dtype} and {new.dtype}"
        )
    if not places.shape == old.shape == new.shape == (places.numel(),):
        raise invalid(f"{list(places.shape)} places have {list(old.shape)} old and {list(new.shape)} new elements")
    if not places.numel():
        return 0
    size = old.itemsize
    lanes = words(hashed(seed, LANE_AXIS, 0), max(1, size // 2))
    hashes = [hashed(seed, axis, first) for axis, first in enumerate(start, 1)]
    kernel = _kernel() if places.device.type == "cpu" else None
    if kernel is None:
        return _by_torch(shape, hashes, lanes.tolist(), places, old, new)
    axes = np.array([*zip(shape, hashes, strict=True)], dtype=np.uint64).reshape(len(shape), 2)
    before, after = (each.contiguous().view(torch.uint8).numpy() for each in (old, new))
    return int(kernel(places.contiguous().numpy(), before, after, axes, lanes, size))


@cache
def _kernel() -> ChangesKernel | None:
    """The kernel; None if this process has no Numba, of which `host.warm_up` tells."""
    try:
        from ckpt_engine.digest.host_kernel import compiled_changes

        return compiled_changes()
    except Exception as error:  # not installed, not made for this numpy, a processor that LLVM does not know
        log.warning("changes of digests are summed by torch, slowly: %s", f"{error}".partition("\n")[0])
        return None


def _by_torch(
    shape: Sequence[int],
    hashes: Sequence[int],
    lanes: Sequence[int],
    places: torch.Tensor,
    old: torch.Tensor,
    new: torch.Tensor,
) -> int:
    """The sum where the elements are. Arithmetic of int64 is modulo 2^64 on every device."""
    total = 0
    for first in range(0, len(places), _AT_ONCE):
        part = slice(first, first + _AT_ONCE)
        difference = _lanes_of(new[part]) - _lanes_of(old[part])
        weights = torch.tensor([_signed(each) for each in lanes], dtype=torch.int64, device=places.device)
        weighted = (difference * weights).sum(1)
        rest = places[part]
        for length, start in zip(reversed(shape), reversed(hashes), strict=True):
            weighted = weighted * _words(start, rest % length)
            rest = rest // length
        total += int(weighted.sum())
    return total & MASK


def _lanes_of(elements: torch.Tensor) -> torch.Tensor:
    """int64 [elements, lanes]."""
    if elements.itemsize == 1:
        return elements.view(torch.uint8).to(torch.int64)[:, None]
    return elements.contiguous().view(torch.int16).reshape(len(elements), -1).to(torch.int64) & 0xFFFF


def _words(first: int, coordinates: torch.Tensor) -> torch.Tensor:
    """`factors.word` of coordinates, of which `first` is the hash of the first one."""
    x = coordinates * _signed(INDEX_STEP) + _signed(first)
    for shift, factor in ((30, MIX_1), (27, MIX_2)):
        x = (x ^ _shifted(x, shift)) * _signed(factor)
    return (x ^ _shifted(x, 31)) | 1


def _shifted(x: torch.Tensor, by: int) -> torch.Tensor:
    """A shift to the right without the sign."""
    return (x >> by) & ((1 << (64 - by)) - 1)


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number
