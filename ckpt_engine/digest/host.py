"""Digests of boxes in the memory of this host, by the formula of digest/factors.py.

Boxes become jobs (digest/host_jobs.py) for a kernel that Numba compiles (digest/host_kernel.py). Threads share the
jobs, outside of the interpreter's lock. Without Numba, numpy digests at a tenth of the speed.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
import numpy.typing as npt
import torch

from ckpt_engine.core.problems import invalid, precondition
from ckpt_engine.digest.factors import MASK, SEED, Words, digest_of_zeros, hashed, words
from ckpt_engine.digest.finite import RULES, FiniteRule
from ckpt_engine.torch_dtypes import dtype_name

if TYPE_CHECKING:
    from ckpt_engine.digest.host_kernel import Kernel

log = logging.getLogger(__name__)

HostBox = tuple[torch.Tensor, Sequence[int]]
"""View, first global coordinate of each axis."""

Item = TypeVar("Item")
Result = TypeVar("Result")

_SHARE_BYTES = 1 << 20  # at least, of what a thread takes at once
_SHARES = 4  # for each thread
_NUMPY_LANES = 1 << 17  # whose 64-bit products exist at one time


def digest_host_boxes(boxes: Sequence[HostBox], seed: int = SEED) -> list[int]:
    """Digests as `digest_boxes` does, for boxes in the host's memory, without casts."""
    return HostDigests(boxes, seed).run()


def warm_up() -> str:
    """Loads or compiles the kernel for host memory: a second or two in a process's first call, then no time. Returns
    why digests come from numpy, slowly; empty if they do not. Any thread. Never raises."""
    return _loaded()[1]


def _kernel() -> Kernel | None:
    return _loaded()[0]


@cache
def _loaded() -> tuple[Kernel | None, str]:
    """The kernel, or why this process has none, which is logged once."""
    try:
        from ckpt_engine.digest.host_kernel import compiled

        return compiled(), ""
    except Exception as error:  # not installed, not made for this numpy, a processor that LLVM does not know
        why = f"Numba cannot be used ({type(error).__name__}: {error})".partition("\n")[0]
        log.warning("digests of host memory come from numpy, at a tenth of the speed: %s", why)
        return None, why


def checked_box(view: torch.Tensor, start: Sequence[int], served: torch.dtype | None = None) -> torch.Tensor:
    """The plain tensor to digest. Raises INVALID_ARGUMENT for an unsupported dtype or a start that does not fit."""
    if view.dim() != len(start):
        raise invalid(f"a box of shape {list(view.shape)} cannot start at {list(start)}; give one entry an axis")
    dtype_name(view.dtype)
    if served is not None:
        dtype_name(served)
    if type(view) is not torch.Tensor:
        view = view.as_subclass(torch.Tensor)
    return view.detach()


class HostDigests:
    """Prepared digests of boxes of this host's memory. Keeps the views. Used from any thread."""

    def __init__(
        self,
        boxes: Sequence[HostBox],
        seed: int = SEED,
        sources: Sequence[torch.Tensor] | None = None,
        finite: bool = False,
    ) -> None:
        """sources: for each box, the memory that a run copies to it first, in one pass over memory; of the same shape
        and dtype, overlapping with no box. finite: look for NaN and infinity, too. A lazily conjugated or negated view
        is resolved here, once. Raises as `digest_box`, and INVALID_ARGUMENT for views that are not strided memory of
        this host, or a source that does not fit its box."""
        self._seed = seed
        self._boxes = [(_plain(view, start), tuple(start)) for view, start in boxes]
        zeros = (digest_of_zeros(dtype_name(view.dtype), at, tuple(view.shape), seed) for view, at in self._boxes)
        self._zeros: Words = np.fromiter(zeros, dtype=np.uint64, count=len(boxes))  # what the lanes' sums are added to
        self.not_finite: list[bool] = []
        """Which boxes held NaN or infinity in the last run, if `finite` was set."""
        names = [dtype_name(view.dtype) if finite else "" for view, _ in self._boxes]
        self._rules = [RULES.get(name) for name in names]
        plain = [] if sources is None else _plain_sources(sources, self._boxes)
        self._sources: list[torch.Tensor | None] = [*plain] or [None] * len(boxes)
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._kernel = _kernel()
        if self._kernel is None:
            if plain:
                self._copies = [(view, source) for (view, _), source in zip(self._boxes, plain, strict=True)]
            return
        from ckpt_engine.digest.host_jobs import jobs_of, join, lie_alike, look_for

        layouts = []
        for index, ((view, start), source) in enumerate(zip(self._boxes, self._sources, strict=True)):
            shape, strides = tuple(view.shape), view.stride()
            other = None if source is None else source.stride()
            if source is not None and not lie_alike(shape, strides, source.stride(), view.itemsize):
                self._copies.append((view, source))
                self._sources[index] = other = None
            layouts.append(jobs_of(shape, strides, other, start, view.itemsize, seed))
        self._jobs, self._of_job, self._ends = join(layouts)
        look_for(self._jobs, self._of_job, self._rules)

    def run(self) -> list[int]:
        """The digests as the bytes are now, in order. Raises FAILED_PRECONDITION if a tensor's memory was freed."""
        for view, source in self._copies:
            view.copy_(source)
        if self._kernel is None:
            sums = [_by_numpy(view, start, self._seed) for view, start in self._boxes]
            self.not_finite = [
                rule is not None and _greatest(_lanes_of(view), rule) >= rule.least
                for (view, _), rule in zip(self._boxes, self._rules, strict=True)
            ]
            return [(one + other) & MASK for one, other in zip(self._zeros.tolist(), sums, strict=True)]
        jobs = self._jobs_now()
        found = np.empty(len(jobs), dtype=np.uint64)
        greatest = np.empty(len(jobs), dtype=np.uint64)
        _share_out(self._kernel, jobs, found, greatest, self._ends)
        most = np.zeros(len(self._boxes), dtype=np.uint64)
        np.maximum.at(most, self._of_job, greatest)
        rules = zip(most.tolist(), self._rules, strict=True)
        self.not_finite = [rule is not None and each >= rule.least for each, rule in rules]
        digests = self._zeros.copy()
        np.add.at(digests, self._of_job, found)
        return [int(each) for each in digests]

    def _jobs_now(self) -> Words:
        """The jobs with their addresses. Raises FAILED_PRECONDITION."""
        jobs = self._jobs.copy()
        jobs[:, 0] += _addresses([view for view, _ in self._boxes])[self._of_job]
        jobs[:, 1] += _addresses(self._sources)[self._of_job]
        return jobs


def _share_out(kernel: Kernel, jobs: Words, found: Words, greatest: Words, ends: Words) -> None:
    """Runs the kernel on as many threads as torch would use. ends: bytes of all jobs up to each."""
    threads = torch.get_num_threads()
    shares = min(_SHARES * threads, int(ends[-1]) // _SHARE_BYTES) if len(ends) else 0
    if threads == 1 or shares < 2:
        kernel(jobs, found, greatest)
        return
    cuts = np.searchsorted(ends, np.arange(1, shares) * (int(ends[-1]) / shares)).tolist()
    parts = [slice(first, last) for first, last in pairwise([0, *cuts, len(jobs)])]
    in_threads(lambda part: kernel(jobs[part], found[part], greatest[part]), parts)


def in_threads(work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """Does this work for each item, on as many threads as torch would use. Returns what came of each, in order; raises
    what one raised."""
    results: list[Result | None] = [None] * len(items)
    waiting = iter(enumerate(items))

    def some() -> None:
        for number, item in waiting:  # the interpreter's lock gives each to one thread
            results[number] = work(item)

    # Waking a thread takes as long as half a share, so each is woken once and then takes further items.
    threads = torch.get_num_threads()
    helping = [_pool(os.getpid(), threads).submit(some) for _ in range(min(threads, len(items)) - 1)]
    some()
    for each in helping:
        each.result()
    return cast("list[Result]", results)


@cache
def _pool(process: int, threads: int) -> ThreadPoolExecutor:
    """process: threads do not survive a fork."""
    return ThreadPoolExecutor(threads, thread_name_prefix="ckpt-engine-digest")


def _plain(view: torch.Tensor, start: Sequence[int]) -> torch.Tensor:
    view = checked_box(view, start)
    if view.device.type != "cpu" or view.layout is not torch.strided:
        raise invalid(f"a {view.layout} tensor on {view.device} is not strided memory of this host")
    return view.resolve_conj().resolve_neg()


def _plain_sources(sources: Sequence[torch.Tensor], boxes: Sequence[HostBox]) -> list[torch.Tensor]:
    for source, (view, _) in zip(sources, boxes, strict=True):
        if view.shape != source.shape or view.dtype != source.dtype:
            raise invalid(
                f"{source.dtype} {list(source.shape)} cannot be copied to {view.dtype} {list(view.shape)} and "
                "digested: both must have one shape and dtype"
            )
    return [_plain(source, start) for source, (_, start) in zip(sources, boxes, strict=True)]


def _addresses(views: Sequence[torch.Tensor | None]) -> Words:
    addresses = [0 if view is None else view.data_ptr() for view in views]
    for view, address in zip(views, addresses, strict=True):
        if view is not None and not address and view.numel():
            raise precondition(f"the memory of a tensor of shape {list(view.shape)} was freed: publish again")
    return np.array(addresses, dtype=np.uint64)


def _by_numpy(view: torch.Tensor, start: tuple[int, ...], seed: int) -> int:
    """The sum of the formula, axis by axis."""
    lanes = _lanes_of(view)
    axes = zip((*range(1, view.dim() + 1), 0), (*start, 0), lanes.shape, strict=True)
    return _contract(lanes, [words(hashed(seed, axis, first), length) for axis, first, length in axes])


def _lanes_of(view: torch.Tensor) -> npt.NDArray[Any]:
    """An element's lanes are the last axis."""
    signed, unsigned = (torch.uint8, np.uint8) if view.itemsize == 1 else (torch.int16, np.uint16)
    lanes: npt.NDArray[Any] = view.unsqueeze(-1).view(signed).numpy().view(unsigned)
    return lanes


def _greatest(lanes: npt.NDArray[Any], rule: FiniteRule) -> int:
    """The greatest lane, as digest/finite.py defines it."""
    if lanes.size > _NUMPY_LANES and max(lanes.shape[:-1]) > 1:
        return max(_greatest(half, rule) for half in np.array_split(lanes, 2, int(np.argmax(lanes.shape[:-1]))))
    bits = 8 * lanes.itemsize
    flip, mask = np.array([rule.of_lane(lane, bits) for lane in range(lanes.shape[-1])], dtype=lanes.dtype).T
    return int(((lanes ^ flip) & mask).max(initial=0))


def _contract(lanes: npt.NDArray[Any], factors: Sequence[Words]) -> int:
    """The sum of lanes times the factor of each of their axes, modulo 2^64."""
    if lanes.size > _NUMPY_LANES:
        axis = int(np.argmax(lanes.shape))
        halves = zip(np.array_split(lanes, 2, axis), np.array_split(factors[axis], 2), strict=True)
        return sum(_contract(half, [*factors[:axis], its, *factors[axis + 1 :]]) for half, its in halves) & MASK
    sums = lanes.astype(np.uint64)
    for each in reversed(factors):
        sums = sums @ each
    return int(sums)
