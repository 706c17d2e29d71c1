"""Repeated digests of the same boxes: everything that can be done once is done once.

Boxes may lie on a CPU and on any number of GPUs. Those on a GPU are digested there (digest/cuda.py) where Triton is
installed; else on the host, after a copy, which is logged once.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from functools import cache

import torch

from ckpt_engine.core.problems import invalid
from ckpt_engine.digest import cuda as digest_cuda
from ckpt_engine.digest.factors import SEED
from ckpt_engine.digest.host import HostDigests, checked_box

log = logging.getLogger(__name__)

Served = Sequence[torch.dtype | None] | None
"""The dtype as which each box is digested; None: its own."""

_Found = tuple[list[int], list[bool]]
"""Digests of boxes, and which of them hold NaN or infinity."""

_KEPT = 8
_HOST_BYTES = 256 << 20  # of casts and of copies from a GPU that exist at one time


class PreparedDigests:
    """Prepared digests of checked boxes. Keeps the views. Used from one thread at a time."""

    def __init__(self, boxes: Sequence[digest_cuda.Box], seed: int, finite: bool = False) -> None:
        self._boxes = list(boxes)
        self._seed = seed
        self._finite = finite
        self.not_finite: list[bool] = []
        """Which boxes held NaN or infinity when digests were last collected, if `finite` was set."""
        self._converted: list[int] = []  # at each run, before the host digests them
        self._cuda: list[tuple[list[int], digest_cuda.CudaDigests]] = []
        self._found: list[tuple[list[int], _Found]] = []
        as_they_are: list[int] = []
        on_device: dict[torch.device, list[int]] = {}
        for index, (view, _, served) in enumerate(self._boxes):
            if view.device.type == "cuda":
                on_device.setdefault(view.device, []).append(index)
            elif view.dtype != served or view.is_conj() or view.is_neg():
                self._converted.append(index)
            else:
                as_they_are.append(index)
        self._host = as_they_are, HostDigests([self._boxes[index][:2] for index in as_they_are], seed, finite=finite)
        for device, indices in on_device.items():
            digests = _on_gpu(device, [self._boxes[index] for index in indices], seed, finite)
            if digests is None:
                self._converted += indices
            else:
                self._cuda.append((indices, digests))

    @property
    def bytes(self) -> int:
        """Bytes that one run reads."""
        return sum(view.nbytes for view, _, _ in self._boxes)

    @property
    def launches(self) -> int:
        """Kernels that one run launches; 0 if all is done on the host."""
        return sum(digests.launches for _, digests in self._cuda)

    def launch(self) -> None:
        """Queues the work of GPUs, each on its current stream, and carries out that of the host."""
        for _, digests in self._cuda:
            digests.launch()
        converted = _of_host([self._boxes[index] for index in self._converted], self._seed, self._finite)
        indices, of_host = self._host
        self._found = [(indices, (of_host.run(), of_host.not_finite)), (self._converted, converted)]

    def collect(self) -> list[int]:
        """The digests of the bytes as they were when launched, in order. Waits for its own work, not for a device."""
        found, self.not_finite = [0] * len(self._boxes), [False] * len(self._boxes)
        parts = [(indices, (digests.collect(), digests.not_finite)) for indices, digests in self._cuda]
        for indices, (values, not_finite) in [*parts, *self._found]:
            for index, value, wrong in zip(indices, values, not_finite, strict=True):
                found[index], self.not_finite[index] = value, wrong
        return found

    def run(self) -> list[int]:
        """The digests as the bytes are now, in order."""
        self.launch()
        return self.collect()


def prepare_digests(
    boxes: Sequence[tuple[torch.Tensor, Sequence[int]]],
    seed: int = SEED,
    served: Served = None,
    finite: bool = False,
) -> PreparedDigests:
    """Prepares digests of boxes, on the calling thread. The first call of a process, or on a GPU, compiles, which takes
    seconds.

    boxes: as in `digest_boxes`. served: digests are of `view.to(dtype)`, rounded to nearest even as torch does. A NaN
    may become any other NaN, so weights with NaN may differ between a GPU and a CPU. finite: look for NaN and infinity
    in the values that are digested, too. Raises INVALID_ARGUMENT as `digest_box`.
    """
    return PreparedDigests(_check_boxes(boxes, served), seed, finite)


def digest_anywhere(
    boxes: Sequence[tuple[torch.Tensor, Sequence[int]]], seed: int = SEED, served: Served = None
) -> list[int]:
    """Digests as `digest_boxes` does, also for boxes that lie on a GPU or are cast. Caches the tables of the last few
    sets of boxes, by address; they keep no tensor alive."""
    checked = _check_boxes(boxes, served)
    digests = [0] * len(checked)
    of_device: dict[torch.device, list[int]] = {}
    for index, (view, _, _) in enumerate(checked):
        of_device.setdefault(view.device, []).append(index)
    for device, indices in of_device.items():
        part = [checked[index] for index in indices]
        found = _cached(device, part, seed) if device.type == "cuda" else None
        values = _of_host(part, seed)[0] if found is None else found.run()
        for index, value in zip(indices, values, strict=True):
            digests[index] = value
    return digests


def _check_boxes(boxes: Sequence[tuple[torch.Tensor, Sequence[int]]], served: Served) -> list[digest_cuda.Box]:
    dtypes = [None] * len(boxes) if served is None else served
    if len(dtypes) != len(boxes):
        raise invalid(f"{len(dtypes)} dtypes for {len(boxes)} boxes; give one, or None, for each")
    checked = []
    for (view, start), dtype in zip(boxes, dtypes, strict=True):
        plain = checked_box(view, tuple(start), dtype)
        checked.append((plain, tuple(start), plain.dtype if dtype is None else dtype))
    return checked


def _on_gpu(
    device: torch.device, boxes: Sequence[digest_cuda.Box], seed: int, finite: bool = False
) -> digest_cuda.CudaDigests | None:
    """Prepares digests on a GPU; None, with the reason logged once, if the host has to digest the boxes."""
    why = digest_cuda.missing()
    if not why:
        try:
            return digest_cuda.CudaDigests(boxes, seed, finite)
        except Exception as error:  # a compiler that is not there, memory that is not: slower, not wrong
            why = f"{type(error).__name__}: {error}"
    _warn(str(device), why.partition("\n")[0])
    return None


@cache
def _warn(device: str, why: str) -> None:
    log.warning("digests of %s are worked out on the host, at a fraction of the speed: %s", device, why)


_lock = threading.Lock()
_prepared: OrderedDict[Hashable, digest_cuda.CudaDigests] = OrderedDict()


def _cached(device: torch.device, boxes: Sequence[digest_cuda.Box], seed: int) -> digest_cuda.CudaDigests | None:
    key = (device, seed, *((v.data_ptr(), v.shape, v.stride(), v.dtype, start, served) for v, start, served in boxes))
    with _lock:
        found = _prepared.get(key)
        if found is not None:
            _prepared.move_to_end(key)
            return found
    digests = _on_gpu(device, boxes, seed)
    if digests is not None and digests.forget():
        with _lock:
            _prepared[key] = digests
            while len(_prepared) > _KEPT:
                _prepared.popitem(last=False)
    return digests


def _of_host(boxes: Sequence[digest_cuda.Box], seed: int, finite: bool = False) -> _Found:
    """Digests on the host; casts, and copies from a GPU, are made for some boxes at a time."""
    digests: list[int] = []
    not_finite: list[bool] = []

    def digest() -> None:
        some = HostDigests(waiting, seed, finite=finite)
        digests.extend(some.run())
        not_finite.extend(some.not_finite)

    waiting: list[tuple[torch.Tensor, tuple[int, ...]]] = []
    size = 0
    for view, start, served in boxes:
        host_view = view.to(device="cpu", dtype=served)
        size += host_view.nbytes if host_view is not view else 0
        waiting.append((host_view, start))
        if size > _HOST_BYTES:
            digest()
            waiting, size = [], 0
    digest()
    return digests, not_finite
